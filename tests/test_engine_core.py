"""The engine step by step: its refusals, and failures that stay with their request."""

import math
import weakref

import pytest

from engine.core import Engine
from engine.errors import ContextLengthError, InvalidRequestError, UnknownAdapterError
from engine.step_times import Step
from engine.types import NO_MEMORY, ScheduledBatch, TokenOutput
from tests.fakes import FakeModel, FakePool, FakeRunner, make_engine, make_request, solo_tokens
from tests.lora_helpers import QuickCopier, RunnerWithPool, loaded


def run(engine: Engine) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs


def test_a_request_gives_the_same_tokens_alone_and_among_others() -> None:
    engine, runner = make_engine(FakeRunner(num_blocks=12), max_num_batched_tokens=7)
    requests = [make_request(f"r{i}", 3 + 2 * i, seed=i, max_tokens=20) for i in range(5)]
    for request in requests:
        engine.add_request(request)
    outputs = run(engine)
    for request in requests:
        tokens = [t for o in outputs if o.request_id == request.request_id for t in o.token_ids]
        assert tuple(tokens) == solo_tokens(request, 0, runner.model_config)
    load = engine.load()
    assert load.num_preemptions > 0
    assert load.num_free_blocks == 12
    assert load.num_steps == len(runner.batches)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 16]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"presence_penalty": 1e39}, "presence_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"frequency_penalty": -1e39}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 17}, "prompt_logprobs"),
        ({"stop_token_ids": (16,)}, "stop_token_ids"),
        ({"logit_bias": ((16, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
        ({"logit_bias": ((1, 1e39),)}, "logit_bias"),
        ({"logit_bias": ((1, 10**400),)}, "logit_bias"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(16))}, "stop_token_ids"),
        (
            {"min_tokens": 1, "stop_token_ids": tuple(range(1, 16)), "ignore_eos": False},
            "stop_token_ids",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    params: dict[str, object], param: str
) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request(make_request(**params))  # type: ignore[arg-type]
    assert caught.value.param == param
    if (value := params.get(param)) is not None and param != "prompt":
        assert str(value)[:100] in str(caught.value)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "words"),
    [
        (64, 100, "the model's limit is 100 tokens (max_model_len)"),
        (25, 4096, "all KV blocks together hold 100 tokens"),
    ],
)
def test_what_can_never_fit_is_refused_with_both_numbers(
    num_blocks: int, max_model_len: int, words: str
) -> None:
    model = FakeModel(max_model_len=max_model_len)
    engine, _ = make_engine(FakeRunner(num_blocks, model=model))
    with pytest.raises(ContextLengthError) as too_long:
        engine.add_request(make_request(prompt=101, max_tokens=0))
    assert str(too_long.value) == f"prompt has 101 tokens, but {words}"
    with pytest.raises(InvalidRequestError, match="max_tokens 5 make 101 tokens") as too_many:
        engine.add_request(make_request(prompt=96, max_tokens=5))
    assert too_many.value.param == "max_tokens"
    engine.add_request(make_request(prompt=96, max_tokens=4))
    assert sum(len(o.token_ids) for o in run(engine)) == 4
    engine.add_request(make_request(prompt=100, max_tokens=0))
    assert [(o.token_ids, o.finish_reason) for o in run(engine)] == [((), "length")]


