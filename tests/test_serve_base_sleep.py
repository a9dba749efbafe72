"""The phases of a base that sleeps and wakes, step by step, without Serve."""

from __future__ import annotations

from serve_app.control.base_sleep import ScaleToZero
from serve_app.dispatch.activity import Activity
from serve_app.messages import Backlog, BaseActivity, IngressReport

BASE = "b" * 64


class World:
    """A keeper and its ingresses; time passes only in `tick`."""

    def __init__(self, idle_timeout_s: float | None = 10.0) -> None:
        self.keeper = ScaleToZero()
        self.idle_timeout_s = idle_timeout_s
        self.now_s = 100.0
        self.is_running = True

    def tick(self, seconds: float = 0.25) -> str:
        self.now_s += seconds
        return self.keeper.step(BASE, self.is_running, self.idle_timeout_s, self.now_s)

    def report(
        self, ingress: str = "one", num_open: int = 0, idle_s: float = 99.0, lets_go: bool = False
    ) -> None:
        asleep = ((BASE, self.keeper.sleep_epoch(BASE)),) if lets_go else ()
        bases = (BaseActivity(BASE, num_open, idle_s),)
        self.keeper.add_report(IngressReport(ingress, bases, (), asleep), self.now_s)

    def drain(self) -> None:
        self.tick()
        self.tick(10.0)
        self.report()
        assert self.tick(0.1) == "draining"


def test_an_idle_base_sleeps_once_its_ingress_let_go() -> None:
    world = World()
    world.drain()
    world.report(lets_go=False)
    assert world.tick() == "draining"
    world.report(lets_go=True)
    assert world.tick() == "asleep"
    world.is_running = False
    assert world.tick(1000.0) == "asleep"


def test_it_stays_awake_without_a_limit_before_it_and_while_a_request_is_open() -> None:
    never, early, busy = World(None), World(), World()
    for world in (never, early, busy):
        world.tick()
    for _ in range(40):
        never.report()
        assert never.tick(1.0) == "awake"
        busy.report(num_open=1, idle_s=0.0)
        assert busy.tick(1.0) == "awake"
    early.report()
    assert early.tick(9.0) == "awake"


def test_the_last_request_at_any_ingress_counts() -> None:
    world = World()
    world.tick(0.0)
    for _ in range(20):
        world.now_s += 1.0
        world.report("one", idle_s=50.0)
        world.report("two", idle_s=3.0)
        assert world.tick(0.0) == "awake"


def test_nothing_sleeps_while_no_ingress_is_heard() -> None:
    world = World()
    world.tick()
    assert world.tick(1000.0) == "awake"
    world.report()
    world.now_s += 6.0  # it has gone
    assert world.tick() == "awake"


def test_a_request_in_the_hand_over_calls_sleep_off() -> None:
    by_report, by_wake = World(), World()
    by_report.drain()
    by_report.report(num_open=1, idle_s=0.0)
    assert by_report.tick() == "awake"
    by_wake.drain()
    by_wake.report(lets_go=True)
    by_wake.keeper.wake(BASE, by_wake.now_s)
    assert by_wake.tick() == "awake"
    assert by_wake.tick(5.0) == "awake"  # its idle time begins again


def test_letting_go_of_an_earlier_sleep_does_not_count_for_this_one() -> None:
    world = World()
    world.drain()
    earlier = world.keeper.sleep_epoch(BASE)
    world.keeper.wake(BASE, world.now_s)
    world.tick()
    world.keeper.request_sleep(BASE, world.now_s)
    world.keeper.add_report(IngressReport("one", (), (), ((BASE, earlier),)), world.now_s)
    assert world.tick() == "draining"
    world.report(lets_go=True)
    assert world.tick() == "asleep"


def test_every_ingress_has_to_let_go_but_one_that_is_gone() -> None:
    world = World()
    world.drain()
    world.report("two", lets_go=False)
    world.report("one", lets_go=True)
    assert world.tick() == "draining"
    world.now_s += 4.0
    world.report("one", lets_go=True)
    world.now_s += 2.0
    assert world.tick() == "asleep"


def test_an_ingress_that_never_lets_go_keeps_the_base_awake() -> None:
    world = World()
    world.drain()
    phases = []
    for _ in range(20):
        world.report()
        phases.append(world.tick(1.0))
    assert "asleep" not in phases
    assert "awake" in phases


def test_a_woken_base_is_awake_when_it_runs() -> None:
    world = World()
    world.drain()
    world.report(lets_go=True)
    world.tick()
    world.is_running = False
    world.tick()
    world.keeper.wake(BASE, world.now_s)
    assert world.tick() == "waking"
    world.is_running = True
    assert world.tick() == "awake"
    world.report()
    assert world.tick(9.0) == "awake"


def test_an_engine_that_dies_is_not_asleep() -> None:
    world = World()
    world.drain()
    world.is_running = False
    assert world.tick() == "awake"


def test_a_new_manager_leaves_asleep_what_slept() -> None:
    keeper = ScaleToZero()
    keeper.add_report(IngressReport("one", (), (), ((BASE, 7.0),)), 1.0)
    keeper.restore(1.1)
    assert keeper.phase(BASE) == "asleep"
    assert keeper.step(BASE, False, 10.0, 2.0) == "asleep"


def test_an_ingress_counts_what_is_open_and_how_long_nothing_was() -> None:
    now_s = 5.0
    activity = Activity(lambda: now_s)
    end_first, end_second = activity.enter(BASE), activity.enter(BASE)
    end_first()
    assert activity.report(lambda _: Backlog()) == (BaseActivity(BASE, 1, 0.0),)
    end_second()
    now_s = 8.0
    assert activity.report(lambda _: Backlog()) == (BaseActivity(BASE, 0, 3.0),)


def test_open_requests_count_once_every_ingress_refuses_new_ones() -> None:
    keeper = ScaleToZero()
    assert keeper.num_open_when_draining(1.0) is None  # a manager that started a moment ago
    open_here = (BaseActivity(BASE, 2, 0.0),)
    keeper.add_report(IngressReport("one", open_here, is_draining=True), 1.0)
    keeper.add_report(IngressReport("two", open_here), 1.0)
    assert keeper.num_open_when_draining(1.0) is None
    keeper.add_report(IngressReport("two", (BaseActivity(BASE, 1, 0.0),), is_draining=True), 2.0)
    assert keeper.num_open_when_draining(2.0) == 3


def test_a_request_counts_though_the_ingress_that_had_it_has_left() -> None:
    world = World(idle_timeout_s=60.0)
    world.tick(0.0)
    world.now_s += 7200.0
    world.report("one", num_open=1, idle_s=0.0)
    for _ in range(10):
        world.now_s += 1.0
        world.report("two", idle_s=7200.0)
        assert world.tick(0.0) == "awake"
    idle_s = world.keeper.idle_s(BASE, world.now_s)
    assert idle_s == 10.0
