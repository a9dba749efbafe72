"""The runner: different adapters in one step, draws, log-probabilities, broken rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from engine.errors import UnsupportedModelError
from engine.runner import ModelRunner
from engine.types import Sample, SamplingParams
from lora.errors import AdapterError
from tests.engine_helpers import (
    GREEDY,
    Job,
    acquire,
    hf_greedy,
    hf_logits,
    load_hf,
    make_adapter,
    make_base,
    make_named_adapters,
    make_runner,
    make_sequence,
    part,
    random_prompt,
    run_mixed,
    step,
)

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ADAPTERS = {
    "all": (8, (*ATTENTION, *MLP)),
    "head": (16, ("q_proj", "down_proj", "lm_head")),
    "words": (3, ("v_proj", "up_proj", "embed_tokens")),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return make_named_adapters(base, ADAPTERS)


@pytest.fixture(scope="module")
def runner(base: Path) -> ModelRunner:
    return make_runner(base)


def load_all(runner: ModelRunner, adapters: dict[str, Path]) -> None:
    for name, path in adapters.items():
        runner.load_adapter(name, path)
        acquire(runner, name)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_three_adapters_and_the_base_share_steps_and_agree_with_peft(
    base: Path, adapters: dict[str, Path], device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    runner = make_runner(base, device)
    load_all(runner, adapters)
    owners = [None, *adapters, "all"]
    prompts = [random_prompt(9 + 5 * i, seed=20 + i) for i in range(len(owners))]
    jobs = [
        Job(make_sequence(prompt, 24 * i, adapter=owner), starts_at=i % 3, chunk=4 + 3 * i)
        for i, (owner, prompt) in enumerate(zip(owners, prompts, strict=True))
    ]
    outputs = run_mixed(runner, jobs, num_tokens=10)
    expected = []
    for owner, prompt in zip(owners, prompts, strict=True):
        oracle = load_hf(base)
        if owner is None:
            expected.append(hf_greedy(oracle, prompt, 10))
        else:
            expected.append(
                hf_greedy(PeftModel.from_pretrained(oracle, str(adapters[owner])), prompt, 10)
            )
    assert outputs == expected
    assert expected[1] != hf_greedy(load_hf(base), prompts[1], 10)  # the oracle sees adapters


def test_an_adapters_log_probabilities_are_those_of_peft(
    base: Path, adapters: dict[str, Path]
) -> None:
    runner = make_runner(base)
    load_all(runner, adapters)
    prompt = random_prompt(19, seed=5)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    sequences = [
        make_sequence(prompt, 24 * i, params=params, adapter=name)
        for i, name in enumerate(adapters)
    ]
    answers = step(runner, *(part(sequence) for sequence in sequences))
    for name, answer in zip(adapters, answers, strict=True):
        oracle = PeftModel.from_pretrained(load_hf(base), str(adapters[name]))
        expected = hf_logits(oracle, prompt)[:-1].log_softmax(-1)
        own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        found = torch.tensor([entry.logprob for entry in answer.prompt_logprobs])
        torch.testing.assert_close(found, own, atol=2e-4, rtol=0)


def test_tokens_of_the_base_are_untouched_by_an_adapter_in_their_step(
    base: Path, adapters: dict[str, Path]
) -> None:
    runner = make_runner(base)
    load_all(runner, adapters)
    prompt = random_prompt(12, seed=6)
    params = SamplingParams(temperature=0.0, logprobs=10)

    def beside(adapter: str | None) -> Sample:
        other = make_sequence(random_prompt(7, seed=7), 40, adapter=adapter)
        return step(runner, part(make_sequence(prompt, params=params)), part(other))[0]

    assert beside("head") == beside(None)


def test_a_file_with_the_bases_own_embedding_in_it_is_taken(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(
        tmp_path / "copy", base, 4, ("q_proj", "embed_tokens"), keeps_base_copy=True
    )
    runner = make_runner(base)
    assert runner.read_adapter("copy", folder).num_pages == 1


def test_an_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    other = make_base(tmp_path / "other", hidden_size=24, num_attention_heads=4)
    folder = make_adapter(tmp_path / "adapter", other, 4, ("q_proj",))
    with pytest.raises(AdapterError, match="in_features 24, the base has 48"):
        make_runner(base).load_adapter("x", folder)


def test_an_unloaded_adapter_goes_with_its_last_reference(
    base: Path, adapters: dict[str, Path]
) -> None:
    runner = make_runner(base)
    runner.load_adapter("all", adapters["all"])
    assert runner.adapters.acquire("all")
    assert not runner.adapters.remove("all")
    runner.adapters.release("all")
    assert runner.adapters.on_host() == ()


def draw_tokens(runner: ModelRunner, seeds: list[int], params: SamplingParams) -> list[list[int]]:
    jobs = [
        Job(make_sequence(random_prompt(6, seed=1), 24 * i, params=params, seed=seed))
        for i, seed in enumerate(seeds)
    ]
    return run_mixed(runner, jobs, 12)


def test_the_same_seed_draws_the_same_tokens_whatever_else_is_drawn(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.3, top_p=0.95, max_tokens=64)
    alone = draw_tokens(runner, [2**64 - 5], params)[0]
    crowded = draw_tokens(runner, [3, 4, 2**64 - 5, 5], params)
    assert crowded[2] == alone
    assert len({tuple(tokens) for tokens in crowded}) == 4


def test_choices_of_one_seed_differ(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.5, n=2, max_tokens=64)
    jobs = [
        Job(make_sequence(random_prompt(6, seed=1), 24 * i, params=params, choice=i, seed=9))
        for i in range(2)
    ]
    first, second = run_mixed(runner, jobs, 12)
    assert first != second


def first_token(runner: ModelRunner, params: SamplingParams, prompt: list[int]) -> Sample:
    return step(runner, part(make_sequence(prompt, params=params)))[0]


def test_bias_and_top_k_choose_the_token(runner: ModelRunner) -> None:
    prompt = random_prompt(8, seed=2)
    biased = SamplingParams(temperature=1.0, logit_bias=((77, 1000.0),))
    assert first_token(runner, biased, prompt).token_id == 77
    greedy = first_token(runner, GREEDY, prompt).token_id
    assert first_token(runner, SamplingParams(temperature=2.0, top_k=1), prompt).token_id == greedy


def test_no_stop_id_is_drawn_before_min_tokens(runner: ModelRunner) -> None:
    prompt = random_prompt(8, seed=2)
    greedy = first_token(runner, GREEDY, prompt).token_id
    assert greedy is not None
    params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=(greedy,))
    sequence = make_sequence(prompt, params=params)
    assert step(runner, part(sequence))[0].token_id != greedy
    wanting = SamplingParams(temperature=0.0, min_tokens=1, logit_bias=((2, 1000.0),))
    sequence = make_sequence(prompt, params=wanting)
    assert step(runner, part(sequence))[0].token_id != 2  # EOS
    assert step(runner, part(sequence))[0].token_id == 2


def test_penalties_follow_their_definitions(base: Path, runner: ModelRunner) -> None:
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.8,
        presence_penalty=0.9,
        frequency_penalty=1.1,
        max_tokens=64,
    )
    oracle = load_hf(base)
    found, expected, unpenalised = [], [], []
    for seed in range(8):
        prompt = random_prompt(80, seed)  # more than a third of the vocabulary
        output = [*run_mixed(runner, [Job(make_sequence(prompt))], 2)[0], prompt[0], prompt[0]]
        sequence = make_sequence(prompt, params=params)
        sequence.token_ids += output
        logits = hf_logits(oracle, sequence.token_ids)[-1].clone()
        unpenalised.append(int(logits.argmax()))
        for token in {*prompt, *output}:
            logits[token] = logits[token] / 1.8 if logits[token] > 0 else logits[token] * 1.8
            count = output.count(token)
            logits[token] -= 1.1 * count + 0.9 * (count > 0)
        expected.append(int(logits.argmax()))
        found.append(step(runner, part(sequence))[0].token_id)
    assert found == expected != unpenalised


def test_log_probabilities_are_of_the_model_not_of_the_filters(
    base: Path, runner: ModelRunner
) -> None:
    prompt = random_prompt(8, seed=2)
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias=((77, 1000.0),))
    answer = first_token(runner, params, prompt).logprobs
    assert answer is not None
    expected = hf_logits(load_hf(base), prompt)[-1].log_softmax(-1)
    assert answer.token_id == 77
    assert answer.logprob == pytest.approx(float(expected[77]), abs=2e-4)
    assert answer.rank == 1 + int((expected > expected[77]).sum())
    assert [token for token, _ in answer.top] == expected.topk(2).indices.tolist()


def test_rows_with_different_numbers_of_log_probabilities_share_a_step(
    runner: ModelRunner,
) -> None:
    wanted = [3, None, 0, 7]
    sequences = [
        make_sequence(
            random_prompt(6, seed=i),
            24 * i,
            SamplingParams(temperature=0.0, logprobs=k, prompt_logprobs=k),
        )
        for i, k in enumerate(wanted)
    ]
    answers = step(runner, *(part(sequence) for sequence in sequences))
    counts = [None if a.logprobs is None else len(a.logprobs.top) for a in answers]
    assert counts == wanted
    assert [len(a.prompt_logprobs) for a in answers] == [5, 0, 5, 5]
    assert [len(entry.top) for entry in answers[3].prompt_logprobs] == [7] * 5


def test_a_chunk_that_does_not_reach_the_end_draws_nothing(runner: ModelRunner) -> None:
    sequence = make_sequence(random_prompt(12, seed=3))
    assert step(runner, part(sequence, 5)) == (Sample(None),)


def test_prompt_log_probabilities_do_not_depend_on_chunks(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    prompt = random_prompt(12, seed=3)
    whole = step(runner, part(make_sequence(prompt, params=params)))[0].prompt_logprobs
    sequence = make_sequence(prompt, params=params)
    chunks = [step(runner, part(sequence, n))[0].prompt_logprobs for n in (5, 6, 1)]
    assert [len(chunk) for chunk in chunks] == [5, 6, 0]
    joined = [entry for chunk in chunks for entry in chunk]
    assert [entry.token_id for entry in joined] == prompt[1:] == [e.token_id for e in whole]
    assert [e.logprob for e in joined] == pytest.approx([e.logprob for e in whole], abs=1e-4)


def test_a_row_that_is_not_finite_fails_alone(base: Path) -> None:
    runner = make_runner(base)
    prompt = random_prompt(6, seed=1)
    healthy = step(runner, part(make_sequence(prompt)))[0]
    broken = make_sequence(random_prompt(5, seed=2), 24)
    step(runner, part(broken))
    runner._kv.v[0][broken.block_table[0]] = float("nan")
    answers = step(runner, part(broken), part(make_sequence(prompt, 48)))
    assert answers == (Sample(None, is_finite=False), healthy)


def test_what_cannot_be_had_is_refused_by_name(base: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="triton"):
        make_runner(base, backend="triton")
    with pytest.raises(UnsupportedModelError, match="max_model_len is 500"):
        make_runner(base, max_model_len=500)
    with pytest.raises(UnsupportedModelError, match="no KV block fits"):
        make_runner(base, num_blocks=None, kv_cache_bytes=100)


def test_the_number_of_blocks_follows_bytes_and_what_can_be_used(base: Path) -> None:
    # A block: 2 (K, V) x 3 layers x 4 tokens x 2 heads x 16 numbers x 4 bytes.
    assert make_runner(base, num_blocks=None, kv_cache_bytes=10 * 3072 + 9).num_blocks == 10
    capped = make_runner(base, num_blocks=None, max_num_seqs=3, max_model_len=30)
    assert capped.num_blocks == 3 * 8
