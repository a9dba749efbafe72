"""An engine of several processes: the tokens of one rank, adapters, and the ends of ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core import Engine
from engine.device_step import DeviceSteps
from engine.errors import EngineDeadError, EngineError, UnsupportedModelError
from engine.factory import FolderReader, open_engine
from engine.parallel.channel import StepSegment
from engine.resolved import resolve_device
from engine.runner import ModelRunner
from engine.step_draws import Drawn
from engine.types import Request, Sample, SamplingParams, adapter_key
from kernels.collective import TIMEOUT_S
from kernels.rendezvous import meet
from lora.adapter_key import WeightedAdapter
from tests.engine_helpers import (
    acquire,
    make_base,
    make_named_adapters,
    make_runner,
    make_sequence,
    part,
    random_prompt,
    step,
)
from tests.fakes import make_config
from tests.kv_host_helpers import always_copies, answers_in_turns, slow_copies
from tests.rank_processes import follower_main
from tests.waiting import until

_SPECS = {
    "all": (3, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "qv": (17, ("q_proj", "v_proj")),
    "down": (1, ("down_proj", "lm_head")),
    "wide": (40, ("k_proj", "o_proj", "up_proj")),
}
_GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=64, logprobs=5, prompt_logprobs=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("ranks") / "base", num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return make_named_adapters(base, _SPECS)


@pytest.fixture(scope="module")
def runners(base: Path, adapters: dict[str, Path]) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """One rank, and two."""
    alone, both = (
        make_runner(base, tensor_parallel_size=size, num_threads=1, adapter_pool_bytes=1 << 21)
        for size in (1, 2)
    )
    for name, path in adapters.items():
        for runner in (alone, both):
            runner.load_adapter(name, path)
    yield alone, both
    both.close()


def _close(found: Sample, expected: Sample) -> bool:
    if found.token_id != expected.token_id:
        return False
    pairs = list(zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True))
    if found.logprobs is not None and expected.logprobs is not None:
        pairs.append((found.logprobs, expected.logprobs))
    return all(
        abs(one.logprob - other.logprob) < 2e-5
        and all(abs(a - b) < 2e-5 for (_, a), (_, b) in zip(one.top, other.top, strict=True))
        for one, other in pairs
    )


_BOTH = adapter_key((WeightedAdapter("all", 0.5), WeightedAdapter("wide", 1.5)))
_JOBS = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt
        st.sampled_from((None, *_SPECS, _BOTH)),
        st.integers(1, 17),  # tokens of a step
        st.integers(0, 5),  # the step that it joins
    ),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(jobs=_JOBS)
def test_random_steps_of_two_ranks_give_the_samples_of_one(
    jobs: list[tuple[int, str | None, int, int]], runners: tuple[ModelRunner, ModelRunner]
) -> None:
    results: list[list[Sample]] = []
    for runner in runners:
        keys = {key for _, key, _, _ in jobs if key is not None}
        for key in keys:
            acquire(runner, key)
        sequences = [
            make_sequence(random_prompt(length, seed=i), 24 * i, _LOGPROBS, key)
            for i, (length, key, _, _) in enumerate(jobs)
        ]
        found: list[Sample] = []
        for tick in range(10):
            due = [
                part(one, min(chunk, len(one.token_ids) - one.num_computed_tokens))
                for one, (_, _, chunk, joins) in zip(sequences, jobs, strict=True)
                if joins <= tick
            ]
            if due:
                found += step(runner, *due)
        results.append(found)
        for key in keys:
            runner.adapters.release(key)
    alone, both = results
    assert all(map(_close, both, alone))


def test_steps_that_have_no_room_leave_the_ranks_together(
    runners: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("a step of 9 bytes does not fit")

    with monkeypatch.context() as patch:
        patch.setattr(StepSegment, "write", refuse)
        for _ in range(3):  # there are two slots
            with pytest.raises(ValueError, match="does not fit"):
                step(runners[1], part(make_sequence([1, 2], 0, _LOGPROBS)))
    for _ in range(3):
        alone, both = (
            step(runner, part(make_sequence([1, 2, 3], 0, _LOGPROBS)))[0] for runner in runners
        )
        assert _close(both, alone)


def test_an_adapter_that_comes_again_is_the_new_one_on_all_ranks(
    base: Path, adapters: dict[str, Path], runners: tuple[ModelRunner, ModelRunner]
) -> None:
    other = make_named_adapters(base, {"other": (5, ("q_proj", "down_proj"))})["other"]
    found: list[list[Sample]] = []
    for runner in runners:
        found.append([])
        for path in (adapters["all"], other):
            runner.load_adapter("again", path)
            acquire(runner, "again")
            sequence = make_sequence(random_prompt(9, 5), 0, _LOGPROBS, "again")
            found[-1] += step(runner, part(sequence))
            runner.adapters.release("again")
            assert runner.adapters.remove("again")
    alone, both = found
    assert all(map(_close, both, alone))
    assert not _close(both[0], both[1])


def _engine_tokens(engine: Engine, adapters: list[str]) -> dict[tuple[str, int], list[int]]:
    """Runs requests with equal beginnings and more KV than there are blocks."""
    shared = random_prompt(24, seed=99)
    for i in range(8):
        prompt = (*shared, *random_prompt(5 + i, seed=i))
        params = SamplingParams(max_tokens=14, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        adapter = [None, *adapters][i % (1 + len(adapters))]
        engine.add_request(Request(f"r{i}", prompt, params, adapter))
    found: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            found.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
    return found


def test_prefix_hits_preemption_drafts_and_few_blocks_for_adapters_change_no_token(
    base: Path, adapters: dict[str, Path]
) -> None:
    """The second round finds the prefixes of the first."""
    found = []
    for size in (1, 2):
        config = EngineConfig(
            str(base),
            "base",
            device="cpu",
            block_size=4,
            num_blocks=40,
            tensor_parallel_size=size,
            num_threads=1,
            adapter_pool_bytes=(1 << 20) // size,
            max_num_batched_tokens=48,
            max_num_seqs=6,
            speculation="suffix",
        )
        runner = ModelRunner(config)
        for name, path in adapters.items():
            runner.load_adapter(name, path)
        engine = Engine(config, runner)
        rounds = [_engine_tokens(engine, list(adapters)) for _ in range(2)]
        load = engine.load()
        assert load.prefix_hits
        assert load.num_preemptions
        assert load.num_accepted_tokens
        found.append(rounds)
        engine.close()
    assert found[0] == found[1]


def test_an_interrupt_of_the_terminal_is_left_to_the_first_rank(
    runners: tuple[ModelRunner, ModelRunner],
) -> None:
    group = runners[1].group
    assert group is not None
    os.kill(group.pids[0], signal.SIGINT)
    assert step(runners[1], part(make_sequence(random_prompt(5, seed=1), 0, _LOGPROBS), 5))


def test_numbers_that_come_after_the_death_of_a_rank_are_not_read(base: Path) -> None:
    """The exchanges of a device are let go then, with any numbers."""
    runner = make_runner(base, tensor_parallel_size=2, num_threads=1)
    group = runner.group
    assert group is not None
    group._silence_s = 600.0  # it may be a while from one signal to the next
    died = threading.Event()
    group.watch(lambda _: died.set())
    (pid,) = group.pids
    os.kill(pid, signal.SIGSTOP)  # it would end by itself at a message without meaning

    def kill() -> bool:
        os.kill(pid, signal.SIGKILL)
        return died.wait(120)

    try:
        with (
            pytest.raises(EngineDeadError, match="rank 1 of 2 died with exit code -9"),
            group.together({"do": "drop", "digest": "none"}),
        ):
            assert kill()
        steps: Any = SimpleNamespace(_group=group)
        ended: Any = SimpleNamespace(query=lambda: True)  # an event of the device
        with pytest.raises(EngineDeadError, match="rank 1 of 2"):
            DeviceSteps.wait(steps, Drawn(torch.tensor([7]), ended, None))
    finally:
        runner.close()


async def _killed(
    base: Path, kill: signal.Signals, *, is_busy: bool, silence_s: float = 600.0
) -> None:
    """Returns after the end of the engine, whose requests all end. `silence_s`: of the killed rank,
    until it counts as hung."""
    config = EngineConfig(
        str(base), "base", device="cpu", tensor_parallel_size=2, num_threads=1, num_blocks=64
    )
    runners: list[ModelRunner] = []

    def reader_of(runner: ModelRunner) -> FolderReader:
        runners.append(runner)
        return FolderReader(runner)

    engine = await asyncio.to_thread(open_engine, config, reader_of)
    group = runners[0].group
    assert group is not None
    (pid,) = group.pids
    died = threading.Event()
    engine.on_death(lambda _: died.set())
    engine.start()
    params = SamplingParams(max_tokens=100, ignore_eos=True)

    async def read(i: int) -> None:
        for number in count():  # one after another: none may be over before the signal
            async for _ in engine.generate(Request(f"r{i}-{number}", (3, 4, 5), params)):
                pass

    try:
        reads = [asyncio.create_task(read(i)) for i in range(2 if is_busy else 0)]
        if is_busy:
            await until(lambda: engine.load().num_running == 2)
        assert group._silence_s < 12  # of an engine that serves
        group._silence_s = silence_s
        os.kill(pid, kill)
        await until(died.is_set)
        ends = await asyncio.gather(*reads, return_exceptions=True)
        assert all(isinstance(end, EngineDeadError) for end in ends)
        with pytest.raises(EngineDeadError):
            await engine.submit(Request("late", (3,), params))
    finally:
        engine.stop()


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize("is_busy", [True, False])
def test_the_death_of_another_rank_ends_the_engine(base: Path, is_busy: bool) -> None:
    asyncio.run(_killed(base, signal.SIGKILL, is_busy=is_busy))


def test_a_rank_that_hangs_ends_the_engine(base: Path) -> None:
    asyncio.run(_killed(base, signal.SIGSTOP, is_busy=True, silence_s=2.0))


_OWNER = """
import sys, time
from engine.config import EngineConfig
from engine.runner import ModelRunner
runner = ModelRunner(EngineConfig(sys.argv[1], "base", device="cpu", tensor_parallel_size=2,
                                  num_threads=1, num_blocks=8))
