"""The process that owns an engine: `EngineHost`, and the Ray actor that runs it.

Accepts submit calls (held open until their requests end), sends every step to every ingress over
the side stream, to each with its own tokens, and aborts requests that are no longer read. A factory
opens the engine, so that tests can use another one with the same interface. Ignorant of HTTP and
text.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import pkgutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import ray

from engine.admission import EngineLimits
from engine.config import EngineConfig
from engine.errors import EngineDeadError, InvalidRequestError
from engine.service import EngineInterface
from engine.types import EngineLoad, Request, Resident, StepOutput, TokenOutput, key_digests
from serve_app.config import log_format
from serve_app.logs import install
from serve_app.messages import StreamAddress
from serve_app.metrics.engine import EngineMetrics
from serve_app.metrics.exposition import join_texts
from serve_app.replica.background import in_background
from serve_app.stream.client import IngressLink, IngressLinks
from serve_app.stream.snapshot import Digests
from serve_app.stream.wire import HEARTBEAT_S, SILENCE_S, Abort, AbortReason, Accepted, StreamError
from serve_app.tasks import failures_text, keep

logger = logging.getLogger(__name__)

EngineFactory = Callable[[EngineConfig], EngineInterface]

# A step may last this many times the longest step of its size: on a CPU with shared cores a prompt
# lasts several times as long as alone.
_PATIENCE = 8.0
_GIVE_UP_AT = 1.2  # as `Step.stall`: ingresses migrate the requests earlier, at 1
_GIVE_UP_BEATS = 2
_LATE_BEAT_S = 0.5  # the event loop or the process was delayed


@dataclass(slots=True, eq=False)
class _Call:
    """A submit call: engine requests whose tokens go to the same ingress."""

    link: IngressLink
    done: asyncio.Future[None]
    open_choices: set[tuple[str, int]] = field(default_factory=set)
    unsent: dict[str, Accepted] = field(default_factory=dict)  # by request id, until accepted


class EngineHost:
    """Everything that the actor does, without Ray. All methods belong to the event loop."""

    def __init__(
        self,
        engine: EngineInterface,
        engine_id: str,
        metrics: EngineMetrics,
        stall_timeout_s: float = 60.0,
    ) -> None:
        """`stall_timeout_s`: a step that lasts longer counts as hung in any case."""
        self._engine = engine
        self._stall_timeout_s = stall_timeout_s
        self._metrics = metrics
        self._calls: dict[str, _Call] = {}  # by request id
        self._dialling: set[str] = set()  # ids of requests while their ingress is dialled
        self._links = IngressLinks(engine_id, self._on_abort, self._on_lost)
        self._heartbeat: asyncio.Task[None] | None = None
        self.dead = asyncio.Event()

    def start(self) -> None:
        loop = asyncio.get_running_loop()

        # Both are called in the engine's thread.
        def on_step(step: StepOutput) -> None:
            loop.call_soon_threadsafe(self._on_step, step)

        def on_death(error: EngineDeadError) -> None:
            loop.call_soon_threadsafe(self._on_death, error)

        self._engine.subscribe(on_step)
        self._engine.on_death(on_death)
        self._engine.start()
        self._links.snapshot.observe(StepOutput((), self._engine.load()))
        self._heartbeat = keep(self._beat, "heartbeat")

    def stop(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._links.close()
        self._engine.stop()

    def stall(self) -> float:
        """The stall as in `Step.stall`; infinite when the engine is dead."""
        age_s = self._engine.last_step_age_s()
        if not age_s:
            return 0.0
        limit_s = max(SILENCE_S, _PATIENCE * self._engine.usual_step_s())
        return age_s / min(limit_s, self._stall_timeout_s)

    async def attend(self, address: StreamAddress) -> None:
        """Connects to an ingress and sends it every step from now on. Raises StreamError if it
        cannot be reached."""
        await self._links.attend(address)

    def note_disk(self, on_disk: Digests, disk_s: float, registry_s: float) -> None:
        """Sends ingresses the adapters whose files are on this node, and the mean durations of
        loads from disk and from the registry; 0: not yet measured."""
        self._links.snapshot.note_disk(on_disk, disk_s, registry_s)

    async def submit(
        self,
        requests: Sequence[Request],
        reply_to: StreamAddress,
        adapter_name: str | None,
        found_in: str | None = None,
        adapter_s: float = 0.0,
    ) -> None:
        """Returns when every choice has ended or was aborted. Cancelling it aborts the rest.
        `adapter_name`: registered names, of several adapters with commas. `found_in`: the tier from
        which the last of them was loaded in `adapter_s`; None: memory."""
        link, requests = await self._open_link(requests, reply_to)
        if not requests:
            return
        call = _Call(link, asyncio.get_running_loop().create_future())
        tier = found_in or self._tier_of(requests[0].adapter)
        now_s = time.time()
        for request in requests:
            request_id = request.request_id
            if request_id in self._calls:
                self._abandon(call)
                raise InvalidRequestError(f"request id {request_id} is in use", "request_id")
            call.open_choices |= {(request_id, choice) for choice in request.choices}
            call.unsent[request_id] = Accepted(request_id, adapter_s, tier or "")
            self._calls[request_id] = call
            self._metrics.begin(request, adapter_name, now_s)
        try:
            await self._submit_each(call, requests)
            self._metrics.found_adapter(tier)
            await call.done
        finally:
            self._abandon(call)

    def abort(
        self, request_id: str, choice: int | None = None, reason: AbortReason = "abort"
    ) -> None:
        """`reason`: how the choice is counted; "stop" if its text ended at a stop string."""
        self._dialling.discard(request_id)
        call = self._calls.get(request_id)
        if call is None:
            return
        self._engine.abort(request_id, choice)
        for open_id, open_choice in tuple(call.open_choices):
            if open_id == request_id and choice in (None, open_choice):
                self._end_choice(call, request_id, open_choice, reason)

    async def abort_all(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            self.abort(request_id)

    async def load_adapter(self, name: str, digest: str, path: str) -> None:
        await self._engine.load_adapter(name, digest, path)

    async def unload_adapter(self, digest: str) -> None:
        await self._engine.unload_adapter(digest)

    async def has_adapter(self, digest: str) -> bool:
        return self._engine.has_adapter(digest)

    async def adapters(self) -> tuple[Resident, ...]:
        return await self._engine.adapters()

    async def pin_adapter(self, digest: str) -> None:
        await self._engine.pin_adapter(digest)

    async def unpin_adapter(self, digest: str) -> None:
        await self._engine.unpin_adapter(digest)

    async def evict_adapter(self, digest: str) -> None:
        await self._engine.evict_adapter(digest)

    async def load(self) -> EngineLoad:
        return self._engine.load()

    async def wait_for_death(self) -> None:
        """Returns when the engine's loop has ended or hangs."""
        await self.dead.wait()

    async def _open_link(
        self, requests: Sequence[Request], reply_to: StreamAddress
    ) -> tuple[IngressLink, Sequence[Request]]:
        """Returns the link and the requests that were not aborted while it was dialled."""
        request_ids = {request.request_id for request in requests}
        self._dialling |= request_ids
        try:
            link = await self._links.open(reply_to)
            return link, [req for req in requests if req.request_id in self._dialling]
        finally:
            self._dialling -= request_ids

    async def _submit_each(self, call: _Call, requests: Sequence[Request]) -> None:
        """Submits the requests in order; each waits for up to a step. A call that the engine
        refuses is not counted: its caller may send it again."""
        for request in requests:
            if self._calls.get(request.request_id) is not call:
                continue  # aborted while an earlier request was submitted
            try:
                await self._engine.submit(request)
            except Exception:
                for refused in requests:
                    self._metrics.withdraw(refused.request_id)
                raise
            self._send_accepted(call, request.request_id)

    def _tier_of(self, key: str | None) -> str | None:
        """The tier of memory that holds all adapters of a key after the newest step; None: no
        adapter."""
        if key is None:
            return None
        on_device = self._engine.load().adapters_on_device
        return "device" if all(digest in on_device for digest in key_digests(key)) else "host"

    def _on_step(self, step: StepOutput) -> None:
        self._metrics.observe_step(step, time.time())
        by_link: dict[IngressLink, list[TokenOutput]] = {}
        ended: list[tuple[_Call, TokenOutput]] = []
        for output in step.outputs:
            call = self._calls.get(output.request_id)
            if call is None or (output.request_id, output.choice) not in call.open_choices:
                continue  # aborted while the step ran
            if call.unsent:  # the step preceded the return of `submit`
                self._send_accepted(call, output.request_id)
            by_link.setdefault(call.link, []).append(output)
            if output.finish_reason is not None:
                ended.append((call, output))
        self._links.send(step, by_link)
        for call, output in ended:
            assert output.finish_reason is not None
            self._end_choice(call, output.request_id, output.choice, output.finish_reason)

    def _send_accepted(self, call: _Call, request_id: str) -> None:
        """Sends the acceptance, once: the load of every later step counts the request."""
        accepted = call.unsent.pop(request_id, None)
        if accepted is not None:
            call.link.accept(accepted)

    def _on_death(self, error: EngineDeadError) -> None:
        for call in set(self._calls.values()):
            if not call.done.done():
                call.done.set_exception(error)
        self.dead.set()

    def _end_choice(self, call: _Call, request_id: str, choice: int, reason: str) -> None:
        self._metrics.end_choice(request_id, choice, reason, time.time())
        call.open_choices.discard((request_id, choice))
        if all(open_id != request_id for open_id, _ in call.open_choices):
            self._calls.pop(request_id, None)
        if not call.open_choices and not call.done.done():
            call.done.set_result(None)

    def _abandon(self, call: _Call) -> None:
        for request_id in {request_id for request_id, _ in call.open_choices}:
            self.abort(request_id)

    def _on_abort(self, link: IngressLink, abort: Abort) -> None:
        call = self._calls.get(abort.request_id)
        if call is not None and call.link is link:  # an ingress may abort its own requests only
            self.abort(abort.request_id, abort.choice, abort.reason)

    def _on_lost(self, link: IngressLink) -> None:
        lost = {call for call in self._calls.values() if call.link is link}
        for call in lost:
            if not call.done.done():
                call.done.set_exception(StreamError("the connection to the ingress was lost"))
        if lost:
            logger.warning(
                "the connection to ingress %s was lost, %d calls are aborted",
                *(link.address.ingress_id, len(lost)),
            )

    async def _beat(self) -> None:
        num_stalled = 0  # beats in a row
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)
            load, stall = self._engine.load(), self.stall()
            # If the whole process was paused (a stopped container, a sleeping machine), the pause
            # is part of the step's age: the engine gets another beat to continue.
            if time.monotonic() - slept_s > HEARTBEAT_S + _LATE_BEAT_S:
                stall = 0.0
            num_stalled = num_stalled + 1 if stall > _GIVE_UP_AT else 0
            self._metrics.observe_step(StepOutput((), load), time.time())
            self._links.heartbeat(load, stall)
            if num_stalled >= _GIVE_UP_BEATS and not self.dead.is_set():
                age_s = self._engine.last_step_age_s()
                logger.error("a step has not ended for %.1f s, the engine is replaced", age_s)
                self._on_death(EngineDeadError(f"a step has not ended for {age_s:.1f} s"))


