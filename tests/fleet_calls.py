"""Serve's end of a replica's process, and a call on its way there and back.

Simulates Serve's use of actors: a call has latency both ways and is accepted or rejected, a
cancellation travels to it, and its result is lost when the process ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorDiedError, TaskCancelledError
from ray.serve._private.common import ReplicaQueueLengthInfo
from ray.serve._private.replica_result import ReplicaResult
from ray.serve._private.request_router.common import PendingRequest

from tests.fleet_actor import Process, was_read
from tests.virtual_loop import VirtualLoop

WAY_S = (0.0005, 0.01)  # in each direction between an ingress and a replica


class ServeReplica:
    """Serve's part of a replica's process. `target`: the user's object."""

    def __init__(
        self, loop: VirtualLoop, process: Process, engine_id: str, target: Any, max_ongoing: int
    ) -> None:
        self.is_dead = False
        self.max_ongoing = max_ongoing
        self.engine_id = engine_id
        self.calls: dict[Call, asyncio.Task[Any]] = {}
        self._loop = loop
        self._process = process
        self._target = target
        self._frozen: list[Callable[[], None]] | None = None

    def freeze(self) -> None:
        self._frozen = []

    def thaw(self) -> None:
        frozen, self._frozen = self._frozen or [], None
        for step in frozen:
            step()

    def kill(self) -> None:
        self.is_dead = True
        self.thaw()
        calls, self.calls = self.calls, {}
        for call, task in calls.items():
            task.cancel()
            call.reply(error=ActorDiedError())

    def take(self, call: Call) -> None:
        if self._frozen is not None:
            self._frozen.append(lambda: self.take(call))
        elif self.is_dead:
            call.reply(error=ActorDiedError())
        elif call.is_cancelled:
            call.reply(error=TaskCancelledError())
        elif call.with_rejection and len(self.calls) >= self.max_ongoing:
            call.inform(ReplicaQueueLengthInfo(False, len(self.calls)))
            call.reply(None)
        else:
            pending = call.pending
            method = getattr(self._target, pending.metadata.call_method)
            task = self._process.task(method(*pending.args, **pending.kwargs))
            self.calls[call] = task
            task.add_done_callback(lambda task: self._ended(call, task))
            call.inform(ReplicaQueueLengthInfo(True, len(self.calls)))

    def cancel(self, call: Call) -> None:
        if self._frozen is not None:
            self._frozen.append(lambda: self.cancel(call))
        elif (task := self.calls.get(call)) is not None:
            task.cancel()

    def _ended(self, call: Call, task: asyncio.Task[Any]) -> None:
        if self.calls.pop(call, None) is None:  # the process died
            was_read(task)
        elif task.cancelled():
            call.reply(error=TaskCancelledError())
        elif (error := task.exception()) is not None:
            call.reply(error=error)
        else:
            call.reply(task.result())


class Call(ReplicaResult):
    """Acts as Ray's ActorReplicaResult."""

    def __init__(
        self, loop: VirtualLoop, replica: ServeReplica, pending: PendingRequest, rejection: bool
    ) -> None:
        self.pending = pending
        self.with_rejection = rejection
        self.is_cancelled = False
        self._loop = loop
        self._replica = replica
        self._info: asyncio.Future[ReplicaQueueLengthInfo] = loop.create_future()
        self._done: asyncio.Future[Any] = loop.create_future()
        self._info.add_done_callback(was_read)
        self._done.add_done_callback(was_read)
        self._later(lambda: replica.take(self))

    def inform(self, info: ReplicaQueueLengthInfo) -> None:
        self._later(lambda: self._info.done() or self._info.set_result(info))

    def reply(self, result: object = None, error: BaseException | None = None) -> None:
        def end() -> None:
            if self._done.done():
                return
            if error is None:
                self._done.set_result(result)
                return
            if not self._info.done():
                self._info.set_exception(error)
            self._done.set_exception(error)

        self._later(end, least_s=WAY_S[1])

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo | None:
        try:
            return await asyncio.shield(self._info)
        except asyncio.CancelledError:
            self.cancel()
            raise
        except TaskCancelledError:
            raise asyncio.CancelledError from None

    async def get_async(self) -> Any:
        try:
            return await asyncio.shield(self._done)
        except TaskCancelledError:
            raise asyncio.CancelledError from None

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        def on_done(done: asyncio.Future[Any]) -> None:
            error = done.exception()
            callback(done.result() if error is None else error)

        self._done.add_done_callback(on_done)

    def cancel(self) -> None:
        self.is_cancelled = True
        self._later(lambda: self._replica.cancel(self))

    def _later(self, step: Callable[[], object], least_s: float = 0.0) -> None:
        self._loop.call_later(least_s + self._loop.random.uniform(*WAY_S), step)

    def get(self, timeout_s: float | None) -> Any:
        raise NotImplementedError

    def __next__(self) -> Any:
        raise NotImplementedError

    async def __anext__(self) -> Any:
        raise NotImplementedError

    def to_object_ref(self) -> Any:
        raise NotImplementedError

    async def to_object_ref_async(self) -> Any:
        raise NotImplementedError

    def to_object_ref_gen(self) -> Any:
        raise NotImplementedError
