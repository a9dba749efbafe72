"""What an engine tells all ingresses, as of its newest step; one encoding serves many links.

Hundreds of 64-character digests a step would outweigh the tokens: a link that has them already gets
a frame without. Ignorant of sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from msgspec import Raw

from engine.types import EngineLoad, StepOutput, TokenOutput
from serve_app.stream.wire import Accepted, Step, encode_frame

Digests = tuple[str, ...]
Output = TokenOutput | Raw  # the second: encoded already, by `encode_output`


class EngineSnapshot:
    """`adapters` and `on_disk` are the same objects as long as nothing in them changes."""

    def __init__(self) -> None:
        self.load = EngineLoad()
        self.adapters: tuple[Digests, Digests] = ((), ())  # on the device, on the host
        self.on_disk: Digests = ()
        self.load_s = (0.0, 0.0, 0.0)  # as `Step.load_s`
        self.stall = 0.0  # as `Step.stall`
        self.prefixes: set[int] = set()
        self.cached: tuple[int, ...] = ()  # by the newest step
        self.evicted: tuple[int, ...] = ()
        self._bare_load = EngineLoad()
        self._frames: dict[tuple[bool, bool], bytes] = {}

    def observe(self, step: StepOutput, stall: float = 0.0) -> None:
        self.stall = stall
        load = self.load = step.load
        adapters = (load.adapters_on_device, load.adapters_on_host)
        if adapters != self.adapters:
            self.adapters = adapters
        self.cached, self.evicted = step.cached_prefixes, step.evicted_prefixes
        self.prefixes.update(self.cached)
        self.prefixes.difference_update(self.evicted)
        self.load_s = (load.adapter_copy_s, *self.load_s[1:])
        self._bare_load = replace(load, adapters_on_device=(), adapters_on_host=())
        self._frames.clear()

    def note_disk(self, on_disk: Digests, disk_s: float, registry_s: float) -> None:
        """For the frames from the next step on."""
        if on_disk != self.on_disk:
            self.on_disk = on_disk
        self.load_s = (self.load_s[0], disk_s, registry_s)

    def frame(self, *, same_adapters: bool, same_disk: bool) -> bytes:
        """Of a link without outputs of its own that got the frame before."""
        key = (same_adapters, same_disk)
        frame = self._frames.get(key)
        if frame is None:
            step = Step(
                (),
                self._bare_load if same_adapters else self.load,
                same_adapters,
                (),
                self.cached,
                self.evicted,
                False,
                None if same_disk else self.on_disk,
                self.load_s,
                self.stall,
            )
            frame = self._frames[key] = encode_frame(step)
        return frame

    def own_frame(
        self,
        outputs: Sequence[Output],
        accepted: Sequence[Accepted],
        changes: dict[int, bool] | None,
        *,
        same_adapters: bool,
        same_disk: bool,
    ) -> bytes:
        """`changes`: digest -> it came, since this link's last frame; None: it gets the whole."""
        cached = self.prefixes if changes is None else [d for d, came in changes.items() if came]
        evicted = () if changes is None else (d for d, came in changes.items() if not came)
        step = Step(
            cast(tuple[TokenOutput, ...], tuple(outputs)),  # Raw is encoded as what it holds
            self._bare_load if same_adapters else self.load,
            same_adapters,
            tuple(accepted),
            tuple(cached),
            tuple(evicted),
            changes is None,
            None if same_disk else self.on_disk,
            self.load_s,
            self.stall,
        )
        return encode_frame(step)