print(runner.group.pids[0], flush=True)
time.sleep(600)
"""


def test_the_other_ranks_end_with_the_first(base: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(base)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        owner.kill()
    asyncio.run(until(lambda: _is_gone(pid)))


def _is_gone(pid: int) -> bool:
    """Returns True for a process that has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 4}, "4, which does not divide num_attention_heads 6"),
        ({"tensor_parallel_size": 0}, "must be between 1 and 64"),
        (
            {"tensor_parallel_size": 2, "kv_host_bytes": 2047},
            "kv_host_bytes is 2047, and a KV block has 1024 bytes on each of 2 ranks",
        ),
        (
            {"tensor_parallel_size": 2, "quantization": "fp8"},
            r"shape \[40, 48\] on each of 2 ranks",
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_a_process_starts(
    base: Path, changes: dict[str, object], words: str
) -> None:
    before = _children()
    with pytest.raises(UnsupportedModelError, match=words):
        make_runner(base, **changes)
    assert _children() == before


def test_each_rank_needs_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = EngineConfig("", "", device="cuda", tensor_parallel_size=2)
    assert [str(resolve_device(config, rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    with pytest.raises(UnsupportedModelError, match=r"4: each rank needs a CUDA .* finds 2"):
        resolve_device(replace(config, tensor_parallel_size=4))


def test_an_engine_that_cannot_be_made_leaves_no_rank(base: Path) -> None:
    config = EngineConfig(
        str(base),
        "base",
        device="cpu",
        tensor_parallel_size=2,
        num_threads=1,
        num_blocks=8,
        max_num_batched_tokens=0,
    )
    before = _children()
    with pytest.raises(ValueError, match="must be 1 or more"):
        open_engine(config)
    assert _children() == before


def test_a_rank_begins_whatever_the_working_folder_holds(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    make_runner(base, tensor_parallel_size=2, num_threads=1).close()


def test_a_rank_that_cannot_begin_gives_its_reason(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.parallel.group._MAIN", "raise SystemExit(3)")
    before = _children()
    with pytest.raises(EngineError, match="rank 1 of 2 died with exit code 3"):
        make_runner(base, tensor_parallel_size=2)
    assert _children() == before


def test_a_rank_that_hangs_before_it_begins_is_no_endless_wait(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.parallel.group._MAIN", "import time; time.sleep(600)")
    monkeypatch.setattr("engine.parallel.group._START_SILENCE_S", 1.0)
    monkeypatch.setattr("engine.parallel.group._EXIT_S", 0.1)
    before = _children()
    with pytest.raises(EngineError, match=r"rank 1 of 2 hangs for .* could read its weights"):
        make_runner(base, tensor_parallel_size=2)
    assert _children() == before


def test_a_rank_that_hangs_during_the_start_is_named(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = "Rank.capture = lambda self, _: os.kill(os.getpid(), signal.SIGSTOP)"
    main = follower_main(f"import os, signal; from engine.rank import Rank; {broken}")
    monkeypatch.setattr("engine.parallel.group._MAIN", main)
    monkeypatch.setattr("engine.parallel.group._START_SILENCE_S", 3.0)
    before = _children()
    with pytest.raises(EngineError, match="rank 1 of 2 hangs for"):
        make_runner(base, tensor_parallel_size=2, num_threads=1)
    assert _children() == before


def test_a_rank_that_is_lost_while_ranks_meet_is_named_before_the_others_give_up(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = follower_main(
        "import os; from engine.rank import Rank; Rank.meet = lambda *_: os._exit(3)"
    )
    monkeypatch.setattr("engine.parallel.group._MAIN", main)
    has_ended, gave_up = threading.Event(), threading.Event()

    def wait_in_vain(*_: object) -> None:
        has_ended.wait(TIMEOUT_S)
        gave_up.set()
        raise RuntimeError("no rank came")

    monkeypatch.setattr("engine.rank.meet", wait_in_vain)
    before = _children()
    with pytest.raises(EngineError, match="rank 1 of 2 died with exit code 3"):
        make_runner(base, tensor_parallel_size=2, num_threads=1)
    assert not gave_up.is_set()
    has_ended.set()
    assert _children() == before


def test_ranks_that_are_there_and_cannot_meet_give_the_reason(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = follower_main(
        "import time; from engine.rank import Rank; Rank.meet = lambda *_: time.sleep(600)"
    )
    monkeypatch.setattr("engine.parallel.group._MAIN", main)
    monkeypatch.setattr("engine.rank.meet", partial(meet, timeout_s=1.0))
    with pytest.raises(EngineDeadError, match="2 ranks could not meet: "):
        make_runner(base, tensor_parallel_size=2, num_threads=1)


_LATE_MAIN = follower_main(
    "from tests.kv_host_helpers import copy_as_late_as_allowed; copy_as_late_as_allowed()"
)


@pytest.mark.parametrize("is_late", [False, True])
def test_every_rank_has_its_part_of_the_host_tier(
    base: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """A wrong block on the second rank alone would change the logits. `is_late`: its copies end as
    late as they may, those of the first rank while steps run."""
    prompts = [random_prompt(40, seed=seed) for seed in range(4)]
    if is_late:
        monkeypatch.setattr("engine.parallel.group._MAIN", _LATE_MAIN)

    def answers(size: int, host: int) -> list[tuple[int, ...]]:
        config = {"tensor_parallel_size": size, "kv_host_bytes": host, "num_blocks": 14}
        runner = make_runner(base, num_threads=1, **config)
        try:
            if is_late and host:
                slow_copies(runner, lambda: 2)
            engine = Engine(make_config(), runner)
            if host:
                always_copies(engine)
            found = answers_in_turns(engine, prompts, _GREEDY, 3)
            assert (engine.load().kv_host.hit_tokens > 0) == (host > 0)
            return found
        finally:
            runner.close()

    assert answers(2, 8 << 20) == answers(1, 0)
