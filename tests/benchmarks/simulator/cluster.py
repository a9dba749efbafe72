"""Engines, their disks, ingresses and the wires between them: one simulated service."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from serve_app.routing.expected_ttft import ExpectedTtft
from serve_app.routing.policy import Policy
from tests.benchmarks.simulator.calibration import Calibration
from tests.benchmarks.simulator.calls import Call
from tests.benchmarks.simulator.engine import UNBOUNDED, Engine, EngineArgs, Frame
from tests.benchmarks.simulator.events import Loop
from tests.benchmarks.simulator.front import FrontArgs, Ingress
from tests.benchmarks.simulator.gate import GateArgs
from tests.benchmarks.simulator.records import Records
from tests.benchmarks.simulator.tiers import Disk, Tiers

_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class ClusterArgs:
    calibration: Calibration
    num_replicas: int
    make_policy: Callable[[int], Policy]  # by the ingress's number
    num_ingresses: int = 1
    replicas_per_node: int = 8  # share a disk
    max_ongoing: int = 512
    gate: GateArgs | None = None
    max_jump: int = UNBOUNDED
    seed: int = 0


class Cluster:
    def __init__(self, args: ClusterArgs) -> None:
        self.args = args
        self.loop = Loop()
        self.records = Records(args.calibration.stream_s)
        self.engines: dict[str, Engine] = {}
        self.names: list[str] = []  # by the engine's number
        self.cpu_s = 0.0
        self._disks: list[Disk] = []
        self._prefixes: dict[str, set[int]] = {}  # by replica, as all ingresses know them
        self._random = random.Random(args.seed)
        self._is_running = False
        calibration = args.calibration
        front = FrontArgs(calibration.front_s, args.max_ongoing, args.gate)
        self.ingresses = [
            Ingress(
                number,
                self.loop,
                front,
                calibration.limits,
                args.make_policy(number),
                self.engines,
            )
            for number in range(args.num_ingresses)
        ]
        for _ in range(args.num_replicas):
            self.add_engine()
        self.tell_replicas(self.names)

    def add_engine(self) -> str:
        """Its ingresses learn of it by `tell_replicas`."""
        calibration = self.args.calibration
        number = len(self.names)
        if number // self.args.replicas_per_node >= len(self._disks):
            self._disks.append(Disk(calibration.room.disk_pages))
        speeds = calibration.speeds
        tiers = Tiers(self.loop, speeds, calibration.room, self._disks[-1])
        args = EngineArgs(
            calibration.pace,
            calibration.limits,
            calibration.runs_ahead,
            (speeds.copy_s, speeds.disk_s, speeds.registry_wait_s + speeds.registry_s),
            self.args.max_jump,
            calibration.max_decode_slowdown,
        )
        name = f"replica-{number:04}"
        engine = Engine(number, name, self.loop, args, tiers, self._tell, self._ended)
        tiers.woken = engine.wake
        engine.late = self.resume
        self.names.append(name)
        self.engines[name] = engine
        self._prefixes[name] = set()
        return name

    def fill_disks(self, adapters: Iterable[str]) -> None:
        """They lie on every node before the first request."""
        for adapter in adapters:
            for disk in self._disks:
                disk.put(adapter, 1)
        for engine in self.engines.values():
            engine.say_hello()

    def tell_replicas(self, names: Iterable[str]) -> None:
        wanted = list(names)
        for ingress in self.ingresses:
            ingress.keep(wanted)
        for name in wanted:
            self.engines[name].say_hello()

    def run(self, calls: Iterator[Call], until_s: float = float("inf")) -> None:
        """Runs until every call has ended, or until a moment."""
        self._is_running = True
        self.loop.at(self.loop.now_s, self._tick)
        began_s = time.process_time()
        gc.disable()  # nothing here is a cycle, and there are millions of objects to look at
        try:
            self.loop.run(self._last(calls), self._arrive, until_s)
        finally:
            gc.enable()
        self.cpu_s += time.process_time() - began_s

    @property
    def num_refused(self) -> int:
        gates = (ingress.gate for ingress in self.ingresses)
        return sum(sum(gate.refused.values()) for gate in gates if gate is not None)

    def resume(self, call: Call) -> None:
        """Its engine went: its ingress knows at the next frame's time."""
        due_s = self.loop.now_s + self.args.calibration.stream_s
        self.loop.at(due_s, self.ingresses[call.ingress].resume, call)

    def _last(self, calls: Iterator[Call]) -> Iterator[Call]:
        yield from calls
        self._is_running = False

    def _arrive(self, call: Call) -> None:
        """The proxy before the ingresses sends requests to them at random."""
        ingresses = self.ingresses
        if len(ingresses) > 1:
            ingresses[int(self._random.random() * len(ingresses))].take(call)
        else:
            ingresses[0].take(call)

    def _tell(self, frame: Frame) -> None:
        self.loop.at(self.loop.now_s + self.args.calibration.stream_s, self._deliver, frame)

    def _deliver(self, frame: Frame) -> None:
        """Delivers a frame to all fronts at the same moment: their sets of prefixes are the same,
        and one object."""
        prefixes = self._prefixes[frame.replica_id]
        prefixes.update(frame.step.cached_prefixes)
        prefixes.difference_update(frame.step.evicted_prefixes)
        for ingress in self.ingresses:
            ingress.see(frame, prefixes)

    def _ended(self, call: Call) -> None:
        self.records.add(call)
        self.loop.at(self.loop.now_s + self.args.calibration.stream_s, self._tell_ended, call)

    def _tell_ended(self, call: Call) -> None:
        self.ingresses[call.ingress].ended(call)

    def _tick(self, _: object) -> None:
        """Does what goes by the clock, as long as requests come or wait."""
        now_s = self.loop.now_s
        for ingress in self.ingresses:
            if isinstance(ingress.policy, ExpectedTtft):
                self._warm_up(ingress.policy, now_s)
            ingress.tick()
        if self._is_running or any(ingress.num_held for ingress in self.ingresses):
            self.loop.at(now_s + _TICK_S, self._tick)

    def _warm_up(self, policy: ExpectedTtft, now_s: float) -> None:
        """Loads adapters at their new homes, as `dispatch.warm_ups` does."""
        for adapter, replica_id in policy.warm_ups(now_s):
            self.engines[replica_id].warm_up(adapter)