@ray.remote
class EngineActor(EngineHost):
    """The host in a process of its own; call `open` first. Dies with the replica that made it."""

    def __init__(
        self,
        config: EngineConfig,
        factory: str,
        model_name: str,
        engine_id: str,
        stall_timeout_s: float,
    ) -> None:
        """`factory`: "module:function", imported only here. `stall_timeout_s`: as in
        `EngineHost`."""
        install(log_format())
        self._config, self._factory = config, factory
        self._labels = {"process": "engine", "model_name": model_name, "engine": engine_id}
        self._names = model_name, engine_id
        self._stall_timeout_s = stall_timeout_s

    async def open(self) -> EngineLimits:
        """Loads the model (minutes for a large model), becomes its host and begins to serve. Raises
        the factory's error: a constructor's error would reach the replica as text only."""
        # A GPU's driver starts threads that stay, and they would keep a lower priority.
        # Other ranks' processes inherit the priority for all their life.
        config, (model_name, engine_id) = self._config, self._names
        can_lower = config.device == "cpu" and config.tensor_parallel_size == 1
        engine = await (in_background if can_lower else asyncio.to_thread)(self._open)
        limits, dtype = engine.model_limits, config.kv_cache_dtype
        metrics = EngineMetrics(model_name, engine_id, config.block_size, limits, dtype)
        super().__init__(engine, engine_id, metrics, self._stall_timeout_s)
        # The present objects stay for good. A collection that visits them takes 150 ms, in which no
        # thread steps: each stream had a gap of as much from time to time.
        gc.collect()
        gc.freeze()
        self.start()
        return limits

    def _open(self) -> EngineInterface:
        factory: EngineFactory = pkgutil.resolve_name(self._factory)
        return factory(self._config)

    async def metrics(self) -> bytes:
        return join_texts([self._metrics.text(), failures_text(self._labels)])
