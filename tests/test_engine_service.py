"""The engine behind its thread: streams, aborts, loads and death, from the callers' side."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from engine.core import Engine
from engine.errors import EngineDeadError, InvalidRequestError, UnknownAdapterError
from engine.service import AsyncEngine, EngineInterface
from engine.types import Request, Sample, ScheduledBatch, StepOutput
from tests.fakes import FakeModel, FakePool, FakeRunner, make_config, make_request, solo_tokens
from tests.waiting import until

NUM_BLOCKS = 50_000
LONG = 100_000  # never reached: an end by itself would be the threads' luck


class GatedRunner(FakeRunner):
    """A runner that runs a step only when the test gives a permit."""

    def __init__(self) -> None:
        super().__init__(
            NUM_BLOCKS, adapters=FakePool(known={"x"}), model=FakeModel(max_model_len=2 * LONG)
        )
        self.permits = threading.Semaphore(0)
        self.is_open = False
        self.is_in_step = threading.Event()  # the first has begun

    def execute(self, batch: ScheduledBatch) -> tuple[Sample, ...]:
        self.is_in_step.set()
        if not self.is_open:
            self.permits.acquire()
        return super().execute(batch)

    def open(self) -> None:
        self.is_open = True
        self.permits.release()


class FakeReader:
    """A reader that waits for the test; a path "bad" is a load error."""

    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        self.reads: list[str] = []
        self.may_read = threading.Event()
        self.may_read.set()

    def read(self, digest: str, path: str) -> Callable[[], None]:
        self.reads.append(digest)
        self.may_read.wait()
        if path == "bad":
            raise ValueError("the adapter is bad")

        def insert() -> None:
            assert threading.current_thread().name == "engine"
            self.pool.known.add(digest)

        return insert


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
def reader(runner: GatedRunner) -> FakeReader:
    return FakeReader(runner.adapters)


@pytest.fixture
async def engine(runner: GatedRunner, reader: FakeReader) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(Engine(make_config(), runner), reader)
    engine.start()
    yield engine
    reader.may_read.set()
    runner.open()
    await asyncio.to_thread(engine.stop)


async def collect(engine: AsyncEngine, request: Request) -> dict[int, tuple[int, ...]]:
    tokens: dict[int, tuple[int, ...]] = {}
    async for output in engine.generate(request):
        tokens[output.choice] = tokens.get(output.choice, ()) + output.token_ids
    return tokens


class Loads:
    """Waits, in the test's loop, for a step after which something is true."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.steps: asyncio.Queue[StepOutput] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        engine.subscribe(lambda step: loop.call_soon_threadsafe(self.steps.put_nowait, step))

    async def until(self, is_true: Callable[[StepOutput], bool]) -> StepOutput:
        while True:
            step = await asyncio.wait_for(self.steps.get(), 120)
            if is_true(step):
                return step


async def until_it_leaves(engine: AsyncEngine, runner: GatedRunner, loads: Loads) -> None:
    """Waits for an unload: between which two steps it reaches the engine depends on the threads."""
    for _ in range(20):
        if not engine.has_adapter("x"):
            return
        runner.permits.release()
        await loads.until(lambda step: True)
    raise AssertionError("20 steps later the adapter still takes requests")


