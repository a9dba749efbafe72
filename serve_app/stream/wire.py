"""The side stream's wire: one TCP connection from each engine actor to each ingress replica.

The engine sends one `Step` a step with all tokens for that ingress, the ingress sends `Abort`s
back. A frame is a 4-byte big-endian length and a msgpack array; nothing is ever unpickled. The
first frame is `Hello` with the ingress's random token. Both ends build on this file:
`stream_server` (ingress) and `stream_client` (engine). Ignorant of Ray and HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from engine.types import EngineLoad, TokenOutput

# The largest content is one output with the prompt logprobs of a long prompt: 103 MB where a
# request asks for as many as it may.
MAX_STEP_BYTES = 128 * 1024 * 1024
MAX_CONTROL_BYTES = 64 * 1024
HEARTBEAT_S = 1.0  # an idle engine still says how it is
SILENCE_S = 10.0  # without a frame, or in a step that should take less: the engine is given up
SHUN_S = 3.0  # of such a silence: nothing new is sent there

_LENGTH_BYTES = 4

AbortReason = Literal["abort", "stop"]  # nobody reads on, or the text ended at a stop string


class StreamError(Exception):
    """The side stream broke, or the peer did not keep to its rules."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """`engine_key`: of the engine's process; no other connects under its id."""

    token: str
    engine_id: str
    engine_key: str


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """The engine has this request: from this frame on its load counts it."""

    request_id: str
    adapter_s: float  # what it waited for its adapter
    found_in: str  # the adapter's tier when it came: device, host, disk, registry; "": none


class Step(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """`same_adapters`: the load's digests are left out, they are those of the frame before."""

    outputs: tuple[TokenOutput, ...]
    load: EngineLoad
    same_adapters: bool
    accepted: tuple[Accepted, ...] = ()
    # Of the prefix cache: what came and went since the frame before, or, first of all, the whole.
    cached_prefixes: tuple[int, ...] = ()
    evicted_prefixes: tuple[int, ...] = ()
    is_whole: bool = False
    # Digests of adapters on the node's disk; None: as in the frame before.
    adapters_on_disk: tuple[str, ...] | None = None
    # Seconds that an adapter takes from each tier, measured: copy to device, disk, registry.
    load_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    # How far the step under way is on its way to counting as hung; from 1 on it does. 0 after a
    # step, and without work.
    stall: float = 0.0


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=2):
    request_id: str
    choice: int | None  # None: every choice
    reason: AbortReason = "abort"


Frame = Hello | Step | Abort

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    payload = _encoder.encode(frame)
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


def encode_output(output: TokenOutput) -> bytes:
    """The output as it stands in a `Step`; `msgspec.Raw` of these bytes may take its place."""
    return _encoder.encode(output)


def decode_frame(payload: bytes) -> Frame:
    try:
        frame: Frame = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StreamError(f"undecodable frame of {len(payload)} bytes: {error}") from None
    return frame


class FrameSplitter:
    """Bytes as they arrive -> whole payloads. Refuses by length, before a frame is buffered."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Lazy, so that the reader may raise the limit between two frames of the same bytes."""
        self._buffer += data
        start = 0
        while (size := self._frame_size(start)) is not None:
            end = start + _LENGTH_BYTES + size
            if end > len(self._buffer):
                break
            yield bytes(self._buffer[start + _LENGTH_BYTES : end])
            start = end
        del self._buffer[:start]

    def _frame_size(self, start: int) -> int | None:
        header = self._buffer[start : start + _LENGTH_BYTES]
        if len(header) < _LENGTH_BYTES:
            return None
        size = int.from_bytes(header, "big")
        if size > self.max_frame_bytes:
            raise StreamError(f"frame of {size} bytes, the limit is {self.max_frame_bytes}")
        return size
