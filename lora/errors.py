"""Errors of this room, all safe to pickle (args go to `super().__init__`).

LoraError
|- AdapterError             a folder that we refuse; the message is the reason
|  `- AdapterTooLargeError  it could never fit, however empty the pool
|- AdapterNotLoadedError    the pool does not hold this digest (any more)
|- HostMemoryError          the host tier is full of adapters in use
`- PinnedMemoryError        next to the pinned adapters, one adapter could never come in
"""

from __future__ import annotations


class LoraError(Exception):
    pass


class AdapterError(LoraError):
    pass


class AdapterTooLargeError(AdapterError):
    pass


class AdapterNotLoadedError(LoraError):
    pass


class HostMemoryError(LoraError):
    pass


class PinnedMemoryError(LoraError):
    pass