async def test_concurrent_streams_each_get_their_own_tokens(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    runner.open()
    requests = [make_request(f"r{i}", 3 + i, n=1 + i % 3, seed=i, max_tokens=9) for i in range(20)]
    results = await asyncio.gather(*(collect(engine, request) for request in requests))
    for request, tokens in zip(requests, results, strict=True):
        expected = {
            c: solo_tokens(request, c, runner.model_config) for c in range(request.params.n)
        }
        assert tokens == expected
    assert engine.load().num_running == 0


async def test_the_age_of_a_step_grows_while_it_hangs(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    assert engine.last_step_age_s() == 0
    await engine.submit(make_request("a"))  # admitted at the start of a turn that has no permit
    await until(runner.is_in_step.is_set)  # the age of the turn ends where that of the step begins
    age_s = engine.last_step_age_s()
    assert 0 < age_s < engine.last_step_age_s()


async def test_closing_a_stream_aborts_its_request(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    loads = Loads(engine)
    stream = engine.generate(make_request("a", n=2, adapter="x", max_tokens=LONG))
    runner.permits.release()
    assert (await anext(stream)).offset == 0
    await stream.aclose()
    runner.open()
    step = await loads.until(lambda step: step.load.num_running == 0)
    assert {o.finish_reason for o in step.outputs} == {"abort"}
    assert step.load.num_free_blocks == NUM_BLOCKS
    assert not +runner.adapters.references


async def test_a_cancelled_submit_leaves_nothing_behind(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    await engine.submit(make_request("first", max_tokens=2))  # holds the loop in its step
    task = asyncio.create_task(engine.submit(make_request("a", max_tokens=LONG)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    loads = Loads(engine)
    runner.open()
    step = await loads.until(lambda step: step.load.num_running == step.load.num_waiting == 0)
    assert step.load.num_steps < 10  # not the tokens that "a" asked for


async def test_refusals_reach_the_caller(engine: AsyncEngine, runner: GatedRunner) -> None:
    runner.open()
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        await collect(engine, make_request("a", []))
    with pytest.raises(UnknownAdapterError):
        await engine.submit(make_request("b", adapter="unknown"))
    assert not engine.has_adapter("unknown")


async def test_the_second_request_of_an_id_is_refused(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    stream = engine.generate(make_request("a", max_tokens=LONG))
    runner.permits.release()
    await anext(stream)
    with pytest.raises(InvalidRequestError, match="in use"):
        await collect(engine, make_request("a"))
    second = asyncio.create_task(engine.submit(make_request("a")))
    runner.open()
    with pytest.raises(InvalidRequestError, match="in use"):
        await second
    await stream.aclose()


async def test_an_abort_from_any_thread_ends_the_stream(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    stream = engine.generate(make_request("a", max_tokens=LONG))
    runner.permits.release()
    await anext(stream)
    await asyncio.to_thread(engine.abort, "a")
    runner.open()
    reasons = [output.finish_reason async for output in stream]
    assert reasons[-1] == "abort"


async def test_steps_go_on_while_an_adapter_is_read(
    engine: AsyncEngine, runner: GatedRunner, reader: FakeReader
) -> None:
    runner.open()
    reader.may_read.clear()
    loads = [asyncio.create_task(engine.load_adapter("name", "new", "path")) for _ in range(5)]
    await collect(engine, make_request("a"))
    assert not engine.has_adapter("new")
    reader.may_read.set()
    await asyncio.gather(*loads)
    assert reader.reads == ["new"]
    await engine.load_adapter("name", "new", "path")
    assert reader.reads == ["new"]
    await collect(engine, make_request("b", adapter="new"))


async def test_files_are_read_while_a_step_runs(
    engine: AsyncEngine, runner: GatedRunner, reader: FakeReader
) -> None:
    """A cold adapter does not wait for the end of a step before its files are read."""
    await engine.submit(make_request("a"))  # its step has no permit
    load = asyncio.create_task(engine.load_adapter("name", "new", "path"))
    await until(lambda: reader.reads == ["new"])
    assert not engine.has_adapter("new")
    runner.open()
    await load
    assert engine.has_adapter("new")


async def test_the_first_command_runs_before_all_others_in_the_engines_thread(
    runner: GatedRunner, reader: FakeReader
) -> None:
    engine = AsyncEngine(Engine(make_config(), runner), reader)
    seen: list[tuple[str, bool]] = []
    engine.call(lambda: seen.append((threading.current_thread().name, engine.has_adapter("new"))))
    engine.start()
    await engine.load_adapter("name", "new", "path")
    assert seen == [("engine", False)]
    await asyncio.to_thread(engine.stop)


async def test_a_load_error_reaches_its_caller_only(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    runner.open()
    with pytest.raises(ValueError, match="the adapter is bad"):
        await engine.load_adapter("name", "new", "bad")
    await engine.load_adapter("name", "new", "good")
    assert engine.has_adapter("new")


async def test_an_unload_waits_for_the_last_request(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    stream = engine.generate(make_request("a", adapter="x", max_tokens=LONG))
    runner.permits.release()
    await anext(stream)
    unload = asyncio.create_task(engine.unload_adapter("x"))
    loads = Loads(engine)
    await until_it_leaves(engine, runner, loads)
    assert not unload.done()
    await stream.aclose()
    runner.open()
    await unload
    assert not runner.adapters.known


async def test_a_load_takes_an_unload_back(engine: AsyncEngine, runner: GatedRunner) -> None:
    stream = engine.generate(make_request("a", adapter="x", max_tokens=LONG))
    runner.permits.release()
    await anext(stream)
    unload = asyncio.create_task(engine.unload_adapter("x"))
    loads = Loads(engine)
    await until_it_leaves(engine, runner, loads)
    load = asyncio.create_task(engine.load_adapter("name", "x", "path"))
    runner.open()
    await asyncio.gather(load, unload)
    assert engine.has_adapter("x")
    await stream.aclose()


async def test_a_load_right_after_an_unload_leaves_the_adapter_there(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    await engine.submit(make_request("first", max_tokens=2))  # holds the loop in its step
    unload = asyncio.create_task(engine.unload_adapter("x"))
    await asyncio.sleep(0)
    load = asyncio.create_task(engine.load_adapter("name", "x", "path"))
    await asyncio.sleep(0)
    runner.open()
    await asyncio.gather(unload, load)
    assert engine.has_adapter("x")
    await collect(engine, make_request("second", adapter="x"))


async def test_a_load_that_waits_for_a_reader_ends_with_the_engine(
    runner: GatedRunner, reader: FakeReader
) -> None:
    engine = AsyncEngine(Engine(make_config(), runner), reader)
    runner.open()
    engine.start()
    reader.may_read.clear()
    loads = [asyncio.create_task(engine.load_adapter("name", digest, "path")) for digest in "abcd"]
    while len(engine._loading) < 4:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(engine.stop)
    reader.may_read.set()
    for result in await asyncio.gather(*loads, return_exceptions=True):
        assert isinstance(result, EngineDeadError)
    with pytest.raises(EngineDeadError):
        await engine.load_adapter("name", "e", "path")


async def test_a_failing_step_ends_its_streams_and_no_more(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    runner.fail_next = RuntimeError("device")
    runner.open()
    outputs = [output async for output in engine.generate(make_request("a"))]
    assert [output.finish_reason for output in outputs] == ["error"]
    assert await collect(engine, make_request("b"))


async def test_when_the_loop_dies_every_waiter_hears_of_it(
    engine: AsyncEngine, runner: GatedRunner, reader: FakeReader
) -> None:
    loop = asyncio.get_running_loop()
    death: asyncio.Future[EngineDeadError] = loop.create_future()
    engine.on_death(lambda error: loop.call_soon_threadsafe(death.set_result, error))
    stream = engine.generate(make_request("a", adapter="x", max_tokens=LONG))
    runner.permits.release()
    await anext(stream)
    unload = asyncio.create_task(engine.unload_adapter("x"))
    submit = asyncio.create_task(engine.submit(make_request("b")))
    reader.may_read.clear()
    load = asyncio.create_task(engine.load_adapter("name", "new", "path"))
    await until(lambda: reader.reads == ["new"])
    runner.fail_next = KeyboardInterrupt()  # not an Exception: the loop itself ends
    runner.open()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        async for _ in stream:
            pass
    assert isinstance(await death, EngineDeadError)
    reader.may_read.set()  # before the end, the engine could still insert the adapter
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        await load
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        await unload
    assert engine.last_step_age_s() == float("inf")
    with pytest.raises(EngineDeadError):
        await engine.submit(make_request("c"))
    await asyncio.gather(submit, return_exceptions=True)  # in before the end, or refused


async def test_a_lost_device_ends_streams_though_its_step_never_returns(
    engine: AsyncEngine, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loop._FAULT_S", 0.1)
    reads = asyncio.create_task(collect(engine, make_request("a")))
    await until(lambda: engine.last_step_age_s() > 0)  # the step has no permit
    await asyncio.to_thread(engine.fail, EngineDeadError("rank 1 of 2 died"))
    with pytest.raises(EngineDeadError, match="rank 1 of 2 died"):
        await reads


async def test_stopping_ends_streams_too(engine: AsyncEngine, runner: GatedRunner) -> None:
    stream = engine.generate(make_request("a", max_tokens=LONG))
    runner.permits.release()
    await anext(stream)
    stopping = asyncio.create_task(asyncio.to_thread(engine.stop))
    runner.open()
    with pytest.raises(EngineDeadError, match="stopped"):
        async for _ in stream:
            pass
    await stopping


class DozingEngine(Engine):
    """An engine that reports after its first step that another step is of no use."""

    has_dozed = False

    def step(self) -> StepOutput:
        step = super().step()
        if not self.has_dozed:
            self.has_dozed = self.is_stuck = True
        return step


async def test_an_engine_put_to_sleep_beside_its_work_wakes_up_and_counts_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.loop._WATCH_S", 0.05)
    runner = FakeRunner()
    engine = AsyncEngine(DozingEngine(make_config(), runner), FakeReader(runner.adapters))
    engine.start()
    try:
        request = make_request("a", max_tokens=9)
        tokens = await asyncio.wait_for(collect(engine, request), 120)
        assert tokens == {0: solo_tokens(request, 0, runner.model_config)}
        assert engine.load().num_missed_wakeups == 1
        assert "while requests could run: 1 running, 0 waiting" in caplog.text
    finally:
        await asyncio.to_thread(engine.stop)


async def test_an_engine_that_waits_for_room_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loop._WATCH_S", 0.01)
    runner = FakeRunner(adapters=FakePool(known={"x"}, blocked={"x"}))
    engine = AsyncEngine(Engine(make_config(), runner), FakeReader(runner.adapters))
    loads = Loads(engine)
    engine.start()
    try:
        request = make_request("a", adapter="x", max_tokens=2)
        collecting = asyncio.create_task(collect(engine, request))
        for _ in range(5):  # each but the first is the watchdog's
            await loads.until(lambda step: step.load.num_waiting == 1)
        assert not collecting.done()
        await asyncio.to_thread(engine.call(runner.adapters.blocked.clear).result)
        assert await asyncio.wait_for(collecting, 120)
        assert engine.load().num_missed_wakeups == 0
    finally:
        await asyncio.to_thread(engine.stop)


def test_the_engine_is_what_a_host_expects(engine: AsyncEngine) -> None:
    host_side: EngineInterface = engine
    limits = host_side.model_limits
    assert (limits.max_model_len, limits.vocab_size, limits.max_kv_tokens) == (
        2 * LONG,
        16,
        4 * NUM_BLOCKS,
    )
