"""The side stream's wire: one TCP connection from each engine actor to each ingress replica.

The engine sends one `Step` per step with all tokens for that ingress, the ingress sends `Abort`s
back. A frame is a 4-byte big-endian length and a msgpack array; no byte is ever unpickled. The
first frame is `Hello` with the ingress's random token. Both ends use this file: `stream.server`
(ingress) and `stream.client` (engine). Ignorant of Ray and HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from engine.types import EngineLoad, TokenOutput

# The largest content is an output with the prompt logprobs of a long prompt: 103 MB with the
# most logprobs that a request may ask for.
MAX_STEP_BYTES = 128 * 1024 * 1024
MAX_CONTROL_BYTES = 64 * 1024
HEARTBEAT_S = 1.0  # the period of frames from an idle engine
SILENCE_S = 10.0  # an engine without a frame for so long, or in an overdue step, is given up
DEPRIORITISE_S = 3.0  # after so much of that silence it gets no new requests

_LENGTH_BYTES = 4

AbortReason = Literal["abort", "stop"]  # the reader left, or the text ended at a stop string


class StreamError(Exception):
    """The side stream broke, or the peer violated the protocol."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first frame. `engine_key`: a secret of the engine's process, so that no other process
    connects under its id."""

    token: str
    engine_id: str
    engine_key: str


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """Reports that the engine has accepted this request: from this frame on its load counts it."""

    request_id: str
    adapter_s: float  # seconds that it waited for its adapter
    found_in: str  # where the adapter was: device, host, disk, registry; "": no adapter


class LoadSeconds(NamedTuple):
    """The seconds until an adapter can be used, by the tier that holds it, as the engine replica
    measured them; 0 if not yet measured."""

    host: float = 0.0
    disk: float = 0.0
    registry: float = 0.0


NOT_MEASURED = LoadSeconds()


class Step(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A step. `same_adapters`: the load leaves out its digests, which are the same as in the last
    frame."""

    outputs: tuple[TokenOutput, ...]
    load: EngineLoad
    same_adapters: bool
    accepted: tuple[Accepted, ...] = ()
    # The prefix cache: its changes since the last frame, or all of it in the first frame.
    cached_prefixes: tuple[int, ...] = ()
    evicted_prefixes: tuple[int, ...] = ()
    is_whole: bool = False
    # Digests of adapters on the node's disk; None: as in the last frame.
    adapters_on_disk: tuple[str, ...] | None = None
    load_s: LoadSeconds = NOT_MEASURED
    # The age of the step under way as a share of the age at which it counts as hung. 0 after a
    # step, and without work.
    stall: float = 0.0


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Ends a request, or a single choice of it."""

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
    """Encodes an output as in a `Step`; a `msgspec.Raw` of these bytes may replace the output."""
    return _encoder.encode(output)


def decode_frame(payload: bytes) -> Frame:
    try:
        frame: Frame = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StreamError(f"undecodable frame of {len(payload)} bytes: {error}") from None
    return frame


class FrameSplitter:
    """Splits the received bytes into payloads. Rejects a frame by its length, before buffering."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the payloads lazily, so that the reader may raise the limit between two frames of
        the same bytes."""
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
