"""Copies of requests for the version with the alias `shadow`: counted as an arm, answers discarded.

A copy begins at its request's first token, so that it cannot delay it, and only if no other request
would wait because of it. Its failures never reach a client.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextvars import Context
from dataclasses import replace

from engine.types import EngineLoad, Request
from registry.entities import AdapterVersion, WeightedVersion
from serve_app.canary.arm_stats import ArmStats
from serve_app.dispatch.base_handle import NO_MIGRATION
from serve_app.dispatch.completion import Completion, PreparedRequest
from serve_app.dispatch.migrations import Migrations
from serve_app.errors import RequestQuarantinedError
from serve_app.routing.request import make_routing_request
from serve_app.tally import ArmKey
from serve_app.tasks import spawn

logger = logging.getLogger(__name__)

_FIRST_TOKEN_S = 10.0  # an adapter may have to be fetched first
_MIN_FREE_BLOCKS = 0.2  # share of the KV cache; with less free, a copy could preempt other requests


class Shadows:
    """The copies of an ingress replica, at most `limit` at once."""

    def __init__(self, migrations: Migrations, arms: ArmStats, limit: int) -> None:
        self.num_dropped = 0
        self._migrations = migrations
        self._arms = arms
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    def offer(
        self, prepared: PreparedRequest, version: AdapterVersion, load: EngineLoad | None
    ) -> None:
        """Starts a copy for `version` unless there are too many or the engine that answers the
        request is busy. `load`: of that engine; None if it is unknown."""
        if len(self._tasks) >= self._limit or load is None or is_busy(load):
            self.num_dropped += 1
            return
        # In a context of its own: Serve's router cannot distinguish calls of the same HTTP request,
        # and would cancel the copy with the client's call.
        task = spawn(self._run(prepared, version), "shadow", Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, prepared: PreparedRequest, version: AdapterVersion) -> None:
        copy = _copy(prepared, version)
        try:
            generation = copy.generation(self._migrations)
        except RequestQuarantinedError:  # it killed engines when a client asked for this version
            self.num_dropped += 1
            return
        arm = ArmKey(version.name, "shadow", version.version, version.digest)
        patience = asyncio.timeout(_FIRST_TOKEN_S)
        completion = Completion(
            generation,
            copy.response_builder(),
            self._arms.begin(arm),
            lambda _: patience.reschedule(None),
        )
        try:
            async with patience:
                await completion.finish()
        except Exception as error:  # its arm has counted it, and no client waits for it
            logger.info("shadow of %s@%d: %s", version.name, version.version, error)
        finally:
            completion.close()


def is_busy(load: EngineLoad) -> bool:
    """True if requests wait for capacity, not only for an adapter, or few KV blocks are free."""
    is_queueing = load.num_waiting > load.num_waiting_for_adapter
    return is_queueing or load.num_free_blocks < _MIN_FREE_BLOCKS * load.num_blocks


def _copy(prepared: PreparedRequest, version: AdapterVersion) -> PreparedRequest:
    """Returns the same work for `version`, without log-probabilities: the answer is discarded."""
    requests = tuple(_copy_request(request, version) for request in prepared.requests)
    handle, adapters = replace(prepared.handle, migration=NO_MIGRATION), (WeightedVersion(version),)
    return replace(
        prepared,
        handle=handle,
        body=prepared.body.model_copy(update={"stream": False, "stream_options": None}),
        requests=requests,
        adapters=adapters,
        routing=make_routing_request(requests, adapters, handle.description.limits),
        is_copy=True,
    )


def _copy_request(request: Request, version: AdapterVersion) -> Request:
    return replace(
        request,
        request_id=uuid.uuid4().hex,
        adapter=version.digest,
        adapter_rank=version.rank,
        arrival_s=time.time(),
        params=replace(request.params, logprobs=None, prompt_logprobs=None),
    )
