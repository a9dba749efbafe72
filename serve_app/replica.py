"""The engine replica: a thin Serve deployment between Ray Serve and one engine actor.

It fetches the base, starts the actor, sees that a request's adapter is loaded before the request
goes in, and holds each `submit` open until its tokens are all sent, so that Serve's counts, limits,
cancellation and draining stay true. Tokens do not pass here. Ignorant of HTTP and text.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError

from engine.errors import EngineDeadError, UnknownAdapterError
from engine.refusals import REFUSALS
from engine.types import EngineLoad
from registry.entities import AdapterVersion
from registry.errors import ArtifactError, QuarantinedError
from registry.quarantine import Quarantine
from serve_app.background import in_background
from serve_app.cache_metrics import cache_text
from serve_app.engine_actor import EngineActor
from serve_app.errors import ServiceUnavailableError
from serve_app.ingress_metrics import join_texts
from serve_app.text import TEXT_FILES
from serve_app.topology import BaseDescription, BaseSpec, RegistryReader, Sources, SubmitCall

logger = logging.getLogger(__name__)

_ACTOR_ANSWER_S = 5.0  # the actor's loop does nothing long: no answer means it is stuck
_FIRST_RETRY_S = 5  # after that the quarantine says
_OTHER_RETRY_S = 30
_EXIT_DELAY_S = 0.5  # lets the failures of running calls reach the ingresses first


class EngineReplica:
    """Wrapped by `base_application`."""

    async def __init__(self, spec: BaseSpec, sources: Sources) -> None:  # type: ignore[misc]
        self._spec = spec
        self._registry: RegistryReader = await in_background(sources.open_registry)
        self._folder: Path = await in_background(lambda: self._registry.fetch(spec.base))
        self._loading: dict[str, asyncio.Task[None]] = {}  # by digest; kept when done
        self._refused = Quarantine()  # by this engine; what cannot be fetched is the registry's
        self._routing_load = EngineLoad()
        self._is_stopping = False
        config = spec.model.engine.to_config(str(self._folder), spec.base.digest, spec.device)
        self._engine_id = engine_id = serve.get_replica_context().replica_id.unique_id
        self._actor = EngineActor.options(  # type: ignore[attr-defined]
            num_cpus=0,
            num_gpus=1 if spec.device == "cuda" else 0,
            max_concurrency=spec.model.max_ongoing_requests + 64,
            max_restarts=0,
        ).remote(config, sources.engine_factory, spec.base.name, engine_id)
        try:
            self._limits = await self._actor.start.remote()
        except RayTaskError as error:
            raise root_cause(error) from None
        self._watch = asyncio.get_running_loop().create_task(self._exit_with_the_actor())

    async def submit(self, call: SubmitCall) -> None:
        """Returns when every choice ended; tokens go to `call.reply_to`."""
        name = None if call.adapter is None else call.adapter.name
        try:
            if call.adapter is not None:
                await self._ensure_adapter(call.adapter)
            try:
                await self._actor.submit.remote(call.requests, call.reply_to, name)
            except RayTaskError as error:
                if call.adapter is None or not isinstance(root_cause(error), UnknownAdapterError):
                    raise
                # It fell out of the engine's host memory.
                self._loading.pop(call.adapter.digest, None)
                await self._ensure_adapter(call.adapter)
                await self._actor.submit.remote(call.requests, call.reply_to, name)
        except asyncio.CancelledError:
            self._actor.abort.remote(tuple(request.request_id for request in call.requests))
            raise
        except RayActorError as error:
            raise EngineDeadError(f"the engine of {self._spec.base.name} died") from error
        except RayTaskError as error:
            raise root_cause(error) from None

    async def describe(self) -> BaseDescription:
        return BaseDescription(await asyncio.to_thread(_read_texts, self._folder), self._limits)

    async def metrics(self) -> bytes:
        engine: bytes = await self._actor.metrics.remote()
        stats = await asyncio.to_thread(self._registry.cache_stats)
        labels = {"model_name": self._spec.base.name, "engine": self._engine_id}
        return join_texts([engine, cache_text(stats, len(self._refused.verdicts()), labels)])

    async def check_health(self) -> None:
        """Raises when steps stopped while there is work; Serve then replaces this replica."""
        async with asyncio.timeout(_ACTOR_ANSWER_S):
            age_s = await self._actor.last_step_age_s.remote()
            self._routing_load = await self._actor.load.remote()
        if age_s > self._spec.model.stall_timeout_s:
            raise EngineDeadError(f"no step for {age_s:.0f} s with requests running")

    def record_routing_stats(self) -> dict[str, float]:
        """For Serve's router and dashboards, as old as the last health check."""
        load = self._routing_load
        return {
            "running": load.num_running,
            "waiting": load.num_waiting,
            "queued_tokens": load.queued_tokens,
            "kv_usage": 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0,
        }

    async def __del__(self) -> None:  # Serve awaits it, after draining
        self._is_stopping = True
        if hasattr(self, "_actor"):
            ray.kill(self._actor)

    async def _ensure_adapter(self, adapter: AdapterVersion) -> None:
        """One load a digest, shared by all who wait; a failure fails them, the next one retries."""
        task = self._loading.get(adapter.digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.get_running_loop().create_task(self._load_adapter(adapter))
            self._loading[adapter.digest] = task
        await asyncio.shield(task)  # one caller who leaves does not stop it for the others

    async def _load_adapter(self, adapter: AdapterVersion) -> None:
        try:
            self._refused.check(adapter.digest)
            try:
                await self._fetch_and_load(adapter)
            except REFUSALS:
                # Registration validates: the registry holds what it should not, or our disk rots.
                if await asyncio.to_thread(self._registry.verify, adapter):
                    raise
                await self._fetch_and_load(adapter)
        except REFUSALS as error:
            self._refused.add(adapter.digest, str(error))
            raise _unavailable(adapter, error, _FIRST_RETRY_S) from error
        except QuarantinedError as error:
            raise _unavailable(adapter, error, error.retry_after_s) from error
        except ArtifactError as error:
            raise _unavailable(adapter, error, _FIRST_RETRY_S) from error
        except RayTaskError as error:
            raise _unavailable(adapter, root_cause(error), _OTHER_RETRY_S) from None
        self._refused.forgive(adapter.digest)
        logger.info("adapter %s (%s) loaded", adapter.name, adapter.digest[:12])

    async def _fetch_and_load(self, adapter: AdapterVersion) -> None:
        """Its files stay in the cache as long as the engine reads them."""
        folder = await asyncio.to_thread(self._registry.fetch, adapter)
        try:
            await self._actor.load_adapter.remote(adapter.name, adapter.digest, str(folder))
        except RayTaskError as error:
            if isinstance(cause := root_cause(error), REFUSALS):
                raise cause from None
            raise
        finally:
            self._registry.release(folder)

    async def _exit_with_the_actor(self) -> None:
        """A new process is the way back from a dead engine: Serve sees an exit within a second,
        where failing health checks take three periods."""
        with suppress(RayActorError):
            await self._actor.wait_for_death.remote()
        if not self._is_stopping:
            logger.error("the engine of %s died, this replica exits", self._spec.base.name)
            await asyncio.sleep(_EXIT_DELAY_S)
            os._exit(1)


def base_application(spec: BaseSpec, sources: Sources) -> serve.Application:
    model = spec.model
    bundle = {"CPU": 0.01, "GPU": 1.0}  # replica and actor share a node, hence its cache
    deployment = serve.deployment(EngineReplica).options(  # type: ignore[attr-defined]
        name="engine",
        num_replicas=model.replicas,
        max_ongoing_requests=model.max_ongoing_requests,
        max_queued_requests=model.max_queued_requests,
        health_check_period_s=model.health_check_period_s,
        graceful_shutdown_timeout_s=model.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        # What does not start twice is told to who waits for it; the manager tries again later.
        max_constructor_retry_count=max(2, model.replicas),
        ray_actor_options={"num_cpus": 0.01 if spec.device == "cuda" else 0},
        placement_group_bundles=[bundle] if spec.device == "cuda" else None,
    )
    application: serve.Application = deployment.bind(spec, sources)
    return application


def root_cause(error: BaseException) -> BaseException:
    """The exception that was raised at the far end, without Ray's wrapping and its tracebacks."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def _unavailable(
    adapter: AdapterVersion, error: BaseException, retry_after_s: int
) -> ServiceUnavailableError:
    words = f"The adapter {adapter.name!r} cannot be loaded: {error}"
    return ServiceUnavailableError(words, retry_after_s)


def _read_texts(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TEXT_FILES if (folder / name).is_file()}
