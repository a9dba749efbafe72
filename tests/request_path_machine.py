"""Random fleets on a virtual clock: the request path from the ASGI application of several ingresses
through their queues, Serve's router, engine replicas and the side stream, with engines that only
count. Clients come and leave at any iteration of the event loop, engines die, hang, drain and come
back, adapters fall out of memory. What must hold of every fleet is in `Fleet._judge`.

A seed gives the same fleet, as long as nothing iterates over a set of strings in another order: the
long form runs with PYTHONHASHSEED=0.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from engine.admission import EngineLimits
from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion, Setting
from serve_app.activity import Activity
from serve_app.attempt import Attempt
from serve_app.config import FairnessArgs, IngressArgs, MigrationArgs
from serve_app.engine_actor import _Call
from serve_app.request_quarantine import RequestQuarantine
from serve_app.routing.admission import AdmissionQueue
from serve_app.scaling_stats import ScalingStats
from serve_app.stream_server import TokenStream, _EngineConnection
from serve_app.text import BaseText
from serve_app.topology import PlatformView, ServedBase
from tests.fakes_registry import write_text_files
from tests.fleet_clients import Client, Wish, draw_wish
from tests.fleet_engine import StepEngine
from tests.fleet_ingress import FleetIngress, Manager, make_front, processes
from tests.fleet_node import EngineNode, Files
from tests.virtual_loop import VirtualLoop, repeatable, virtual_time

APP = "base-app"
BROKEN, LOST = "broken", "lost"
_END_S = 240.0  # after the last event every request ended
_QUIET_S = 40.0  # longer than any timer of a request
_BASE = BaseVersion("base", 1, "b" * 64, "")
FAULTS = ("kill", "kill engine", "freeze", "hang", "drain", "cut", "cancel", "no memory", "evict")


def _adapter(name: str, version: int = 1, *aliases: str) -> AdapterVersion:
    digest = f"{name}{version}".ljust(64, "0")
    return AdapterVersion(name, version, digest, "base", _BASE.digest, 16, ("q",), "", aliases)


_ADAPTERS = (
    _adapter("pirate"),
    _adapter("poet", 1, "champion"),
    _adapter("poet", 2, "canary"),
    _adapter(BROKEN),
    _adapter(LOST),
)
_CATALOG = Catalog((_BASE,), _ADAPTERS, settings=(Setting("poet", "canary_weight", "0.5"),))
DIGESTS = {f"{one.name}@{one.version}": one.digest for one in _ADAPTERS}
MODELS = ["base", "base", "base", "pirate", "poet", "poet", BROKEN, LOST, "unknown"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one fleet is like."""

    num_engines: int
    num_ingresses: int
    num_requests: int
    over_s: float  # in which they arrive
    num_faults: int
    rows: int  # of an engine
    max_ongoing: int  # of a replica
    max_queued: int  # at Serve
    step_s: float
    poison: float
    migration: MigrationArgs
    fairness: FairnessArgs
    max_open: int
    policy: str

    @property
    def is_roomy(self) -> bool:
        """No request has a reason to wait long."""
        return self.rows >= 64 and self.max_ongoing >= 64


def draw_plan(draw: random.Random) -> Plan:
    is_roomy = draw.random() < 0.5
    return Plan(
        draw.choice((2, 3, 4)),
        draw.choice((1, 1, 2, 3)),
        draw.choice((12, 25, 50)),
        draw.choice((1.0, 6.0, 15.0)),
        draw.choice((0, 2, 5, 9)),
        64 if is_roomy else draw.choice((4, 8, 16)),
        256 if is_roomy else draw.choice((2, 4, 256)),
        256 if is_roomy else draw.choice((2, 256)),
        draw.choice((0.005, 0.02, 0.05)),
        0.05 if draw.random() < 0.2 else 0.0,
        MigrationArgs(limit=draw.choice((0, 1, 3, 50, 50)), timeout_s=draw.choice((3.0, 60.0))),
        FairnessArgs(
            weights={"gold": 4.0, "iron": 0.25},
            max_wait_s=draw.choice((0.5, 10.0)),
            max_engine_queue_s=draw.choice((0.05, 0.5)),
            max_queue_s=draw.choice((2.0, 30.0)),
        ),
        draw.choice((1000, 1000, 10)),
        draw.choice(("expected_ttft", "expected_ttft", "power_of_two", "round_robin")),
    )


@cache
def _text() -> tuple[dict[str, bytes], BaseText]:
    with tempfile.TemporaryDirectory() as folder:
        write_text_files(Path(folder))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files, BaseText.from_files(files)


