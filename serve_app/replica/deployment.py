"""The engine replica: a thin Serve deployment between Ray Serve and one engine actor.

It fetches the base, starts the actor, sees that a request's adapter is loaded before the request
goes in, and holds each `submit` open until its tokens are all sent, so that Serve's counts, limits,
cancellation and draining stay true. Tokens do not pass here. Ignorant of HTTP and text.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from engine.errors import EngineDeadError, UnknownAdapterError
from engine.types import EngineLoad, Resident
from registry.entities import AdapterVersion
from serve_app.autoscaling.stats import ScalingStats
from serve_app.config import log_format
from serve_app.errors import AdapterUnsupportedError, EngineGoneError
from serve_app.logs import install_in_replica
from serve_app.messages import (
    AdapterPlan,
    Backlog,
    BaseDescription,
    EngineOutcome,
    ReplicaAdapters,
    RoutingRequest,
    StreamAddress,
    SubmitCall,
)
from serve_app.metrics.cache import cache_text
from serve_app.metrics.exposition import join_texts
from serve_app.platform_view import BaseSpec, RegistryReader, Sources
from serve_app.ray_calls import root_cause
from serve_app.ray_network import keep_to_loopback
from serve_app.replica.adapter_keeper import AdapterKeeper
from serve_app.replica.adapter_loads import AdapterLoads
from serve_app.replica.background import in_background
from serve_app.replica.disk_reports import DiskReports
from serve_app.replica.engine_actor import EngineActor
from serve_app.tasks import check_running, failures_text, keep
from serve_app.text.base_text import TEXT_FILES

logger = logging.getLogger(__name__)

_ACTOR_ANSWER_S = 5.0  # the actor's loop does nothing long: no answer means it is stuck
_NUM_TRIES = 3  # of a request whose adapter leaves the engine's memory before it gets there
_EXIT_DELAY_S = 0.5  # lets the failures of running calls reach the ingresses first


class EngineReplica:
    """Wrapped by `base_application`."""

    async def __init__(self, spec: BaseSpec, sources: Sources) -> None:  # type: ignore[misc]
        install_in_replica(log_format())
        keep_to_loopback()
        self._spec = spec
        self._registry: RegistryReader = await in_background(sources.open_registry)
        self._folder: Path = await in_background(lambda: self._registry.fetch(spec.base))
        self._routing_load = EngineLoad()
        self._is_stopping = False
        self._is_dead = False
        self._obituary = f"the engine of {spec.base.name} died"
        config = spec.model.engine.to_config(str(self._folder), spec.base.digest, spec.device)
        self._engine_id = engine_id = serve.get_replica_context().replica_id.unique_id
        self._actor = EngineActor.options(  # type: ignore[attr-defined]
            num_cpus=0,
            num_gpus=1 if spec.device == "cuda" else 0,
            max_concurrency=spec.model.max_ongoing_requests + 64,
            max_restarts=0,
        ).remote(
            config,
            sources.engine_factory,
            spec.base.name,
            engine_id,
            spec.model.stall_timeout_s,
        )
        try:
            self._limits = await self._actor.start.remote()
        except RayTaskError as error:
            raise root_cause(error) from None
        self._loads = AdapterLoads(self._registry, self._actor.load_adapter.remote)
        self._keeper = AdapterKeeper(self._loads, _ActorMemory(self._actor))
        self._scaling = ScalingStats(self._limits)
        self._disk_reports = keep(
            DiskReports(self._loads, self._actor.note_disk.remote).run, "disk-reports"
        )
        self._watch = keep(self._exit_with_the_actor, "watch-engine")

    async def submit(self, call: SubmitCall) -> AdapterUnsupportedError | None:
        """Returns when every choice ended; tokens go to `call.reply_to`. The refusal of an adapter
        is returned, for Serve logs a traceback of what is raised."""
        if self._is_dead:
            raise EngineGoneError(self._obituary, self._engine_id, was_dead=True)
        self._scaling.arrived(call.requests)
        try:
            if call.adapter is None:
                await self._actor.submit.remote(call.requests, call.reply_to, None, None, 0.0)
            else:
                await self._submit_with(call, call.adapter)
        except asyncio.CancelledError:
            self._actor.abort.remote(tuple(request.request_id for request in call.requests))
            raise
        except RayActorError as error:
            raise EngineGoneError(self._obituary, self._engine_id) from error
        except RayTaskError as error:
            cause = root_cause(error)
            if isinstance(cause, EngineDeadError):
                raise EngineGoneError(self._obituary, self._engine_id) from error
            raise cause from None
        except AdapterUnsupportedError as refusal:
            return refusal.with_traceback(None)
        return None

    async def attend(self, address: StreamAddress) -> None:
        """The engine tells that ingress of every step from now on, and first of all the whole. Once
        the connection is lost, the ingress asks again."""
        try:
            await self._actor.attend.remote(address)
        except RayActorError as error:
            raise EngineDeadError(f"the engine of {self._spec.base.name} died") from error
        except RayTaskError as error:
            raise root_cause(error) from None

    async def arrange(self, plan: AdapterPlan) -> None:
        """Returns at once; the manager sends it again and again."""
        self._keeper.arrange(plan)

    async def preload(self, adapter: AdapterVersion) -> EngineOutcome:
        """Into the engine's memory, if it is not there."""
        try:
            loaded = await self._loads.ensure(adapter)
            if loaded.found_in is None and not await self._actor.has_adapter.remote(adapter.digest):
                self._loads.forget(adapter.digest, loaded)
                loaded = await self._loads.ensure(adapter)
        except Exception as error:  # told, so that the caller sees which engine it was
            return EngineOutcome(self._engine_id, False, str(root_cause(error)))
        return EngineOutcome(self._engine_id, True, loaded.found_in or "memory")

    async def warm(self, adapter: AdapterVersion, ask: RoutingRequest) -> EngineOutcome | None:
        """As `preload`; None where a router found no way to the replica that is meant."""
        return await self.preload(adapter) if ask.only == self._engine_id else None

    async def evict(self, adapter: AdapterVersion) -> EngineOutcome:
        """Out of the engine's memory, unless it is in use there."""
        try:
            await self._actor.evict_adapter.remote(adapter.digest)
        except RayTaskError as error:
            cause = root_cause(error)
            is_out = isinstance(cause, UnknownAdapterError)
            words = "it was not in memory" if is_out else str(cause)
            return EngineOutcome(self._engine_id, is_out, words)
        return EngineOutcome(self._engine_id, True, "evicted")

    async def adapters(self) -> ReplicaAdapters:
        residents = await self._actor.adapters.remote()
        local = await self._loads.local_digests()
        return ReplicaAdapters(
            self._engine_id, residents, local, dict(self._keeper.failures), self._loads.refused
        )

    async def describe(self) -> BaseDescription:
        files = await asyncio.to_thread(_read_texts, self._folder)
        return BaseDescription(files, self._limits, self._spec.model.generation_config)

    async def metrics(self) -> bytes:
        engine: bytes = await self._actor.metrics.remote()
        stats = await asyncio.to_thread(self._registry.cache_stats)
        labels = {"model_name": self._spec.base.name, "engine": self._engine_id}
        cache = cache_text(stats, self._loads.num_refused, labels)
        tasks = failures_text({"process": "replica", **labels})
        return join_texts([engine, cache, self._loads.times.text(labels), tasks])

    async def check_health(self) -> None:
        """Raises when steps stopped while there is work; Serve then replaces this replica."""
        async with asyncio.timeout(_ACTOR_ANSWER_S):
            stall = await self._actor.stall.remote()
            self._routing_load = await self._actor.load.remote()
        if stall >= 1:
            raise EngineDeadError("a step of the engine does not end")
        check_running(self._watch)

    def record_routing_stats(self) -> dict[str, float]:
        """For Serve's router and dashboards, as old as the last health check."""
        load = self._routing_load
        return {
            "running": load.num_running,
            "waiting": load.num_waiting,
            "queued_tokens": load.queued_tokens,
            "kv_usage": load.kv_usage,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaling policy, twice a second."""
        return self._scaling.sample(await self._actor.load.remote())

    async def hear_backlog(self, backlog: Backlog) -> None:
        """What waits in the ingresses for this base. The policy hears of it from here."""
        self._scaling.set_backlog(backlog)

    async def __del__(self) -> None:  # Serve awaits it, after draining
        self._is_stopping = True
        if hasattr(self, "_actor"):
            ray.kill(self._actor)

    async def _submit_with(self, call: SubmitCall, adapter: AdapterVersion) -> None:
        came_s = time.monotonic()
        for tries_left in reversed(range(_NUM_TRIES)):
            loaded = await self._loads.ensure(adapter)
            wait_s = time.monotonic() - came_s
            try:
                await self._actor.submit.remote(
                    call.requests, call.reply_to, adapter.name, loaded.found_in, wait_s
                )
                return
            except RayTaskError as error:
                if not tries_left or not isinstance(root_cause(error), UnknownAdapterError):
                    raise
            # Evicted, retired, or it fell out of the engine's host memory.
            self._loads.forget(adapter.digest, loaded)

    async def _exit_with_the_actor(self) -> None:
        """A new process is the way back from an engine that died or hangs: Serve sees an exit
        within a second, where failing health checks take three periods."""
        with suppress(RayActorError):
            await self._actor.wait_for_death.remote()
        self._is_dead = True
        if not self._is_stopping:
            logger.error("the engine of %s died, this replica exits", self._spec.base.name)
            await asyncio.sleep(_EXIT_DELAY_S)
            ray.kill(self._actor)  # one whose step hangs is still there
            os._exit(1)


class _ActorMemory:
    """Implements `adapter_keeper.Memory`."""

    def __init__(self, actor: ActorHandle[EngineActor]) -> None:
        self._actor = actor

    async def adapters(self) -> tuple[Resident, ...]:
        residents: tuple[Resident, ...] = await self._actor.adapters.remote()
        return residents

    async def pin(self, digest: str) -> None:
        await self._actor.pin_adapter.remote(digest)

    async def unpin(self, digest: str) -> None:
        await self._actor.unpin_adapter.remote(digest)

    async def unload(self, digest: str) -> None:
        await self._actor.unload_adapter.remote(digest)


def _read_texts(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TEXT_FILES if (folder / name).is_file()}
