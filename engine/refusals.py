"""What `engine.validation` raises when it refuses a folder, for callers that may not know the room
of adapters. Ignorant of why.
"""

from __future__ import annotations

from engine.errors import UnsupportedModelError
from lora.errors import AdapterError

REFUSALS: tuple[type[Exception], ...] = (UnsupportedModelError, AdapterError)
