"""The process that owns one engine: a Ray actor around `EngineHost`.

Takes submit calls (held open until their requests end), tells every ingress of every step over
the side stream, its own tokens in it, and aborts what nobody reads any more. The engine comes
from a factory, so that tests put their own behind the same interface. Ignorant of HTTP and text.
"""

from __future__ import annotations

import asyncio
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
from engine.types import EngineLoad, Request, Resident, StepOutput, TokenOutput
from serve_app.config import log_format
from serve_app.logs import install
from serve_app.messages import StreamAddress
from serve_app.metrics.engine import EngineMetrics
from serve_app.metrics.exposition import join_texts
from serve_app.replica.background import in_background
from serve_app.stream.client import IngressLink
from serve_app.stream.links import IngressLinks
from serve_app.stream.snapshot import Digests
from serve_app.stream.wire import HEARTBEAT_S, SILENCE_S, Abort, AbortReason, Accepted, StreamError
from serve_app.tasks import failures_text, keep

logger = logging.getLogger(__name__)

EngineFactory = Callable[[EngineConfig], EngineInterface]

# A step may take so many times the longest of its like: prompts on a CPU whose cores are shared
# take several times what they take alone.
_PATIENCE = 8.0
_GIVE_UP_AT = 1.2  # as `Step.stall`: ingresses move the requests first, at 1
_GIVE_UP_BEATS = 2
_LATE_BEAT_S = 0.5  # the event loop or the process was held up


@dataclass(slots=True, eq=False)
class _Call:
    """One submit call: some engine requests that are read at one ingress."""

    link: IngressLink
    done: asyncio.Future[None]
    open_choices: set[tuple[str, int]] = field(default_factory=set)
    untold: dict[str, Accepted] = field(default_factory=dict)  # by request id, until it is taken


class EngineHost:
    """Everything the actor does, without Ray. All methods belong to one event loop."""

    def __init__(
        self,
        engine: EngineInterface,
        engine_id: str,
        metrics: EngineMetrics,
        stall_timeout_s: float = 60.0,
    ) -> None:
        """`stall_timeout_s`: a step that takes longer counts as hung, whatever is usual."""
        self._engine = engine
        self._stall_timeout_s = stall_timeout_s
        self._metrics = metrics
        self._calls: dict[str, _Call] = {}  # by request id
        self._dialling: set[str] = set()  # ids of requests whose ingress is being dialled
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
        """As `Step.stall`; infinite when the engine is dead."""
        age_s = self._engine.last_step_age_s()
        if not age_s:
            return 0.0
        limit_s = max(SILENCE_S, _PATIENCE * self._engine.usual_step_s())
        return age_s / min(limit_s, self._stall_timeout_s)

    async def attend(self, address: StreamAddress) -> None:
        """As `IngressLinks.attend`; raises StreamError where the ingress cannot be reached."""
        await self._links.attend(address)

    def note_disk(self, on_disk: Digests, disk_s: float, registry_s: float) -> None:
        """Adapters whose files are on this node, and what loads from there and from the registry
        took; 0: not yet measured."""
        self._links.snapshot.note_disk(on_disk, disk_s, registry_s)

    async def submit(
        self,
        requests: Sequence[Request],
        reply_to: StreamAddress,
        adapter_name: str | None,
        found_in: str | None = None,
        adapter_s: float = 0.0,
    ) -> None:
        """Returns when every choice ended or was aborted. Cancelling it aborts the rest.
        `found_in`: the tier that the adapter came from in `adapter_s`; None: memory."""
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
            call.untold[request_id] = Accepted(request_id, adapter_s, tier or "")
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
        """`reason`: how the choice counts; "stop" where its text ended at a stop string."""
        self._dialling.discard(request_id)
        call = self._calls.get(request_id)
        if call is None:
            return
        self._engine.abort(request_id, choice)
        for open_id, open_choice in tuple(call.open_choices):
            if open_id == request_id and choice in (None, open_choice):
                self._end_choice(call, request_id, open_choice, reason)

    async def _open_link(
        self, requests: Sequence[Request], reply_to: StreamAddress
    ) -> tuple[IngressLink, Sequence[Request]]:
        """The link and those of the requests that were not aborted while it was dialled."""
        request_ids = {request.request_id for request in requests}
        self._dialling |= request_ids
        try:
            link = await self._links.open(reply_to)
            return link, [one for one in requests if one.request_id in self._dialling]
        finally:
            self._dialling -= request_ids

    async def _submit_each(self, call: _Call, requests: Sequence[Request]) -> None:
        """One after another, each for up to a step. The call that the engine refuses counts
        nothing: its caller may send it again."""
        for request in requests:
            if self._calls.get(request.request_id) is not call:
                continue  # aborted while an earlier one was submitted
            try:
                await self._engine.submit(request)
            except Exception:
                for one in requests:
                    self._metrics.withdraw(one.request_id)
                raise
            self._tell_accepted(call, request.request_id)

    def _tier_of(self, digest: str | None) -> str | None:
        """Of memory, as the newest step left it; None: no adapter."""
        if digest is None:
            return None
        return "device" if digest in self._engine.load().adapters_on_device else "host"

    def _on_step(self, step: StepOutput) -> None:
        self._metrics.observe_step(step, time.time())
        by_link: dict[IngressLink, list[TokenOutput]] = {}
        ended: list[tuple[_Call, TokenOutput]] = []
        for output in step.outputs:
            call = self._calls.get(output.request_id)
            if call is None or (output.request_id, output.choice) not in call.open_choices:
                continue  # aborted while the step ran
            if call.untold:  # the step came before the answer to `submit`
                self._tell_accepted(call, output.request_id)
            by_link.setdefault(call.link, []).append(output)
            if output.finish_reason is not None:
                ended.append((call, output))
        self._links.send(step, by_link)
        for call, output in ended:
            assert output.finish_reason is not None
            self._end_choice(call, output.request_id, output.choice, output.finish_reason)

    def _tell_accepted(self, call: _Call, request_id: str) -> None:
        """Once. The load of every step that comes from now on counts it."""
        accepted = call.untold.pop(request_id, None)
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
        if call is not None and call.link is link:  # an ingress ends its own requests only
            self.abort(abort.request_id, abort.choice, abort.reason)

    def _on_lost(self, link: IngressLink) -> None:
        lost = {call for call in self._calls.values() if call.link is link}
        for call in lost:
            if not call.done.done():
                call.done.set_exception(StreamError("the connection to the ingress was lost"))
        if lost:
            logger.warning("ingress %s lost, %d calls ended", link.address.ingress_id, len(lost))

    async def _beat(self) -> None:
        num_stalled = 0  # beats in a row
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)
            load, stall = self._engine.load(), self.stall()
            # A process that stood still as a whole (a stopped container, a machine that slept) has
            # aged its step by the pause: the engine gets the time of one more beat to go on.
            if time.monotonic() - slept_s > HEARTBEAT_S + _LATE_BEAT_S:
                stall = 0.0
            num_stalled = num_stalled + 1 if stall > _GIVE_UP_AT else 0
            self._metrics.observe_step(StepOutput((), load), time.time())
            self._links.heartbeat(load, stall)
            if num_stalled >= _GIVE_UP_BEATS and not self.dead.is_set():
                age_s = self._engine.last_step_age_s()
                logger.error("a step has not ended for %.1f s, the engine is given up", age_s)
                self._on_death(EngineDeadError(f"a step has not ended for {age_s:.1f} s"))


