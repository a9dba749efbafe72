"""Copies of requests for the version with the alias `shadow`: counted as an arm, answers dropped.

A copy begins when its request's first token is there, so it cannot delay it, and not at all where
others would wait for it. Nothing that goes wrong with it reaches a client.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextvars import Context
from dataclasses import dataclass, replace

from engine.types import EngineLoad, Request
from registry.entities import AdapterVersion
from serve_app.canary.arm_stats import ArmStats
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.completion import Completion
from serve_app.dispatch.generation import STAY, CallParameters, Generation
from serve_app.dispatch.migrations import Migrations
from serve_app.errors import RequestQuarantinedError
from serve_app.openai.answer import ResponseBuilder
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.engine_params import Prompt
from serve_app.openai.responses import ResponseHead
from serve_app.routing.request import make_routing_request
from serve_app.tally import ArmKey
from serve_app.tasks import spawn

logger = logging.getLogger(__name__)

_FIRST_TOKEN_S = 10.0  # an adapter may have to be fetched first
_MIN_FREE_BLOCKS = 0.2  # of the KV cache: below it a copy could push others out


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request as it went to its own version."""

    front: BaseHandle
    lane: CallParameters
    body: ChatRequest | CompletionRequest
    prompts: tuple[Prompt, ...]
    requests: tuple[Request, ...]
    head: ResponseHead


class Shadows:
    """Of one ingress replica, at most `limit` at once."""

    def __init__(self, migrations: Migrations, arms: ArmStats, limit: int) -> None:
        self.num_dropped = 0
        self._migrations = migrations
        self._arms = arms
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    def offer(self, submitted: Submitted, version: AdapterVersion, load: EngineLoad | None) -> None:
        """`load`: of the engine that answers the request."""
        if len(self._tasks) >= self._limit or load is None or is_busy(load):
            self.num_dropped += 1
            return
        # In a context of its own: Serve's router tells calls of one HTTP request apart by nothing,
        # and would cancel this one with the client's.
        task = spawn(self._run(submitted, version), "shadow", Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, submitted: Submitted, version: AdapterVersion) -> None:
        key = ArmKey(version.name, "shadow", version.version, version.digest)
        requests = tuple(_copy(request, version) for request in submitted.requests)
        body = submitted.body.model_copy(update={"stream": False, "stream_options": None})
        answer = ResponseBuilder(body, submitted.prompts, submitted.front.text, submitted.head)
        lane = replace(submitted.lane, migration=STAY, has_client=False)  # nobody waits for it
        ask = make_routing_request(requests, version, lane.limits)
        try:
            generation = Generation(self._migrations, lane, requests, version, ask)
        except RequestQuarantinedError:  # it killed engines when a client asked for this version
            self.num_dropped += 1
            return
        watch = self._arms.begin(key)
        completion: Completion | None = None
        try:
            async with asyncio.timeout(_FIRST_TOKEN_S) as patience:
                completion = Completion(
                    generation, answer, requests, watch, lambda _: patience.reschedule(None)
                )
                await completion.finish()
        except Exception as error:  # counted by the watch; there is nobody to be told
            logger.info("shadow of %s@%d: %s", version.name, version.version, error)
        finally:
            if completion is not None:
                completion.close()


def is_busy(load: EngineLoad) -> bool:
    """Somebody waits for room, other than for an adapter."""
    is_queueing = load.num_waiting > load.num_waiting_for_adapter
    return is_queueing or load.num_free_blocks < _MIN_FREE_BLOCKS * load.num_blocks


def _copy(request: Request, version: AdapterVersion) -> Request:
    """The same work but for logprobs, which nobody reads."""
    return replace(
        request,
        request_id=uuid.uuid4().hex,
        adapter=version.digest,
        arrival_s=time.time(),
        params=replace(request.params, logprobs=None, prompt_logprobs=None),
    )
