"""The engine replica: a thin Serve deployment between Ray Serve and an engine actor.

It fetches the base, starts the actor, has a request's adapter loaded before it submits the request,
and keeps each `submit` open until all tokens were sent, so that Serve's counts, limits,
cancellation and draining stay correct. Tokens do not pass through it. Ignorant of HTTP and text.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError

from engine.errors import EngineDeadError, UnknownAdapterError
from engine.types import Resident
from registry.entities import AdapterVersion
from registry.errors import CacheFailedError, CacheFullError
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
from serve_app.metrics.exposition import join_texts
from serve_app.metrics.replica import cache_text, residents_text
from serve_app.platform_view import BaseSpec, RegistryReader, Sources
from serve_app.ray_calls import root_cause
from serve_app.ray_network import keep_to_loopback
from serve_app.replica.adapter_keeper import AdapterKeeper
from serve_app.replica.adapter_loads import AdapterLoads, LoadResult, slowest
from serve_app.replica.background import in_background
from serve_app.replica.control_calls import CONTROL_CALLS, answer_while_full
from serve_app.replica.engine_actor import EngineActor
from serve_app.replica.ray_metrics import UPDATE_S, RayExport
from serve_app.tasks import check_running, failures_text, keep
from serve_app.text.base_text import read_files, with_response_template

logger = logging.getLogger(__name__)

_ACTOR_ANSWER_S = 5.0  # the actor's event loop never blocks long: without an answer it is stuck
_RESIDENTS_S = 1.0  # a scrape does not wait longer for the list of adapters in memory
_EXIT_DELAY_S = 0.5  # so that the failures of running calls reach the ingresses first


class EngineReplica:
    """Wrapped by `base_application`."""

    async def __init__(self, spec: BaseSpec, sources: Sources) -> None:  # type: ignore[misc]
        install_in_replica(log_format())
        keep_to_loopback()
        answer_while_full()
        self._spec = spec
        self._registry: RegistryReader = await in_background(sources.open_registry)
        self._folder: Path = await in_background(lambda: self._registry.fetch(spec.base))
        self._is_stopping = False
        self._is_dead = False
        self._death_message = f"the engine of {spec.base.name} died"
        config = spec.model.engine.to_config(str(self._folder), spec.base.digest, spec.device)
        self._engine_id = engine_id = serve.get_replica_context().replica_id.unique_id
        self._actor = EngineActor.options(  # type: ignore[attr-defined]
            num_cpus=0,
            # Ray names the devices of all ranks in the actor's CUDA_VISIBLE_DEVICES, which the
            # other ranks inherit: each sees all, as memory that devices share needs it.
            num_gpus=config.tensor_parallel_size if spec.device == "cuda" else 0,
            runtime_env={"env_vars": config.environment} if config.environment else None,
            max_concurrency=spec.model.max_ongoing_requests + 2 * CONTROL_CALLS,
            max_restarts=0,
        ).remote(
            config,
            sources.engine_factory,
            spec.base.name,
            engine_id,
            spec.model.stall_timeout_s,
        )
        try:
            self._limits = await self._actor.open.remote()
        except RayTaskError as error:
            raise root_cause(error) from None
        self._loads = AdapterLoads(self._registry, self._actor.load_adapter.remote)
        self._keeper = AdapterKeeper(self._loads, self._actor)
        self._scaling = ScalingStats(self._limits)
        keep(partial(self._loads.publish, self._actor.note_disk.remote), "disk-reports")
        if sources.metrics_to_ray:
            keep(self._export_to_ray, "ray-metrics")
        self._watch = keep(self._exit_with_the_actor, "watch-engine")

    async def submit(self, call: SubmitCall) -> AdapterUnsupportedError | None:
        """Returns when every choice has ended; tokens go to `call.reply_to`. The refusal of an
        adapter is returned: Serve logs each raised exception with a traceback."""
        if self._is_dead:
            raise EngineGoneError(self._death_message, self._engine_id, was_dead=True)
        self._scaling.arrived(call.requests)
        try:
            await self._submit(call)
        except asyncio.CancelledError:
            self._actor.abort_all.remote(tuple(request.request_id for request in call.requests))
            raise
        except RayActorError as error:
            raise EngineGoneError(self._death_message, self._engine_id) from error
        except RayTaskError as error:
            cause = root_cause(error)
            if isinstance(cause, EngineDeadError):
                raise EngineGoneError(self._death_message, self._engine_id) from error
            raise cause from None
        except AdapterUnsupportedError as refusal:
            return refusal.with_traceback(None)
        return None

    async def attend(self, address: StreamAddress) -> None:
        """Has the engine send its whole state and then every step to that ingress. After the
        connection is lost, the ingress calls again."""
        try:
            await self._actor.attend.remote(address)
        except RayActorError as error:
            raise EngineDeadError(self._death_message) from error
        except RayTaskError as error:
            raise root_cause(error) from None

    async def arrange(self, plan: AdapterPlan) -> None:
        """Returns at once; the manager sends the plan again and again."""
        self._keeper.arrange(plan)

    async def preload(self, adapter: AdapterVersion) -> EngineOutcome:
        """Loads the adapter into the engine's memory, unless it is there."""
        try:
            loaded = await self._loads.ensure(adapter)
            if loaded.found_in is None and not await self._actor.has_adapter.remote(adapter.digest):
                self._loads.forget(adapter.digest, loaded)
                loaded = await self._loads.ensure(adapter)
        except Exception as error:  # returned, so that the caller sees at which engine
            return EngineOutcome(self._engine_id, False, str(root_cause(error)))
        return EngineOutcome(self._engine_id, True, loaded.found_in or "memory")

    async def warm(self, adapter: AdapterVersion, ask: RoutingRequest) -> EngineOutcome | None:
        """Preloads the adapter. Returns None if the router chose a replica other than
        `ask.only`."""
        return await self.preload(adapter) if ask.only == self._engine_id else None

    async def evict(self, adapter: AdapterVersion) -> EngineOutcome:
        """Evicts the adapter from the engine's memory, unless it is in use."""
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
        files = await asyncio.to_thread(read_files, self._folder)
        digest, model = self._spec.base.digest, self._spec.model
        if model.response_template is not None:
            files = with_response_template(files, model.response_template)
            digest += f" {model.response_template}"
        return BaseDescription(files, self._limits, digest, model.generation_config)

    async def adapter_text(
        self, adapter: AdapterVersion
    ) -> dict[str, bytes] | AdapterUnsupportedError:
        """Returns the text files that the adapter brings. A refusal is returned, as by `submit`."""
        try:
            return await self._loads.own_text(adapter, self._folder)
        except AdapterUnsupportedError as refusal:
            return refusal.with_traceback(None)

    async def metrics(self) -> bytes:
        engine: bytes = await self._actor.metrics.remote()
        labels = {"model_name": self._spec.base.name, "engine": self._engine_id}
        tasks = failures_text({"process": "replica", **labels})
        texts = [engine, self._loads.times.text(labels), tasks]
        # If its disk fails, or has no room for its folders, the others are wanted all the more.
        with suppress(CacheFailedError, CacheFullError):
            stats = await asyncio.to_thread(self._registry.cache_stats)
            texts.append(cache_text(stats, len(self._loads.refused), labels))
        with suppress(TimeoutError):  # a long step: the engine answers between two steps
            async with asyncio.timeout(_RESIDENTS_S):
                residents: tuple[Resident, ...] = await self._actor.adapters.remote()
            texts.append(residents_text(residents, self._loads.versions(residents), labels))
        return join_texts(texts)

    async def check_health(self) -> None:
        """Raises if steps have stopped while there is work; Serve then replaces this replica."""
        async with asyncio.timeout(_ACTOR_ANSWER_S):
            stall = await self._actor.stall.remote()
        if stall >= 1:
            raise EngineDeadError(f"a step of the engine of {self._spec.base.name} has stalled")
        check_running(self._watch)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The input of the autoscaling policy; Serve calls it twice per second."""
        return self._scaling.sample(await self._actor.load.remote())

    async def set_backlog(self, backlog: Backlog) -> None:
        """Sets the backlog of this base in all ingresses, which is part of the autoscaling
        policy's input."""
        self._scaling.set_backlog(backlog)

    async def __del__(self) -> None:  # Serve awaits it, after draining
        self._is_stopping = True
        if hasattr(self, "_actor"):
            ray.kill(self._actor)

    async def _submit(self, call: SubmitCall) -> None:
        submit, adapters = self._actor.submit.remote, call.adapters
        if not adapters:
            await submit(call.requests, call.reply_to, None)
            return
        arrived_s, names = time.monotonic(), ",".join(one.name for one in adapters)

        async def submit_with(loaded: Sequence[LoadResult]) -> None:
            wait_s = time.monotonic() - arrived_s
            found_in = slowest([one.found_in for one in loaded])
            await submit(call.requests, call.reply_to, names, found_in, wait_s)

        await self._loads.use(adapters, submit_with)

    async def _export_to_ray(self) -> None:
        export = RayExport()
        with suppress(RayActorError):  # the engine died
            while True:
                await asyncio.to_thread(export.update, await self._actor.metrics.remote())
                await asyncio.sleep(UPDATE_S)

    async def _exit_with_the_actor(self) -> None:
        """Ends this process when the engine died or hangs, so that Serve starts a new replica: it
        notices an exit within a second, failed health checks only after three periods."""
        with suppress(RayActorError):
            await self._actor.wait_for_death.remote()
        self._is_dead = True
        if not self._is_stopping:
            logger.error("%s, this replica exits and Serve starts another", self._death_message)
            await asyncio.sleep(_EXIT_DELAY_S)
            ray.kill(self._actor)  # it still runs if a step hangs
            os._exit(1)
