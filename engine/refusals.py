"""The errors that refuse an adapter, for callers that may not import the lora room: bad files, or
too little room for good files. The reasons are opaque here.
"""

from __future__ import annotations

from engine.errors import UnsupportedModelError
from lora.errors import AdapterError, HostMemoryError

REFUSALS: tuple[type[Exception], ...] = (UnsupportedModelError, AdapterError)
NO_ROOM: tuple[type[Exception], ...] = (HostMemoryError,)  # now; room returns as requests end
