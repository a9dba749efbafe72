"""Several adapters of one request: agreement with PEFT, in steps with others, and their room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import InvalidRequestError, UnknownAdapterError
from engine.runner import ModelRunner
from engine.types import Request, SamplingParams, WeightedAdapter, adapter_key, key_digests
from tests.engine_helpers import (
    GREEDY,
    Job,
    acquire,
    hf_greedy,
    hf_logits,
    load_hf,
    make_base,
    make_named_adapters,
    make_runner,
    make_sequence,
    part,
    random_prompt,
    run_mixed,
    step,
)

ADAPTERS = {
    "all": (8, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "wide": (20, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "words": (3, ("v_proj", "up_proj", "embed_tokens")),
    "head": (16, ("q_proj", "down_proj", "lm_head")),
}
Parts = tuple[tuple[str, float], ...]
COMBINATIONS: tuple[Parts, ...] = (
    (("all", 1.0), ("wide", 1.0)),
    (("wide", 0.5), ("all", -1.5)),
    (("words", 2.0), ("head", 0.25)),  # no module of both
    (("all", 0.7), ("words", 0.3), ("head", 1.0)),
    (("all", 0.5),),
)


def key_of(parts: Parts) -> str:
    key = adapter_key([WeightedAdapter(*one) for one in parts])
    assert key is not None
    return key


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return make_named_adapters(base, ADAPTERS)


@pytest.fixture(scope="module")
def runner(base: Path, adapters: dict[str, Path]) -> ModelRunner:
    return open_runner(base, adapters)


def open_runner(base: Path, adapters: dict[str, Path], **changes: object) -> ModelRunner:
    runner = make_runner(base, **changes)
    for name, path in adapters.items():
        runner.load_adapter(name, path)
    return runner


def oracle(base: Path, adapters: dict[str, Path], parts: Parts) -> PeftModel:
    """PEFT's own sum: for weights of 1 its several active adapters, else their concatenation."""
    names = [name for name, _ in parts]
    model = PeftModel.from_pretrained(load_hf(base), str(adapters[names[0]]), names[0])
    for name in names[1:]:
        model.load_adapter(str(adapters[name]), name)
    if all(weight == 1.0 for _, weight in parts):
        model.base_model.set_adapter(names)
    else:
        weights = [weight for _, weight in parts]
        model.add_weighted_adapter(names, weights, "sum", combination_type="cat")
        model.set_adapter("sum")
    return model.eval()


def test_the_key_of_one_adapter_of_weight_one_is_its_digest() -> None:
    assert adapter_key([WeightedAdapter("a")]) == "a"
    assert adapter_key([WeightedAdapter("a", 0.1), WeightedAdapter("b")]) == "0.1*a+b"
    assert adapter_key([WeightedAdapter("a", 1e-7), WeightedAdapter("b", -1e9)]) == (
        "0.0000001*a+-1000000000*b"
    )
    assert adapter_key([]) is None
    assert key_digests("0.1*a+b") == ("a", "b")
    assert key_digests(None) == ()


@pytest.mark.parametrize("parts", COMBINATIONS, ids=key_of)
def test_logits_are_those_of_peft(
    base: Path, adapters: dict[str, Path], runner: ModelRunner, parts: Parts
) -> None:
    prompt = random_prompt(19, seed=5)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    key = key_of(parts)
    assert runner.adapters.acquire(key)
    (answer,) = step(runner, part(make_sequence(prompt, params=params, adapter=key)))
    runner.adapters.release(key)
    expected = hf_logits(oracle(base, adapters, parts), prompt)[:-1].log_softmax(-1)
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    found = torch.tensor([entry.logprob for entry in answer.prompt_logprobs if entry])
    torch.testing.assert_close(found, own, atol=1e-4, rtol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_combinations_share_steps_with_single_adapters_and_the_base(
    base: Path, adapters: dict[str, Path], device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    runner = open_runner(base, adapters, device=device)
    owners: list[Parts] = [(), *COMBINATIONS, (("all", 1.0),), (("head", 1.0),)]
    prompts = [random_prompt(9 + 4 * i, 20 + i) for i in range(len(owners))]
    jobs = []
    for i, parts in enumerate(owners):
        key = key_of(parts) if parts else None
        if key is not None:
            acquire(runner, key)
        sequence = make_sequence(prompts[i], 14 * i, GREEDY, key, num_blocks=14)
        jobs.append(Job(sequence, starts_at=i % 3, chunk=4 + 3 * i))
    found = run_mixed(runner, jobs, num_tokens=8)
    for i, parts in enumerate(owners):
        model = oracle(base, adapters, parts) if parts else load_hf(base)
        assert found[i] == hf_greedy(model, prompts[i], 8)


def test_other_weights_share_no_kv_block(base: Path, adapters: dict[str, Path]) -> None:
    runner = open_runner(base, adapters)
    engine = Engine(EngineConfig("", "base", block_size=4), runner)
    prompt = tuple(random_prompt(21, seed=9))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)

    def cached(number: int, *parts: tuple[str, float]) -> int:
        key = adapter_key([WeightedAdapter(*one) for one in parts])
        engine.add_request(Request(f"r{number}", prompt, params, key))
        outputs = []
        while engine.has_work:
            outputs += engine.step().outputs
        return outputs[0].num_cached_tokens

    assert cached(0, ("all", 1.0), ("wide", 0.5)) == 0
    assert cached(1, ("all", 1.0), ("wide", 0.5)) == 20
    assert cached(2, ("wide", 0.5), ("all", 1.0)) == 0
    assert cached(3, ("all", 1.0), ("wide", 0.25)) == 0
    assert cached(4, ("all", 1.0)) == 0
    assert cached(5, ("all", 1.0)) == 20
    assert engine.load().num_free_blocks == runner.num_blocks


def test_a_combination_is_refused_with_the_reason(base: Path, adapters: dict[str, Path]) -> None:
    runner = open_runner(base, adapters, max_lora_rank=48)
    engine = Engine(EngineConfig("", "base", block_size=4), runner)
    request = Request("r", (5, 6), GREEDY, "all+wide+0.5*all")
    with pytest.raises(InvalidRequestError, match=r"take 64 rank rows .* limit is 48") as error:
        engine.add_request(request)
    assert error.value.param == "adapters"
    with pytest.raises(InvalidRequestError, match=r"64 rank rows .* for different modules"):
        engine.add_request(replace(request, adapter="wide+words"))
    with pytest.raises(UnknownAdapterError, match="adapter other is not loaded"):
        engine.add_request(replace(request, adapter="all+other"))
    engine.add_request(replace(request, adapter="0.5*all+words"))
    assert [one.num_references for one in engine.adapters()] == [1, 0, 1, 0]
