"""Adapters with invocation tokens (aLoRA): agreement with PEFT, shared prefixes, migration."""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model

from engine.activation import find_activation
from engine.checks.validation import check_adapter
from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import InvalidRequestError
from engine.prefix_digests import extend_digests, prefix_digests
from engine.runner import ModelRunner
from engine.types import Request, ResumedChoice, SamplingParams
from kernels.lora_plan import MAX_SPLITS
from lora.errors import AdapterError
from registry.entities import AdapterVersion, WeightedVersion
from serve_app.admission.cost import token_cost
from serve_app.routing.request import make_routing_request
from tests.engine_helpers import (
    BLOCK_SIZE,
    hf_greedy,
    load_hf,
    make_adapter,
    make_base,
    make_runner,
    random_prompt,
)
from tests.peft_kinds import save_peft

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
INVOCATIONS = {"judge": (91, 17, 60), "guard": (44, 45)}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    found = {
        name: make_alora(base.parent / name, base, invocation, seed)
        for seed, (name, invocation) in enumerate(INVOCATIONS.items())
    }
    return found | {"plain": make_adapter(base.parent / "plain", base, 8, ALL, seed=9)}


def make_alora(
    folder: Path, base: Path, invocation: Many[int], seed: int, targets: Many[str] = ALL
) -> Path:
    torch.manual_seed(seed)
    config = LoraConfig(
        r=20,
        lora_alpha=40,
        target_modules=list(targets),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        alora_invocation_tokens=list(invocation),
    )
    model = get_peft_model(load_hf(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.08)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def open_engine(
    base: Path, adapters: dict[str, Path], device: str = "cpu", **changes: object
) -> Engine:
    block_size = BLOCK_SIZE if device == "cpu" else 16  # a kernel's least
    runner: ModelRunner = make_runner(base, device, block_size=block_size)
    for name, path in adapters.items():
        runner.load_adapter(name, path)
    config = EngineConfig("", "base", block_size=block_size, **changes)  # type: ignore[arg-type]
    return Engine(config, runner)


def prompt_of(name: str, length: int, tail: int, seed: int, *, twice: bool = False) -> list[int]:
    """Returns a prompt with the adapter's invocation before the last `tail` tokens."""
    ids, invocation = random_prompt(length, seed), list(INVOCATIONS[name])
    early = [*ids[:3], *invocation, *ids[3:]] if twice else ids
    middle = len(early) - tail
    return [*early[:middle], *invocation, *early[middle:]]


def peft_greedy(base: Path, folder: Path, prompt: Many[int], num_tokens: int) -> list[int]:
    """PEFT's own generation, with its cache: the place in the prompt counts for all tokens."""
    model = PeftModel.from_pretrained(load_hf(base), str(folder)).eval()
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def run(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
    assert engine.load().num_free_blocks == engine.load().num_blocks
    return found


def cached(engine: Engine, name: str, prompt: Many[int], adapter: str | None) -> int:
    engine.add_request(Request(name, tuple(prompt), PARAMS, adapter))
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs[0].num_cached_tokens


@pytest.mark.parametrize("budget", [512, 7])  # whole prompts, and chunks that end anywhere
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tokens_are_those_of_peft_beside_other_adapters(
    base: Path, adapters: dict[str, Path], budget: int, device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    prompts = {
        "judge": prompt_of("judge", 19, 2, seed=1),
        "judge twice": prompt_of("judge", 22, 0, seed=2, twice=True),
        "judge first": [*INVOCATIONS["judge"], *random_prompt(9, 3)],
        "judge absent": random_prompt(14, 4),
        "guard": prompt_of("guard", 31, 5, seed=5),
        "plain": prompt_of("judge", 17, 1, seed=6),
        "": prompt_of("guard", 12, 1, seed=7),
    }
    engine = open_engine(base, adapters, device, max_num_batched_tokens=budget)
    requests = [
        Request(name, tuple(prompt), PARAMS, name.partition(" ")[0] or None)
        for name, prompt in prompts.items()
    ]
    found = run(engine, *requests)
    for name, prompt in prompts.items():
        adapter = name.partition(" ")[0]
        if not adapter:
            expected = hf_greedy(load_hf(base), prompt, 6)
        elif adapter == "plain":
            model = PeftModel.from_pretrained(load_hf(base), str(adapters[adapter]))
            expected = hf_greedy(model, prompt, 6)
        else:
            expected = peft_greedy(base, adapters[adapter], prompt, 6)
        assert found[name] == expected, name
    assert found["judge absent"] == hf_greedy(load_hf(base), prompts["judge absent"], 6)


def test_prompt_log_probabilities_are_the_base_s_before_the_invocation(
    base: Path, adapters: dict[str, Path]
) -> None:
    prompt = prompt_of("judge", 15, 3, seed=8)
    start = find_activation(prompt, INVOCATIONS["judge"])
    assert start is not None

    def logprobs(adapter: str | None) -> list[float]:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        engine = open_engine(base, adapters)
        engine.add_request(Request("r", tuple(prompt), params, adapter))
        found = [output for _ in range(3) for output in engine.step().outputs]
        return [entry.logprob for entry in found[0].prompt_logprobs if entry]

    alone, with_adapter = logprobs(None), logprobs("judge")
    assert with_adapter[:start] == alone[:start]  # to the bit: position p predicts p + 1
    assert with_adapter[start] != alone[start]
    model = PeftModel.from_pretrained(load_hf(base), str(adapters["judge"])).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0].float()
    own = logits[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(with_adapter), own, atol=1e-4, rtol=0)


def test_the_prefix_of_a_conversation_is_shared_with_the_base_and_other_aloras(
    base: Path, adapters: dict[str, Path]
) -> None:
    engine = open_engine(base, adapters)
    talk = random_prompt(26, seed=11)
    assert cached(engine, "0", talk, None) == 0
    judge, guard = ([*talk, *INVOCATIONS[name]] for name in ("judge", "guard"))
    assert cached(engine, "1", judge, "judge") == 24  # whole blocks before the invocation
    assert cached(engine, "2", guard, "guard") == 24
    assert cached(engine, "3", judge, "judge") == 28
    assert cached(engine, "4", judge, "plain") == 0
    assert cached(engine, "5", judge, None) == 24  # not the adapter's block
    other = [*random_prompt(26, seed=12), *INVOCATIONS["judge"], 7, 8, 9]
    assert cached(engine, "6", other, "judge") == 0
    assert cached(engine, "7", other, "guard") == 24  # without its invocation: the base's
    assert engine.load().num_free_blocks == engine.load().num_blocks


def test_a_router_finds_the_prefix_that_the_base_has_computed(
    base: Path, adapters: dict[str, Path]
) -> None:
    engine = open_engine(base, adapters)
    talk = random_prompt(70, seed=15)

    def prefixes(prompt: Many[int], adapter: str | None) -> tuple[int, ...]:
        invocation = INVOCATIONS.get(adapter or "", ())
        version = AdapterVersion(
            "name", 1, adapter or "", "base", "", 20, (), "", invocation=invocation
        )
        weighted = (WeightedVersion(version),) if adapter else ()
        request = Request("r", tuple(prompt), PARAMS, adapter)
        return make_routing_request([request], weighted, engine.limits).prefixes

    reported: set[int] = set()
    judge = [*talk, *INVOCATIONS["judge"], *random_prompt(40, seed=16)]
    for prompt, adapter in ((talk, None), (judge, "judge")):
        engine.add_request(Request(f"{adapter}", tuple(prompt), PARAMS, adapter))
        known = [name in reported for name in prefixes(prompt, adapter)]
        assert known == ([False, False] if adapter is None else [True, True, False])
        while engine.has_work:
            reported.update(engine.step().cached_prefixes)
        assert set(prefixes(prompt, adapter)) <= reported
    assert prefixes(talk, "judge") == prefixes(talk, None)  # without the invocation
    assert not set(prefixes(talk, "plain")) & reported


def test_admission_charges_an_alora_for_the_tokens_from_its_invocation_on(
    base: Path, adapters: dict[str, Path]
) -> None:
    limits = open_engine(base, adapters).limits
    judge = prompt_of("judge", 17, 6, seed=13)
    without = random_prompt(9, seed=14)

    def num_base_tokens(*prompts: Many[int], invocation: tuple[int, ...]) -> int:
        version = AdapterVersion("judge", 1, "d", "base", "", 20, (), "", invocation=invocation)
        requests = [Request("r", tuple(prompt), PARAMS, "judge") for prompt in prompts]
        made = make_routing_request(requests, (WeightedVersion(version),), limits)
        return made.num_base_tokens

    assert num_base_tokens(judge, invocation=INVOCATIONS["judge"]) == 11
    assert num_base_tokens(judge, without, invocation=INVOCATIONS["judge"]) == 11 + 9
    assert num_base_tokens(judge, invocation=()) == 0
    assert token_cost(20, 100, 0, 60) == token_cost(0, 60, 0) + token_cost(20, 40, 0)


def test_a_later_invocation_makes_the_earlier_one_the_base_s(
    base: Path, adapters: dict[str, Path]
) -> None:
    engine = open_engine(base, adapters)
    first = prompt_of("judge", 17, 6, seed=13)
    cached(engine, "0", first, "judge")
    second = [*first, *random_prompt(5, 14), *INVOCATIONS["judge"]]
    start = find_activation(first, INVOCATIONS["judge"])
    assert start is not None
    assert cached(engine, "1", second, "judge") == start // BLOCK_SIZE * BLOCK_SIZE
    found = run(engine, Request("2", tuple(second), PARAMS, "judge"))
    assert found["2"] == peft_greedy(base, adapters["judge"], second, 6)


def test_an_invocation_beyond_the_vocabulary_is_refused(base: Path, tmp_path: Path) -> None:
    folder = make_alora(tmp_path / "far", base, (3, 10**9), 0)
    with pytest.raises(AdapterError, match=r"alora_invocation_tokens holds 1000000000, .* tokens"):
        check_adapter(folder, base)


def test_a_step_has_a_bounded_number_of_splits(base: Path, adapters: dict[str, Path]) -> None:
    prompts = [prompt_of("judge", 9 + i, i % 3, seed=20 + i) for i in range(MAX_SPLITS + 3)]
    engine = open_engine(base, adapters)
    requests = [Request(f"{i}", tuple(p), PARAMS, "judge") for i, p in enumerate(prompts)]
    for request in requests:
        engine.add_request(request)
    ends = [item.end for item in engine.scheduler.schedule().sequences]
    starts = [find_activation(prompt, INVOCATIONS["judge"]) for prompt in prompts]
    assert ends[:MAX_SPLITS] == [len(prompt) for prompt in prompts[:MAX_SPLITS]]
    assert ends[MAX_SPLITS:] == starts[MAX_SPLITS:]
    found = run(open_engine(base, adapters), *requests)
    for i, prompt in enumerate(prompts[-3:], MAX_SPLITS):
        assert found[f"{i}"] == peft_greedy(base, adapters["judge"], prompt, 6)


def test_preemption_and_migration_keep_the_place(base: Path, adapters: dict[str, Path]) -> None:
    """A small cache preempts sequences; another engine goes on with the tokens of the first."""
    prompts = [prompt_of("judge", 23, 4, seed=40 + i) for i in range(3)]
    expected = [peft_greedy(base, adapters["judge"], prompt, 12) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    runner = make_runner(base, block_size=BLOCK_SIZE, num_blocks=24)
    runner.load_adapter("judge", adapters["judge"])
    engine = Engine(EngineConfig("", "base", block_size=BLOCK_SIZE), runner)
    requests = [Request(f"{i}", tuple(p), params, "judge") for i, p in enumerate(prompts)]
    found = run(engine, *requests)
    assert [found[f"{i}"] for i in range(3)] == expected
    assert engine.load().num_preemptions > 0
    resumed = (ResumedChoice(0, tuple(expected[0][:5])),)
    moved = Request("m", tuple(prompts[0]), params, "judge", resumed=resumed)
    assert run(open_engine(base, adapters), moved)["m"] == expected[0][5:]


def test_an_alora_is_refused_beside_other_adapters(base: Path, adapters: dict[str, Path]) -> None:
    engine = open_engine(base, adapters)
    with pytest.raises(InvalidRequestError, match="judge has alora_invocation_tokens"):
        engine.add_request(Request("r", (5, 6), PARAMS, "plain+0.5*judge"))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "must be a list of 1 to 512 token ids"),
        ("ab", "must be a list of 1 to 512 token ids, not 'ab'"),
        ([5, -1], "holds -1, which is not a token id"),
        ([5, True], "holds true, which is not a token id"),
        ([5] * 513, "must be a list of 1 to 512"),
    ],
)
def test_bad_invocation_tokens_are_refused(
    base: Path, tmp_path: Path, tokens: object, words: str
) -> None:
    folder = make_alora(tmp_path / "bad", base, [5], seed=0)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["alora_invocation_tokens"] = tokens
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError) as error:
        make_runner(base).load_adapter("bad", folder)
    assert words.lower() in str(error.value).lower().replace('"', "'")


