"""An ingress: its own views of all replicas, its own policy object, requests on their way.

What stands here for Serve: a replica with `max_ongoing` requests takes none, the next in the
policy's order is asked, and where all are full the request waits until one has ended.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.admission import EngineLimits
from serve_app.messages import RoutingRequest
from serve_app.routing.policy import Policy, Ranked
from serve_app.routing.view import ReplicaView, ReplicaViews
from tests.benchmarks.simulator.calls import Call
from tests.benchmarks.simulator.engine import Engine, Frame
from tests.benchmarks.simulator.events import Loop
from tests.benchmarks.simulator.gate import Gate, GateArgs


@dataclass(frozen=True, slots=True)
class FrontArgs:
    front_s: float  # from a request's arrival to the engine's having it
    max_ongoing: int = 512  # ModelArgs.max_ongoing_requests
    gate: GateArgs | None = None  # None: requests go as they come


class Ingress:
    def __init__(
        self,
        number: int,
        loop: Loop,
        args: FrontArgs,
        limits: EngineLimits,
        policy: Policy,
        engines: Mapping[str, Engine],
    ) -> None:
        self.number = number
        self.policy = policy
        self.views = ReplicaViews(limits)
        self.num_taken = 0
        self._loop = loop
        self._args = args
        self._engines = engines
        self._held: deque[Call] = deque()  # all replicas are full
        self._random = random.Random(number)
        self.gate = None if args.gate is None else Gate(args.gate, self.views, self._go)

    @property
    def num_held(self) -> int:
        """Requests that no engine has yet."""
        return len(self._held) + (0 if self.gate is None else len(self.gate))

    @property
    def held_tokens(self) -> int:
        held = sum(call.num_prompt for call in self._held)
        return held + (0 if self.gate is None else self.gate.waiting_tokens)

    def keep(self, replica_ids: Sequence[str]) -> None:
        self.views.set_replicas(replica_ids)
        self.policy.changed(tuple(one.replica_id for one in self.views.replicas))

    def take(self, call: Call) -> None:
        self.num_taken += 1
        call.ingress = self.number
        call.call_id = f"{call.index}"
        if self.gate is None:
            self._go(call)
        else:
            self.gate.enter(call, self._loop.now_s)

    def resume(self, call: Call) -> None:
        """Its engine is gone; it has waited in a queue once."""
        call.call_id = f"{call.index}.{call.num_preemptions}"
        self._go(call)

    def see(self, frame: Frame, prefixes: set[int]) -> None:
        """Applies a step as `routing.state.ViewFeed` does, except that the views share their sets:
        separate sets for 1,000 replicas and 8 ingresses would occupy gigabytes."""
        view = self.views.get(frame.replica_id)
        if view is None:
            return
        step = frame.step
        for accepted in step.accepted:
            view.unplace(accepted.request_id)
        view.load = step.load
        view.updated_s = self._loop.now_s
        view.is_connected = True
        view.on_device, view.on_host, view.on_disk = frame.on_device, frame.on_host, frame.on_disk
        view.prefixes = prefixes
        if view.load_s.host != step.load_s[0]:
            view.observe_load_s(step.load_s)
        if self._held or (self.gate is not None and len(self.gate)):
            self._look()

    def tick(self) -> None:
        """Now and then, should no frame come."""
        if self.gate is not None:
            self.gate.expire(self._loop.now_s)
        self._look()

    def ended(self, call: Call) -> None:
        """One of its requests has."""
        view = self.views.get(call.replica_id)
        if view is not None:
            view.record_length(call.num_output)
        if self.gate is not None:
            self.gate.left(call, self._loop.now_s)

    def _look(self) -> None:
        while self._held and self._place(self._held[0]):
            self._held.popleft()
        if self.gate is not None and not self._held:
            self.gate.look(self._loop.now_s)

    def _go(self, call: Call) -> None:
        if self._held or not self._place(call):
            self._held.append(call)

    def _place(self, call: Call) -> bool:
        now_s = self._loop.now_s
        ask = RoutingRequest(
            call.call_id,
            call.num_prompt + call.num_done,
            adapter=call.adapter,
            adapter_rank=call.rank if call.adapter is not None else 0,
            prefixes=call.prefixes,
            session=call.session,
        )
        ranked = self.policy.rank(ask, self.views.replicas, now_s)
        for one in ranked:
            engine = self._engines[one.replica.replica_id]
            if engine.num_calls < self._args.max_ongoing:
                self._send(call, ask, one, engine)
                return True
        tried = {one.replica.replica_id for one in ranked}
        for replica in self._others(tried):
            engine = self._engines[replica.replica_id]
            if engine.num_calls < self._args.max_ongoing:
                self._send(call, ask, Ranked(replica, ranked[0].terms), engine)
                return True
        return False

    def _send(self, call: Call, ask: RoutingRequest, chosen: Ranked, engine: Engine) -> None:
        now_s = self._loop.now_s
        chosen.replica.place(ask, now_s)
        if not call.num_preemptions:
            call.placed_s = now_s
            call.expected_s = chosen.terms.total_s
        call.replica = engine.number
        call.replica_id = chosen.replica.replica_id
        engine.num_calls += 1
        self._loop.at(now_s + self._args.front_s, engine.submit, call)

    def _others(self, tried: set[str]) -> list[ReplicaView]:
        """Returns the replicas that the policy left out, in any order."""
        left = [one for one in self.views.replicas if one.replica_id not in tried]
        self._random.shuffle(left)
        return left
