"""What refuses an adapter, for callers that may not know the room of adapters: bad files, or too
little room for good ones. Ignorant of why.
"""

from __future__ import annotations

from engine.errors import UnsupportedModelError
from lora.errors import AdapterError, HostMemoryError

REFUSALS: tuple[type[Exception], ...] = (UnsupportedModelError, AdapterError)
NO_ROOM: tuple[type[Exception], ...] = (HostMemoryError,)  # now; it comes as requests end
