"""Random fleets on a virtual clock: the request path from the ASGI application of several ingresses
through their queues, Serve's router, engine replicas and the side stream, with engines that only
count. Clients come, and leave at any iteration of the event loop; engines die, hang, drain and come
back; links are cut, calls are cancelled, adapters fall out of memory, the base falls asleep.

`fleet_promises` has the promises that every fleet must keep. A seed gives the same fleet each time
in processes of the same PYTHONHASHSEED; `python -m tests.benchmarks.request_path` runs hundreds of
them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import ray.serve.context

from engine.admission import EngineLimits
from serve_app.admission.queue import AdmissionQueue
from serve_app.autoscaling.stats import ScalingStats
from serve_app.config import IngressArgs
from serve_app.dispatch.activity import Activity
from serve_app.dispatch.attempt import Attempt
from serve_app.dispatch.request_quarantine import RequestQuarantine
from serve_app.replica.engine_actor import _Call
from serve_app.stream.server import TokenStream, _EngineConnection
from serve_app.tenancy.limits import Limits
from tests.fleet_actor import PROCESS
from tests.fleet_clients import Client
from tests.fleet_engine import StepEngine
from tests.fleet_ingress import FleetIngress, make_front, processes
from tests.fleet_manager import Manager
from tests.fleet_node import EngineNode, Files
from tests.fleet_plan import BROKEN, DIGESTS, LOST, base_text, characters, draw_plan
from tests.fleet_promises import leftovers, wrong_answers, wrong_counts, wrong_usage
from tests.fleet_wishes import Wish, draw_wish
from tests.virtual_loop import VirtualLoop, repeatable, virtual_time
from tests.virtual_network import Connection

_OPENING_S = 3.0  # until all engines are connected
_END_S = 240.0  # after the last event, by when every request has ended
_QUIET_S = 40.0  # longer than any timer of a request
_ANSWER_S = 20.0  # the time limit of an answer from an idle fleet
_LOOKS, _LOOK_S = 12, 0.37  # warm-ups of the same adapter may follow each other each second
_FROZEN_S = (0.5, 4.0, 15.0)
_CUT_AT_ONCE_S = 3.0
_CLOCKED = (Activity, RequestQuarantine, AdmissionQueue, ScalingStats, Limits)


@dataclass
class Result:
    """`events`: (seconds, words); `tally`: the number of each kind of event."""

    seed: int
    violations: list[str] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    tally: Counter[str] = field(default_factory=Counter)
    iterations: int = 0
    virtual_s: float = 0.0


class Fleet:
    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.draw = random.Random(f"fleet {seed}")
        self.plan = draw_plan(self.draw)
        self.result = Result(seed)
        self.nodes: list[EngineNode] = []
        self.clients: list[Client] = []
        self.seeds: dict[str, set[int]] = {}  # see `StepEngine`
        self._drains: list[asyncio.Task[None]] = []
        self._open()

    @property
    def serving(self) -> list[EngineNode]:
        return [node for node in self.nodes if node.is_up]

    async def run(self) -> None:
        self._note(str(self.plan))
        await asyncio.sleep(_OPENING_S)
        watch = self.loop.create_task(self._watch_orphans())
        control = self.loop.create_task(self._control())
        await asyncio.gather(self._arrive(), self._hurt())
        self._mend()
        await self.manager.wake()
        await asyncio.wait([client.task for client in self.clients], timeout=_END_S)
        await asyncio.sleep(_QUIET_S)
        for task in (watch, control):
            task.cancel()
        await asyncio.wait([watch, control])
        self._judge()
        await self._judge_rest()
        await self._judge_new_requests()
        await self._judge_rest()

    def _open(self) -> None:
        plan, (files, text) = self.plan, base_text()
        self.limits = EngineLimits(
            max_model_len=100_000,
            vocab_size=1000,
            max_kv_tokens=1_000_000,
            max_num_seqs=plan.rows,
            max_num_batched_tokens=plan.batched_tokens,
            prefix_chunk=8,
        )
        self.manager = Manager(plan.view(), plan.num_ingresses)
        args = IngressArgs(
            allowed_hosts=("testserver",),
            max_ongoing_requests=plan.max_open,
            body_timeout_s=4.0,
            max_arriving_bytes=40_000,
            trusted_gateway="gateway",
        )
        front = make_front(self.manager.platform.bases[0], files, self.limits, text)
        self.ingresses = [
            FleetIngress(
                self.loop,
                f"i{number}",
                self.manager,
                front,
                args,
                plan.fairness,
                plan.policy,
                plan.max_queued,
            )
            for number in range(plan.num_ingresses)
        ]
        for _ in range(plan.num_engines):
            self._add_engine()

    def _add_engine(self) -> None:
        ids, by_id = characters()
        name = f"e{len(self.nodes)}"
        engine = StepEngine(
            self.loop,
            self.limits,
            self.plan.step_s,
            lambda tokens: "".join(by_id[token] for token in tokens),
            ids.__getitem__,
            self.seeds,
        )
        files = Files(BROKEN, LOST)
        self.nodes.append(EngineNode(self.loop, name, engine, files, self.plan.max_ongoing))
        self._note(f"engine {name} comes")
        self._tell()

    def _tell(self) -> None:
        """Sends the controller's update to each ingress a little later."""
        for ingress in self.ingresses:
            self.loop.call_later(self.draw.uniform(0.0, 0.5), self._update, ingress)

    def _update(self, ingress: FleetIngress) -> None:
        ingress.router.update([node.serve for node in self.serving])

    def _note(self, words: str) -> None:
        self.result.events.append((self.loop.time(), words))

    def _violate(self, every: Iterable[str]) -> None:
        for words in every:
            self.result.violations.append(words)
            self._note(f"VIOLATION {words}")

    async def _arrive(self) -> None:
        plan, draw = self.plan, self.draw
        for _ in range(plan.num_requests):
            await asyncio.sleep(draw.expovariate(plan.num_requests / plan.over_s))
            wish = draw_wish(draw, len(self.clients), plan.models, plan.poison, plan.leaving)
            self._start(wish, draw.choice(self.ingresses))

    def _start(self, wish: Wish, ingress: FleetIngress) -> Client:
        client = Client(self.loop, len(self.clients), ingress, wish)
        self.clients.append(client)
        self._note(f"request {client.number} at {ingress.name}: {wish}")
        client.start()
        client.task.add_done_callback(lambda _: self._note(f"request {client.number}: {client}"))
        return client

    async def _hurt(self) -> None:
        plan, draw = self.plan, self.draw
        for fault in plan.faults:
            await asyncio.sleep(draw.expovariate(len(plan.faults) / plan.over_s))
            able = [node for node in self.serving if not node.engine.is_hung]
            if len(able) < 2:
                self._add_engine()
                continue
            node = draw.choice(able)
            self._note(f"{fault}: {node.engine_id}")
            self.result.tally[fault] += 1
            self._harm(node, fault)
            if draw.random() < plan.replaced:
                self._add_engine()

    async def _control(self) -> None:
        """Acts as Serve's controller: removes dead replicas from the list and keeps at least
        two."""
        known: list[EngineNode] = []
        while True:
            await asyncio.sleep(1.0)
            while len(self.serving) < 2:
                self._add_engine()
            if self.serving != known:
                known = self.serving
                self._tell()

    def _harm(self, node: EngineNode, fault: str) -> None:
        draw = self.draw
        if fault == "kill":
            node.kill()
            self._tell()
        elif fault == "kill engine":
            node.kill_engine()
            self.loop.call_later(1.0, self._tell)
        elif fault == "freeze":
            node.freeze()
            self.loop.call_later(draw.choice(_FROZEN_S), node.thaw)
        elif fault == "hang":
            node.hang()
        elif fault == "drain":
            self._drains.append(self.loop.create_task(node.drain()))
            self._tell()
        elif fault.startswith("cut") and (links := node.connections):
            draw.choice(links).cut()
            if fault == "cut at once":  # and all new links for some time
                self.loop.on_connection = self._cut_at_once
                self.loop.call_later(_CUT_AT_ONCE_S, self._cut_no_more)
        elif fault == "cancel" and node.serve.calls:
            draw.choice(list(node.serve.calls.values())).cancel()
        elif fault == "no memory":
            node.engine.lacks_memory = True
        elif fault == "evict":
            node.engine.evict_idle(draw)
        elif fault == "sleep":
            self.manager.fall_asleep()

    def _cut_at_once(self, connection: Connection) -> None:
        iteration = self.loop.iteration + self.draw.randrange(12)
        if self.draw.random() < 0.5:
            self.loop.at_iteration(iteration, connection.cut)

    def _cut_no_more(self) -> None:
        self.loop.on_connection = lambda _: None

    def _mend(self) -> None:
        """Repairs the rest of the fleet so that it can serve."""
        self._note("the last fault is over")
        self._cut_no_more()
        for node in self.nodes:
            node.engine.lacks_memory = False
            if node.is_frozen:
                node.thaw()
            if node.engine.is_hung:
                node.kill()
        self._tell()

    async def _watch_orphans(self) -> None:
        before: set[str] = set()
        while True:
            await asyncio.sleep(0.25)
            able = [node for node in self.nodes if not node.is_dead and not node.is_frozen]
            now = {one for node in able for one in node.orphans()}
            if before & now:
                self._violate([f"{len(before & now)} requests run for an ingress that is gone"])
            before = now

    def _judge(self) -> None:
        tally = self.result.tally
        for client in self.clients:
            tally[f"ended: {client}"] += 1
        died_s = [node.died_s for node in self.nodes if node.died_s is not None]
        self._violate(wrong_answers(self.clients, self.seeds, self.plan, tally, died_s))
        self._violate(wrong_usage(self.manager.usage, self.clients))
        for ingress in self.ingresses:
            self._violate(wrong_counts(ingress, self.clients))

    async def _judge_rest(self) -> None:
        """Reports leftovers that last; an adapter loaded ahead of requests goes away by itself."""
        left: list[str] = []
        for _ in range(_LOOKS):
            left = list(leftovers(self.loop, self.ingresses, self.serving))
            if not left:
                break
            await asyncio.sleep(_LOOK_S)
        self._violate(left)

    async def _judge_new_requests(self) -> None:
        """Checks that the fleet answers as a new fleet would and that its engines count their
        work."""
        for ingress in self.ingresses:
            before, clients = self._finished(), []
            for kind in range(4):
                if kind == 3:  # engines drop its adapter without a report to their replicas
                    for node in self.serving:
                        node.engine.loaded.clear()
                wish = _plain(kind, len(self.clients))
                clients.append(self._start(wish, ingress))
                await asyncio.wait([clients[-1].task], timeout=_ANSWER_S)
            await asyncio.sleep(3.0)
            for client in clients:
                if not client.has_ended_well:
                    self._violate([f"{ingress.name} does not answer a new request: {client}"])
                self._violate(client.faults(self.seeds, DIGESTS))
            wanted: Counter[str] = Counter()
            for client in clients:
                wanted.update(client.reasons)
            counted = self._finished() - before
            shadows = counted.total() - wanted.total()
            if counted - wanted != Counter({"length": shadows} if shadows == 1 else {}):
                self._violate([f"engines count {dict(counted)} ends, not {dict(wanted)}"])

    def _finished(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for node in self.serving:
            counts.update(node.metrics._finished)
        return counts


def _plain(kind: int, number: int) -> Wish:
    """Returns a wish of four kinds: streamed and whole, a stop string, an adapter."""
    stop = "e" if kind == 1 else None
    model = "pirate" if kind == 3 else "base"
    return Wish(kind < 2, kind % 2 == 0, model, (f"new{number}",), 1, 40, stop, number, "", 0)


def run_fleet(seed: int) -> Result:
    """Runs a fleet from its beginning to its end."""
    loop = VirtualLoop(seed)
    loop.inherited = (PROCESS,)
    state, disabled = random.getstate(), logging.root.manager.disable
    random.seed(seed)
    logging.disable()  # thousands of expected warnings
    clocked = [one.__init__ for one in _CLOCKED]
    asyncio.set_event_loop(loop)
    try:
        with (
            virtual_time(loop, *clocked),
            repeatable(loop, Attempt, TokenStream, _EngineConnection, _Call),
            processes(),
        ):
            result = loop.run_until_complete(_run(loop, seed))
            result.iterations, result.virtual_s = loop.iteration, loop.time()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=5.0))
        return result
    finally:
        asyncio.set_event_loop(None)
        ray.serve.context._requests_pending_assignment.clear()
        random.setstate(state)
        logging.disable(disabled)
        loop.close()


async def _run(loop: VirtualLoop, seed: int) -> Result:
    fleet = Fleet(loop, seed)
    await fleet.run()
    return fleet.result
