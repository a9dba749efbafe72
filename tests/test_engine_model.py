"""The decoder against Hugging Face: same logits, same greedy tokens, for any neighbours in a
step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.runner import ModelRunner
from engine.types import SamplingParams
from tests.engine_helpers import (
    Job,
    hf_greedy,
    hf_logits,
    load_hf,
    make_base,
    make_runner,
    make_sequence,
    part,
    random_prompt,
    run_mixed,
    step,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama, yarn rope with mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    ),
    "llama, linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
    ),
    "llama, dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, wide heads": ("llama", {"head_dim": 16, "num_key_value_heads": 6}),
    "mistral with a window": ("mistral", {"sliding_window": 7}),
    "mistral without": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows in its last layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(params=VARIANTS)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, changes = VARIANTS[request.param]
    return make_base(tmp_path / "base", family, **changes)


def needs(device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return device


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_tokens_equal_those_of_hugging_face_in_mixed_steps(base: Path, device: str) -> None:
    runner = make_runner(base, needs(device))
    prompts = [random_prompt(n, seed=n) for n in (1, 9, 26, 40)]
    jobs = [
        Job(
            make_sequence(prompt, 28 * i, num_blocks=28, layout=runner.kv_layout),
            starts_at=3 * (i % 3),
            chunk=5 + 6 * i,
        )
        for i, prompt in enumerate(prompts)
    ]
    outputs = run_mixed(runner, jobs, num_tokens=10)
    oracle = load_hf(base)
    assert outputs == [hf_greedy(oracle, prompt, 10) for prompt in prompts]


@pytest.mark.parametrize("device", DEVICES)
def test_log_probabilities_are_close_at_every_position(base: Path, device: str) -> None:
    runner = make_runner(base, needs(device))
    prompt = random_prompt(45, seed=3)
    params = SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=3)
    sequence = make_sequence(prompt, params=params, layout=runner.kv_layout)
    first = step(runner, part(sequence, 20))[0]
    second = step(runner, part(sequence))[0]
    expected = hf_logits(load_hf(base), prompt).log_softmax(-1)
    found = [entry.logprob for entry in first.prompt_logprobs + second.prompt_logprobs]
    own = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), own, atol=2e-4, rtol=0)
    assert second.logprobs is not None
    best = expected[-1].topk(5)
    assert [token for token, _ in second.logprobs.top] == best.indices.tolist()
    values = torch.tensor([value for _, value in second.logprobs.top])
    torch.testing.assert_close(values, best.values, atol=2e-4, rtol=0)


def logprobs_of_first_token(runner: ModelRunner, prompt: list[int], *others: int) -> list[float]:
    params = SamplingParams(temperature=0.0, logprobs=20)
    parts = [part(make_sequence(prompt, params=params))]
    parts += [
        part(make_sequence(random_prompt(n, seed=n), first_block=24 * (i + 1)))
        for i, n in enumerate(others)
    ]
    answer = step(runner, *parts)[0].logprobs
    assert answer is not None
    return [value for _, value in answer.top]


def test_a_sequence_hardly_notices_who_shares_its_step(tmp_path: Path) -> None:
    runner = make_runner(make_base(tmp_path / "base"))
    prompt = random_prompt(30, seed=1)
    alone = logprobs_of_first_token(runner, prompt)
    crowded = logprobs_of_first_token(runner, prompt, 1, 1, 60, 17)
    torch.testing.assert_close(torch.tensor(alone), torch.tensor(crowded), atol=2e-5, rtol=0)


def test_recomputing_a_preempted_sequence_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    runner = make_runner(make_base(tmp_path / "base"))
    prompt = random_prompt(11, seed=8)
    whole = run_mixed(runner, [Job(make_sequence(prompt))], 12)[0]
    sequence = make_sequence(prompt, first_block=30)
    run_mixed(runner, [Job(sequence)], 5)
    sequence.num_computed_tokens = 0
    sequence.block_table = list(range(60, 84))
    assert run_mixed(runner, [Job(sequence, chunk=6)], 12)[0] == whole


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    prompt = random_prompt(30, seed=1)
    wide = logprobs_of_first_token(make_runner(base), prompt)
    narrow = logprobs_of_first_token(make_runner(base, dtype="bfloat16"), prompt)
    assert narrow[0] == pytest.approx(wide[0], abs=0.1)