@cache
def _letters() -> tuple[dict[str, int], dict[int, str]]:
    _, text = _text()
    ids = {chr(code): text.encode(chr(code))[0] for code in (10, *range(32, 127))}
    return ids, {token_id: character for character, token_id in ids.items()}


@dataclass
class Result:
    """`events`: (seconds, words); `tally`: what happened how often."""

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
        self.seeds: dict[str, set[int]] = {}
        self._drains: list[asyncio.Task[None]] = []
        self._num_engines = 0
        self._num_clients = 0

    async def run(self) -> None:
        self._open()
        self._note(str(self.plan))
        await asyncio.sleep(3.0)  # all are connected
        arrivals = self.loop.create_task(self._arrive())
        faults = self.loop.create_task(self._hurt())
        watch = self.loop.create_task(self._watch_orphans())
        await asyncio.gather(arrivals, faults)
        self._mend()
        tasks = [client.task for client in self.clients]
        await asyncio.wait(tasks, timeout=_END_S)
        await asyncio.sleep(_QUIET_S)
        watch.cancel()
        await asyncio.wait([watch])
        self._judge()
        await self._judge_new_requests()

    def _open(self) -> None:
        plan = self.plan
        files, text = _text()
        self.limits = EngineLimits(
            max_model_len=100_000,
            vocab_size=1000,
            max_kv_tokens=1_000_000,
            max_num_seqs=plan.rows,
            max_num_batched_tokens=self.draw.choice((64, 8192)),
            prefix_chunk=8,
        )
        base = ServedBase(_BASE, APP, True, state="running", migration=plan.migration)
        view = PlatformView("1", _CATALOG, (base,), (), True, None, cache_salt_key=b"k" * 32)
        self.manager = Manager(view, plan.num_ingresses)
        self.ingresses = [
            FleetIngress(
                self.loop,
                f"i{number}",
                self.manager,
                make_front(base, files, self.limits, text),
                IngressArgs(
                    allowed_hosts=("testserver",),
                    max_ongoing_requests=plan.max_open,
                    body_timeout_s=4.0,
                    max_arriving_bytes=40_000,
                    trusted_gateway="gateway",
                ),
                plan.fairness,
                plan.policy,
                plan.max_queued,
            )
            for number in range(plan.num_ingresses)
        ]
        for _ in range(plan.num_engines):
            self._add_engine()

    def _add_engine(self) -> EngineNode:
        ids, characters = _letters()
        engine = StepEngine(
            self.loop,
            self.limits,
            self.plan.step_s,
            lambda tokens: "".join(characters[token] for token in tokens),
            ids.__getitem__,
            self.seeds,
        )
        name = f"e{self._num_engines}"
        self._num_engines += 1
        files = Files(BROKEN, LOST)
        node = EngineNode(self.loop, name, engine, files, self.plan.max_ongoing)
        self.nodes.append(node)
        self._tell()
        return node

    def _tell(self) -> None:
        """The controller's news reach each ingress a little later."""
        for ingress in self.ingresses:
            self.loop.call_later(self.draw.uniform(0.0, 0.5), self._update, ingress)

    def _update(self, ingress: FleetIngress) -> None:
        ingress.router.update([node.serve for node in self.nodes if node.is_up])

    def _note(self, words: str) -> None:
        self.result.events.append((self.loop.time(), words))

    def _violate(self, words: str) -> None:
        self.result.violations.append(words)
        self._note(f"VIOLATION {words}")

    async def _arrive(self) -> None:
        plan, draw = self.plan, self.draw
        models = [one for one in MODELS if draw.random() < 0.7] or MODELS
        for _ in range(plan.num_requests):
            await asyncio.sleep(draw.expovariate(plan.num_requests / plan.over_s))
            self._start(draw_wish(draw, self._num_clients, models, poison=plan.poison))

    def _start(self, wish: Wish, ingress: FleetIngress | None = None) -> Client:
        client = Client(self.loop, self._num_clients, ingress or self._any_ingress(), wish)
        self._num_clients += 1
        self.clients.append(client)
        self._note(f"request {client.number} at {client.ingress.name}: {wish}")
        client.start()
        client.task.add_done_callback(lambda _: self._ended(client))
        return client

    def _ended(self, client: Client) -> None:
        how = "left" if client.has_left else f"{client.status} {client.code or ''}"
        self._note(f"request {client.number} ended: {how}")

    def _any_ingress(self) -> FleetIngress:
        return self.draw.choice(self.ingresses)

    async def _hurt(self) -> None:
        plan, draw = self.plan, self.draw
        for _ in range(plan.num_faults):
            await asyncio.sleep(draw.expovariate(plan.num_faults / plan.over_s))
            able = [node for node in self.nodes if node.is_up and not node.engine.is_hung]
            if len(able) < 2:
                self._note(f"engine {self._add_engine().engine_id} comes")
                continue
            node, fault = draw.choice(able), draw.choice(FAULTS)
            self._note(f"{fault}: {node.engine_id}")
            self.result.tally[fault] += 1
            self._harm(node, fault)
            if draw.random() < 0.7:
                self._note(f"engine {self._add_engine().engine_id} comes")

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
            self.loop.call_later(draw.choice((0.5, 4.0, 15.0)), node.thaw)
        elif fault == "hang":
            node.hang()
        elif fault == "drain":
            self._drains.append(self.loop.create_task(node.drain()))
            self._tell()
        elif fault == "cut" and (links := node.connections):
            draw.choice(links).cut()
        elif fault == "cancel" and node.serve.calls:
            draw.choice(list(node.serve.calls.values())).cancel()
        elif fault == "no memory":
            node.engine.lacks_memory = True
        elif fault == "evict":
            node.engine.evict_idle(draw)

    def _mend(self) -> None:
        """Whatever is left of the fleet can serve."""
        self._note("the last fault is over")
        for node in self.nodes:
            node.engine.lacks_memory = False
            if node.is_frozen:
                node.thaw()
            if node.engine.is_hung:
                node.kill()
        while sum(node.is_up for node in self.nodes) < 2:
            self._note(f"engine {self._add_engine().engine_id} comes")
        self._tell()

    async def _watch_orphans(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            for node in self.nodes:
                if not node.is_dead and not node.is_frozen and (orphans := node.orphans()):
                    self._violate(f"{node.engine_id} works for a lost ingress: {len(orphans)}")

    def _judge(self) -> None:
        for client in self.clients:
            self._judge_client(client)
        self._judge_counters()
        self._judge_rest()

    def _judge_client(self, client: Client) -> None:
        name = f"request {client.number} ({client.wish})"
        for fault in client.faults(self.seeds, DIGESTS):
            self._violate(f"{name}: {fault}")
        if client.has_left or not client.task.done():
            self.result.tally["left"] += client.has_left
            return
        if client.has_ended_well:
            self.result.tally["ended well"] += 1
            return
        code = client.code or "?"
        self.result.tally[code] += 1
        if not self._is_excused(client, code):
            self._violate(f"{name}: {code} without a reason: {client.body[-200:]!r}")

    def _is_excused(self, client: Client, code: str) -> bool:
        """Whether something happened in this fleet for which a request may be told this."""
        plan, wish, tally = self.plan, client.wish, self.result.tally
        deaths = sum(tally[one] for one in FAULTS[:6]) + 3 * bool(plan.poison)
        if code == "model_not_found":
            return wish.model == "unknown"
        if code == "adapter_unsupported":
            return wish.model == BROKEN
        if code in ("unavailable", "bad_artifact", "quarantined"):
            return wish.model == LOST
        if code == "overloaded":
            return not plan.is_roomy or plan.max_open < plan.num_requests or bool(wish.padding)
        if code == "request_quarantined":  # who is under two engines that die cannot prove anything
            return wish.is_poison or deaths >= 2
        if code == "body_timeout":
            return bool(wish.body_s)
        if code == "engine_out_of_memory":
            return tally["no memory"] > plan.migration.limit
        if code == "engine_unavailable":
            is_late = plan.migration.timeout_s < 10 and not plan.is_roomy
            return deaths + tally["cancel"] > plan.migration.limit or is_late
        return False

    def _judge_counters(self) -> None:
        for ingress in self.ingresses:
            name, own = ingress.name, [c for c in self.clients if c.ingress is ingress]
            metrics = ingress.state.metrics
            answers = Counter(c.status for c in own if c.status is not None)
            counted: Counter[int | None] = Counter()
            for (_, status), count in metrics._answers.items():
                counted[status] += count
            if counted != answers:
                self._violate(f"{name}: answers are {dict(counted)}, not {dict(answers)}")
            gone = sum(
                c.has_begun and (not c.is_whole or c.status == 499) for c in own if c.task.done()
            )
            if metrics._num_disconnects != gone:
                self._violate(f"{name}: {metrics._num_disconnects} disconnects, not {gone}")
            outcomes = ingress.outcomes
            if outcomes.total() != ingress.num_watches:
                told = f"{outcomes.total()} of {ingress.num_watches}"
                self._violate(f"{name}: outcomes of {told} watched requests are counted")
            left = sum(c.has_left for c in own)
            well = sum(c.has_ended_well and c.wish.model == "poet" for c in own if not c.has_left)
            if not well <= outcomes["ok"] + outcomes["empty"] <= well + left:
                self._violate(f"{name}: {outcomes['ok']} of {well} answers of an arm are counted")
            self._judge_losses(ingress, own, left)

    def _judge_losses(self, ingress: FleetIngress, own: list[Client], left: int) -> None:
        told = sum(c.code == "engine_unavailable" for c in own if not c.has_left)
        lost = sum(ingress.gateway.migrations.metrics._lost.values())
        if not told <= lost <= told + left:
            self._violate(f"{ingress.name}: {lost} requests are counted as lost, {told} were told")
        full = sum(c.code == "overloaded" for c in own if not c.has_left)
        stats = ingress.state.queues.stats
        shed = stats.num_turned_away + sum(
            one.sheds.total() for one in stats._bases.values()
        )
        if shed > full + left:
            self._violate(f"{ingress.name}: {shed} refusals are counted, {full} were told")

    def _judge_rest(self) -> None:
        """Of nobody's request anything is left, and every view is right again."""
        alive = [node for node in self.nodes if node.is_up]
        for node in alive:
            for words in node.leftovers():
                self._violate(words)
        for ingress in self.ingresses:
            for words in (*ingress.leftovers(), *ingress.misjudged(alive)):
                self._violate(words)
        self._judge_tasks()

    def _judge_tasks(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            name = getattr(task.get_coro(), "__qualname__", "?")
            if not name.startswith(_LASTING):
                self._violate(f"a task is left: {name}")
        timers = [timer for timer in self.loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        for timer in timers:
            name = getattr(timer._callback, "__qualname__", "?")
            if name.startswith(_OF_REQUESTS):
                self._violate(f"a timer is left: {name}")

    async def _judge_new_requests(self) -> None:
        """The fleet is as well as a new one, and counts what it does right."""
        alive = [node for node in self.nodes if node.is_up]
        for ingress in self.ingresses:
            before = _finished(alive)
            clients = []
            for number in range(4):
                clients.append(self._start(_plain(number, self._num_clients), ingress))
                await asyncio.wait([clients[-1].task], timeout=20.0)
            await asyncio.sleep(1.0)
            told = [f"{c.number}: {c.status} {c.code}" for c in clients if not c.has_ended_well]
            if told:
                self._violate(f"{ingress.name} does not answer new requests: {told}")
                continue
            for client in clients:
                for fault in client.faults(self.seeds, DIGESTS):
                    self._violate(f"new request {client.number}: {fault}")
            wanted: Counter[str] = Counter()
            for client in clients:
                wanted.update(client._read()[1].values())
            if (counted := _finished(alive) - before) != wanted:
                self._violate(f"engines count the ends {dict(counted)}, not {dict(wanted)}")
        await asyncio.sleep(2.0)
        self._judge_rest()


_LASTING = (
    "Gateway._follow",
    "Gateway._report",
    "Attendance._",
    "Migrations._keep_looking",
    "EngineHost._beat",
    "EngineNode._exit_with_the_engine",
    "Manager.",
    "Event.wait",
    "Fleet.run",
    "RouterMetricsManager._report_cached_metrics_forever",
)
_OF_REQUESTS = ("Generation", "TokenStream", "AdmissionQueue", "Attempt", "Timeout")


def _finished(nodes: list[EngineNode]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for node in nodes:
        counts.update(node.metrics._finished)
    return counts


def _plain(kind: int, number: int) -> Wish:
    """Of four kinds: streamed and whole, a stop string, an adapter."""
    stop = "e" if kind % 2 else None
    model = "pirate" if kind == 3 else "base"
    prompts = (f"new{number}",)
    return Wish(kind < 2, kind % 2 == 0, model, prompts, 1, 40, stop, number, "", 0)


def run_fleet(seed: int) -> Result:
    """One fleet from its beginning to its end."""
    loop = VirtualLoop(seed)
    state = random.getstate()
    random.seed(seed)
    logging.disable()
    bound = [one.__init__ for one in (Activity, RequestQuarantine, AdmissionQueue, ScalingStats)]
    fleet: Fleet | None = None
    asyncio.set_event_loop(loop)
    try:
        with (
            virtual_time(loop, *bound),
            repeatable(loop, Attempt, TokenStream, _EngineConnection, _Call),
            processes(loop.time),
        ):
            fleet = Fleet(loop, seed)
            loop.run_until_complete(fleet.run())
            fleet.result.iterations, fleet.result.virtual_s = loop.iteration, loop.time()
            _end(loop)
        return fleet.result
    finally:
        asyncio.set_event_loop(None)
        random.setstate(state)
        logging.disable(logging.NOTSET)
        loop.close()
        gc.collect()


def _end(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.wait(tasks, timeout=5.0))