def test_a_request_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    engine, _ = make_engine()
    engine.add_request(make_request("a"))
    with pytest.raises(InvalidRequestError, match="request id a is in use"):
        engine.add_request(make_request("a"))
    run(engine)
    engine.add_request(make_request("a"))


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    engine, _ = make_engine()
    with pytest.raises(UnknownAdapterError, match="adapter x is not loaded"):
        engine.add_request(make_request(adapter="x"))


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on() -> None:
    engine, runner = make_engine()
    runner.adapters.known.add("x")
    engine.add_request(make_request("a", 4, "x", n=2))
    runner.fail_next = RuntimeError("secret details of the device")
    outputs = engine.step().outputs
    assert [(o.choice, o.finish_reason) for o in outputs] == [(0, "error"), (1, "error")]
    assert outputs[0].error == "the engine failed in a step of this request"
    assert engine.load().num_free_blocks == 64
    assert not +runner.adapters.references
    engine.add_request(make_request("b"))
    assert run(engine)[-1].finish_reason == "length"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_without_memory_is_run_in_parts_and_gives_the_same_tokens(runs_ahead: bool) -> None:
    runner = FakeRunner(adapters=FakePool(known={"x"}))
    runner.runs_ahead = runs_ahead
    engine, _ = make_engine(runner, max_num_batched_tokens=32)
    requests = [
        make_request(f"r{i}", 5 + 9 * i, "x" if i % 2 else None, seed=i, max_tokens=9, n=1 + i % 2)
        for i in range(4)
    ]
    requests.append(make_request("p", 13, max_tokens=3, prompt_logprobs=0))
    for request in requests:
        engine.add_request(request)
    outputs = list(engine.step().outputs)
    runner.most_tokens = 3
    outputs += run(engine)
    for request in requests:
        for choice in request.choices:
            its = [o for o in outputs if (o.request_id, o.choice) == (request.request_id, choice)]
            tokens = tuple(token for o in its for token in o.token_ids)
            assert tokens == solo_tokens(request, choice, runner.model_config)
    (told,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs]
    assert [p and p.token_id for p in told] == [None, *requests[-1].prompt_token_ids[1:]]
    assert engine.load().num_preemptions == 0
    assert runner.num_freed > 0


def test_a_failed_draw_holds_no_tensors_while_the_cache_is_freed() -> None:
    class Launched:
        def draw(self) -> None:
            raise MemoryError

    engine, runner = make_engine()
    step = Step(ScheduledBatch(()), launched=Launched())  # type: ignore[arg-type]
    launched = weakref.ref(step.launched)
    held: list[bool] = []
    runner.is_out_of_memory = lambda error: True  # type: ignore[method-assign]
    runner.free_cache = lambda: held.append(launched() is not None)  # type: ignore[method-assign]
    engine._draw(step)
    assert step.lacks_memory
    assert held == [False]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_only_the_sequence_that_fits_no_step_ends_when_memory_lacks(runs_ahead: bool) -> None:
    runner = FakeRunner(adapters=FakePool(known={"x"}))
    runner.runs_ahead, runner.too_large = runs_ahead, {"large"}
    engine, _ = make_engine(runner)
    others = [make_request(f"r{i}", 6, "x", seed=i, max_tokens=12) for i in range(4)]
    engine.add_request(others[0])
    engine.step()
    engine.add_request(make_request("large", 20, "x", n=2))
    for request in others[1:]:
        engine.add_request(request)
    outputs = run(engine)
    ends = {o.request_id: (o.finish_reason, o.error) for o in outputs if o.finish_reason}
    assert ends.pop("large") == ("error", NO_MEMORY)
    assert ends == {request.request_id: ("length", None) for request in others}
    for request in others[1:]:
        tokens = tuple(
            t for o in outputs if o.request_id == request.request_id for t in o.token_ids
        )
        assert tokens == solo_tokens(request, 0, runner.model_config)
    assert engine.load().num_free_blocks == 64
    assert not +runner.adapters.references


def test_a_device_without_any_memory_ends_a_step_after_a_bounded_number_of_tries() -> None:
    engine, runner = make_engine(
        FakeRunner(num_blocks=400), max_num_seqs=100, max_num_batched_tokens=200
    )
    runner.most_tokens = 0
    for i in range(100):
        engine.add_request(make_request(f"r{i}", [1 + i % 15], seed=i))
    outputs = engine.step().outputs
    assert [o.error for o in outputs] == [NO_MEMORY] * 100
    assert len(runner.batches) < 60
    runner.most_tokens = None
    engine.add_request(make_request("later"))
    assert run(engine)[-1].finish_reason == "length"