def test_an_alora_of_the_embedding_is_refused(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "words", base, 4, ("embed_tokens", "q_proj"))
    config = json.loads((folder / "adapter_config.json").read_text())
    config["alora_invocation_tokens"] = [5]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match="embed_tokens, an embedding, which is not supported"):
        make_runner(base).load_adapter("words", folder)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"bias": "all"}, "whose bias is trained"),
        ({"trainable_token_indices": {"lm_head": [3, 4]}}, "lm_head, of which tokens are trained"),
    ],
)
def test_parts_that_are_active_before_the_invocation_are_refused(
    tmp_path: Path, others: dict[str, Any], words: str
) -> None:
    """PEFT adds them to all tokens."""
    base = make_base(tmp_path / "base", attention_bias=True)
    config = LoraConfig(
        r=4,
        target_modules=["q_proj"],
        task_type="CAUSAL_LM",
        alora_invocation_tokens=[5, 6],
        **others,
    )
    folder = save_peft(tmp_path / "adapter", base, config)
    with pytest.raises(AdapterError, match=f"{words}, which is not supported"):
        make_runner(base).load_adapter("adapter", folder)


@given(
    st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), min_size=1, max_size=4)
)
def test_the_last_occurrence_is_found(prompt: list[int], invocation: list[int]) -> None:
    n = len(invocation)
    places = [i for i in range(len(prompt) - n + 1) if prompt[i : i + n] == invocation]
    assert find_activation(prompt, invocation) == (places[-1] if places else None)


def test_occurrences_are_whole_tokens() -> None:
    assert find_activation([256, 0], [1]) is None
    assert find_activation([1 << 32, 1], [1]) == 1
    assert find_activation([2**40 + 1], [1]) is None


def test_digests_are_those_of_the_base_until_the_adapter_is_active() -> None:
    ids = list(range(200))
    plain, alone = prefix_digests(ids, "x", "s", 32), prefix_digests(ids, None, "s", 32)
    active = prefix_digests(ids, "x", "s", 32, active_from=70)
    assert active[:2] == alone[:2]
    assert not set(active[2:]) & {*alone, *plain}
    assert len({active, *(prefix_digests(ids, "x", "s", 32, active_from=n) for n in (69, 71))}) == 3
    extended = list(active[:4])
    extend_digests(extended, ids, len(ids), "x", "s", 32, 70)
    assert tuple(extended) == active
    assert prefix_digests(ids, "y", "s", 32, active_from=70)[:3] != active[:3]