@ray.remote
class EngineActor:
    """The Ray face of `EngineHost`; `start` first. Dies with the replica that made it."""

    def __init__(
        self,
        config: EngineConfig,
        factory: str,
        model_name: str,
        engine_id: str,
        stall_timeout_s: float,
    ) -> None:
        """`factory`: "module:function"; only here is it imported. `stall_timeout_s`: as of
        `EngineHost`."""
        install(log_format())
        self._config = config
        self._stall_timeout_s = stall_timeout_s
        self._factory = factory
        self._engine_id = engine_id
        # max_lora: the pool is limited by bytes, not by a number of adapters.
        self._metrics = EngineMetrics(model_name, engine_id, config.block_size, 0)
        self._labels = {"process": "engine", "model_name": model_name, "engine": engine_id}
        self._engine: EngineInterface | None = None
        self._host: EngineHost | None = None

    async def start(self) -> EngineLimits:
        """Loads the model (minutes for a large one) and begins to serve."""
        # A GPU's driver starts threads that stay, and they would keep a lower priority.
        is_on_cpu = self._config.device == "cpu"
        opening = in_background(self._open) if is_on_cpu else asyncio.to_thread(self._open)
        self._engine = await opening
        self._host = EngineHost(self._engine, self._engine_id, self._metrics, self._stall_timeout_s)
        self._host.start()
        return self._engine.model_limits

    def _open(self) -> EngineInterface:
        factory: EngineFactory = pkgutil.resolve_name(self._factory)
        return factory(self._config)

    async def submit(
        self,
        requests: tuple[Request, ...],
        reply_to: StreamAddress,
        adapter_name: str | None,
        found_in: str | None,
        adapter_s: float,
    ) -> None:
        assert self._host is not None
        await self._host.submit(requests, reply_to, adapter_name, found_in, adapter_s)

    async def attend(self, address: StreamAddress) -> None:
        assert self._host is not None
        await self._host.attend(address)

    async def note_disk(self, on_disk: Digests, disk_s: float, registry_s: float) -> None:
        assert self._host is not None
        self._host.note_disk(on_disk, disk_s, registry_s)

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        assert self._host is not None
        for request_id in request_ids:
            self._host.abort(request_id)

    async def load_adapter(self, name: str, digest: str, path: str) -> None:
        assert self._engine is not None
        await self._engine.load_adapter(name, digest, path)

    async def unload_adapter(self, digest: str) -> None:
        assert self._engine is not None
        await self._engine.unload_adapter(digest)

    async def has_adapter(self, digest: str) -> bool:
        assert self._engine is not None
        return self._engine.has_adapter(digest)

    async def adapters(self) -> tuple[Resident, ...]:
        assert self._engine is not None
        return await self._engine.adapters()

    async def pin_adapter(self, digest: str) -> None:
        assert self._engine is not None
        await self._engine.pin_adapter(digest)

    async def unpin_adapter(self, digest: str) -> None:
        assert self._engine is not None
        await self._engine.unpin_adapter(digest)

    async def evict_adapter(self, digest: str) -> None:
        assert self._engine is not None
        await self._engine.evict_adapter(digest)

    async def stall(self) -> float:
        """As `Step.stall`; infinite when the engine is dead."""
        assert self._host is not None
        return self._host.stall()

    async def load(self) -> EngineLoad:
        assert self._engine is not None
        return self._engine.load()

    async def metrics(self) -> bytes:
        return join_texts([self._metrics.text(), failures_text(self._labels)])

    async def wait_for_death(self) -> None:
        """Returns when the engine's loop ended or hangs; fails at once when this process dies."""
        assert self._host is not None
        await self._host.dead.wait()

    async def stop(self) -> None:
        if self._host is not None:
            self._host.stop()