def test_logits_that_are_not_finite_end_only_their_own_sequence() -> None:
    engine, runner = make_engine()
    runner.not_finite.add("bad")
    engine.add_request(make_request("bad"))
    engine.add_request(make_request("good", [5, 6]))
    outputs = run(engine)
    assert [(o.finish_reason, o.error) for o in outputs if o.request_id == "bad"] == [
        ("error", "the model's logits are not finite")
    ]
    assert [o.finish_reason for o in outputs if o.request_id == "good"][-1] == "length"
    assert engine.load().num_free_blocks == 64


def test_min_tokens_keeps_the_end_away() -> None:
    model = FakeModel(vocab_size=2)  # every second draw would be EOS
    engine, _ = make_engine(FakeRunner(model=model))
    for i in range(8):
        engine.add_request(
            make_request(f"r{i}", [1], seed=i, ignore_eos=False, min_tokens=3, max_tokens=30)
        )
    lengths = dict.fromkeys((f"r{i}" for i in range(8)), 0)
    for output in run(engine):
        lengths[output.request_id] += len(output.token_ids)
    assert min(lengths.values()) > 3
    assert min(lengths.values()) < 30


def test_seeds_are_drawn_for_requests_without_one_and_folded_into_64_bits() -> None:
    engine, _ = make_engine()
    for i, seed in enumerate([None, None, 2**63, -(2**63) - 1, 5]):
        engine.add_request(make_request(f"r{i}", [1], seed=seed))
    seeds = [sequence.seed for sequence in engine.scheduler.waiting]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [-(2**63), 2**63 - 1, 5]


def test_a_retired_adapter_leaves_with_its_last_request() -> None:
    engine, runner = make_engine(FakeRunner(adapters=FakePool(known={"x"})))
    engine.add_request(make_request("a", adapter="x"))
    assert not engine.retire_adapter("x")
    with pytest.raises(UnknownAdapterError):
        engine.add_request(make_request("b", adapter="x"))
    assert run(engine)[-1].finish_reason == "length"
    assert engine.retire_adapter("x")
    assert not runner.adapters.has("x")


def test_an_abort_frees_everything_and_says_so_once() -> None:
    engine, runner = make_engine(FakeRunner(adapters=FakePool(known={"x"})))
    engine.add_request(make_request("a", 9, "x", n=2, max_tokens=30))
    engine.step()
    engine.step()
    engine.abort("a", 1)
    engine.abort("a", 1)
    assert [(o.choice, o.finish_reason) for o in engine.step().outputs] == [(1, "abort"), (0, None)]
    engine.abort("a")
    engine.abort("unknown")
    assert engine.load().num_free_blocks == 64
    assert not +runner.adapters.references
    assert [(o.choice, o.finish_reason) for o in run(engine)] == [(0, "abort")]


def test_an_idle_engine_waits_for_an_adapter_on_its_way() -> None:
    pool = FakePool(known={"x", "y"}, copying={"x"})
    engine, _ = make_engine(FakeRunner(adapters=pool))
    engine.add_request(make_request("a", adapter="x", max_tokens=1))
    assert [o.finish_reason for o in engine.step().outputs] == ["length"]


def test_nobody_waits_for_another_ones_adapter() -> None:
    pool = FakePool(known={"x", "y"}, copying={"x"})
    engine, _ = make_engine(FakeRunner(adapters=pool))
    engine.add_request(make_request("slow", adapter="x", max_tokens=1))
    engine.add_request(make_request("ready", [5], "y", max_tokens=1))
    assert [o.request_id for o in engine.step().outputs] == ["ready"]
    assert pool.copying
    assert not engine.is_stuck
    assert [o.request_id for o in engine.step().outputs] == ["slow"]


