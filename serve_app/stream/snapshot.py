"""The state of an engine after its newest step, encoded once for many links.

Hundreds of 64-character digests per step would outweigh the tokens: a link that has received them
gets a frame without. Ignorant of sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from msgspec import Raw

from engine.types import EngineLoad, StepOutput, TokenOutput
from serve_app.stream.wire import Accepted, LoadSeconds, Step, encode_frame

Digests = tuple[str, ...]
Same = tuple[bool, bool]  # the link has received these adapters in memory, and these on disk
Output = TokenOutput | Raw  # Raw: encoded by `encode_output`


class EngineSnapshot:
    """`adapters` and `on_disk` remain the same objects as long as their contents do not change."""

    def __init__(self) -> None:
        self.load = EngineLoad()
        self.adapters: tuple[Digests, Digests] = ((), ())  # on the device, on the host
        self.on_disk: Digests = ()
        self.load_s = LoadSeconds()
        self.stall = 0.0  # see `Step.stall`
        self.prefixes: set[int] = set()
        self.cached: tuple[int, ...] = ()  # in the newest step
        self.evicted: tuple[int, ...] = ()
        self._bare_load = EngineLoad()
        self._frames: dict[Same, bytes] = {}

    def observe(self, step: StepOutput, stall: float = 0.0) -> None:
        self.stall = stall
        load = self.load = step.load
        adapters = (load.adapters_on_device, load.adapters_on_host)
        if adapters != self.adapters:
            self.adapters = adapters
        self.cached, self.evicted = step.cached_prefixes, step.evicted_prefixes
        self.prefixes.update(self.cached)
        self.prefixes.difference_update(self.evicted)
        if load.adapter_copy_s != self.load_s.host:
            self.load_s = LoadSeconds(load.adapter_copy_s, *self.load_s[1:])
        self._bare_load = replace(load, adapters_on_device=(), adapters_on_host=())
        self._frames.clear()

    def note_disk(self, on_disk: Digests, disk_s: float, registry_s: float) -> None:
        """Sets the adapters on the node's disk, for the frames from the next step on."""
        if on_disk != self.on_disk:
            self.on_disk = on_disk
        self.load_s = LoadSeconds(self.load_s.host, disk_s, registry_s)

    def shared_frame(self, same: Same) -> bytes:
        """Returns the frame for links without outputs that received the last frame."""
        frame = self._frames.get(same)
        if frame is None:
            frame = self.frame_for((), (), self.cached, self.evicted, False, same)
            self._frames[same] = frame
        return frame

    def frame_for(
        self,
        outputs: Sequence[Output],
        accepted: Sequence[Accepted],
        cached: tuple[int, ...],
        evicted: tuple[int, ...],
        is_whole: bool,
        same: Same,
    ) -> bytes:
        """Returns the frame for a single link. `cached`, `evicted`: prefix digests since the link's
        last frame; `is_whole`: `cached` has all of them."""
        same_adapters, same_disk = same
        step = Step(
            cast(tuple[TokenOutput, ...], tuple(outputs)),  # Raw is encoded as its content
            self._bare_load if same_adapters else self.load,
            same_adapters,
            tuple(accepted),
            cached,
            evicted,
            is_whole,
            None if same_disk else self.on_disk,
            self.load_s,
            self.stall,
        )
        return encode_frame(step)