@pytest.mark.parametrize("adapters", [("a",), ("a", "b"), ("a", "b", "c")])
def test_an_engine_whose_copy_ends_within_the_walk_takes_another_step(
    adapters: tuple[str, ...],
) -> None:
    """The copy begins where the adapter is refused, and the same walk sees its end."""
    pool = loaded(*adapters, num_blocks=1, copier=QuickCopier(2))
    engine, _ = make_engine(RunnerWithPool(pool))
    for digest in adapters:
        engine.add_request(make_request(digest, adapter=digest, max_tokens=2))
    ended = []
    while engine.has_work:
        ended += [o.request_id for o in engine.step().outputs if o.finish_reason]
        assert not (engine.is_stuck and engine.has_work)
    assert sorted(ended) == sorted(adapters)


def test_an_engine_whose_request_finds_no_room_says_that_a_step_is_no_use() -> None:
    pool = loaded("a", "b", num_blocks=1, copier=QuickCopier())
    assert not pool.acquire("b")
    pool.land_copies()
    assert pool.acquire("b")  # for good: a stranger to the engine holds the only page
    engine, _ = make_engine(RunnerWithPool(pool))
    engine.add_request(make_request("r", adapter="a"))
    engine.step()
    assert engine.is_stuck


def test_the_first_output_of_a_choice_says_how_long_it_waited() -> None:
    now_s = 0.0
    pool = FakePool(known={"x"}, blocked={"x"})
    engine, _ = make_engine(FakeRunner(adapters=pool), clock=lambda: now_s)
    engine.add_request(make_request("free", max_tokens=2))
    engine.add_request(make_request("blocked", adapter="x", n=2, max_tokens=2))
    waits: list[tuple[str, int, float]] = []
    while engine.has_work:
        waits += [(o.request_id, o.choice, o.queued_s) for o in engine.step().outputs]
        now_s += 1.0
        if now_s == 5.0:
            pool.blocked.clear()
    assert waits == [
        ("free", 0, 0.0),
        ("free", 0, 0.0),
        ("blocked", 0, 5.0),
        ("blocked", 0, 0.0),
        ("blocked", 1, 6.0),
        ("blocked", 1, 0.0),
    ]


def test_a_wait_is_told_once_though_the_choice_is_preempted() -> None:
    now_s = 0.0
    runner = FakeRunner(num_blocks=12)
    engine, _ = make_engine(runner, clock=lambda: now_s, max_num_batched_tokens=7)
    for i in range(5):
        engine.add_request(make_request(f"r{i}", 3 + 2 * i, seed=i, max_tokens=20))
    waits: dict[str, list[float]] = {f"r{i}": [] for i in range(5)}
    while engine.has_work:
        for output in engine.step().outputs:
            waits[output.request_id].append(output.queued_s)
        now_s += 1.0
    assert engine.load().num_preemptions > 0
    assert waits["r0"][0] == 0.0 < waits["r4"][0]
    assert not any(wait for queue in waits.values() for wait in queue[1:])


def test_the_load_reports_the_step_that_the_device_has_begun() -> None:
    now_s = [0.0]

    class TimedRunner(FakeRunner):
        def launch(self, batch):  # type: ignore[no-untyped-def]
            now_s[0] += 0.001 + 1e-5 * batch.num_tokens
            return super().launch(batch)

    runner = TimedRunner(num_blocks=512)
    runner.runs_ahead = True
    engine, _ = make_engine(
        runner,
        clock=lambda: now_s[0],
        enable_prefix_caching=False,
        max_num_batched_tokens=1500,
    )
    for number in range(6):
        engine.add_request(make_request(f"r{number}", 600 + 100 * number, max_tokens=3))
        while engine.has_work:
            load = engine.step().load
    assert load.in_flight_s == 0.0
    assert load.step_prompt_tokens == 1500  # nothing decodes
    engine.add_request(make_request("long", 1000, max_tokens=2))
    begun = engine.step().load
    assert begun.in_flight_s == pytest.approx(0.011, rel=0.2)
    assert 0 < begun.step_prompt_tokens < 1500
