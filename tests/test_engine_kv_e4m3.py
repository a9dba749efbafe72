"""Engines whose keys and values are in FP8: against transformers with a cache that rounds alike."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel

from engine.checks.kv_rounding import KVChange, measure_kv_rounding
from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import EngineError, EngineMemoryError, UnsupportedModelError
from engine.rank import Rank
from engine.resolved import resolve_kv_dtype
from engine.runner import ModelRunner
from engine.types import Request, SamplingParams
from kernels.e4m3 import E4M3, to_cached
from lora.pool import AdapterPool
from tests.engine_helpers import (
    BLOCK_SIZE,
    Job,
    load_hf,
    make_adapter,
    make_base,
    make_runner,
    make_sequence,
    random_prompt,
    run_mixed,
)
from tests.kv_host_helpers import always_copies, answers_in_turns
from tests.rank_processes import follower_main

PROMPTS = [random_prompt(length, seed=i) for i, length in enumerate((5, 31, 12))]
NUM_TOKENS = 16
GREEDY_FEW = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)


class RoundedCache(DynamicCache):
    """Attention sees keys and values as a cache in e4m3 keeps them, those of its own tokens too."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = (to_cached(x, E4M3).to(x.dtype) for x in (key_states, value_states))
        found: tuple[torch.Tensor, torch.Tensor] = super().update(*rounded, *args, **kwargs)
        return found


def rounded_greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            cache = RoundedCache(config=model.config)
            logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_base(tmp_path_factory.mktemp("e4m3") / "base")
    make_adapter(folder.parent / "a", folder, 8, ("q_proj", "v_proj", "o_proj"))
    return folder


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 9})],
    ids=["llama", "qwen3", "mistral"],
)
def test_greedy_tokens_equal_those_of_a_rounding_cache(
    tmp_path: Path, family: str, changes: dict[str, object]
) -> None:
    """Attention reads the rounded values in chunks, whole prompts and decodes beside others."""
    folder = make_base(tmp_path / "base", family, **changes)
    runner = make_runner(folder, kv_cache_dtype="fp8")
    jobs = [
        Job(make_sequence(prompt, 24 * i, layout=runner.kv_layout), starts_at=2 * i, chunk=chunk)
        for i, (prompt, chunk) in enumerate(zip(PROMPTS, (2, 7, 1000), strict=True))
    ]
    found = run_mixed(runner, jobs, NUM_TOKENS)
    model = load_hf(folder)
    assert found == [rounded_greedy(model, prompt) for prompt in PROMPTS]


def tokens_of(base: Path, **changes: object) -> list[tuple[int, ...]]:
    """Returns what an engine answers, alone and again, with its prefixes found or computed."""
    runner = make_runner(base, kv_cache_dtype="fp8", **changes)
    runner.load_adapter("a", base.parent / "a")
    engine = Engine(config_of(runner), runner)
    if runner.kv_copies is not None:
        always_copies(engine)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, seed=3)
    found = answers_in_turns(engine, PROMPTS, params, 2)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(Request(f"a {i}", tuple(prompt), params, "a"))
    by_request: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            by_request[output.request_id] = by_request.get(output.request_id, ()) + output.token_ids
    if runner.kv_copies is not None:
        assert engine.load().kv_host.loaded_bytes > 0
    runner.close()
    return [*found, *(by_request[f"a {i}"] for i in range(len(PROMPTS)))]


def config_of(runner: ModelRunner) -> EngineConfig:
    return runner._rank.config


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_prefix_caching": False},
        {"speculation": "suffix"},
        {"kv_host_bytes": 1 << 20, "num_blocks": 20},
        {"max_num_batched_tokens": 8},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_tokens_are_those_of_the_plainest_engine(base: Path, changes: dict[str, object]) -> None:
    assert tokens_of(base, **changes) == tokens_of(base)


def test_a_block_has_a_quarter_of_the_bytes_of_float32(base: Path) -> None:
    runner = make_runner(base, num_blocks=None, kv_cache_bytes=1 << 16)
    narrow = make_runner(base, num_blocks=None, kv_cache_bytes=1 << 16, kv_cache_dtype="fp8")
    each = 2 * 3 * BLOCK_SIZE * 2 * 16  # elements: K and V, layers, tokens, heads, dimensions
    assert runner.num_blocks == (1 << 16) // (4 * each)
    assert narrow.num_blocks == (1 << 16) // each


def test_a_base_whose_keys_are_mostly_bias_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three bits of a large key leave nothing of its token, as in some of Qwen 2.5's bases."""
    folder = make_base(tmp_path / "base", "qwen2")
    with caplog.at_level("INFO"):
        make_runner(folder, kv_cache_dtype="fp8")
    assert "keys and values in FP8 change the base on random tokens" in caplog.text
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            tensor.mul_(300)
    save_file(tensors, file, metadata={"format": "pt"})
    make_runner(folder)
    for size in (1, 2):
        with pytest.raises(
            UnsupportedModelError, match=r"kv_cache_dtype is fp8.*median KL.*kv_cache_dtype: auto"
        ):
            make_runner(folder, kv_cache_dtype="fp8", tensor_parallel_size=size)


def test_old_devices_are_refused(base: Path) -> None:
    rank = Rank(config_of(make_runner(base, kv_cache_dtype="fp8")))
    assert rank.kv_dtype == E4M3
    with pytest.raises(UnsupportedModelError, match=r"kv_cache_dtype is fp8.*8\.9.*8\.0"):
        resolve_kv_dtype(rank.config, torch.bfloat16, (8, 0))


def test_the_change_is_measured_on_both_caches(base: Path) -> None:
    runner = make_runner(base)
    same = measure_kv_rounding(runner._rank.model, runner.adapters, torch.float32, 4096)
    assert same == KVChange(256, 0, 0, 0.0, 0.0)
    other = measure_kv_rounding(runner._rank.model, runner.adapters, E4M3, 4096)
    assert 0 < other.median_kl < 0.1
    assert 0 < other.argmax_changed < 0.5
    assert measure_kv_rounding(runner._rank.model, runner.adapters, E4M3, 3).num_positions == 6


def test_a_base_without_finite_logits_is_refused_by_the_setting(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "base")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][17] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    make_runner(folder)  # requests that meet the token fail alone
    with pytest.raises(UnsupportedModelError, match=r"kv_cache_dtype is fp8.*of 256 random tokens"):
        make_runner(folder, kv_cache_dtype="fp8")


@pytest.mark.slow
def test_two_ranks_are_compared_as_one(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens, found = [], []
    for size in (1, 2):
        caplog.clear()
        with caplog.at_level("INFO"):
            runner = make_runner(base, kv_cache_dtype="fp8", tensor_parallel_size=size)
        with closing(runner):
            found += [line for line in caplog.messages if "keys and values in FP8 change" in line]
            engine = Engine(config_of(runner), runner)
            tokens.append(answers_in_turns(engine, PROMPTS, GREEDY_FEW, 1))
    assert found[0] == found[1]
    assert tokens[0] == tokens[1]


def _without_memory(*_: object) -> KVChange:
    raise EngineMemoryError("no memory is left, change kv_cache_dtype")


_NO_MEMORY_MAIN = follower_main(
    "import engine.rank; from tests.test_engine_kv_e4m3 import _without_memory; "
    "engine.rank.measure_kv_rounding = _without_memory"
)
_DYING_MAIN = follower_main(
    "import os; from engine.rank import Rank; Rank.compare_kv = lambda self, pool: os._exit(3)"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "words"),
    [
        (_DYING_MAIN, "rank 1 of 2 died with exit code 3 before it could compare the types of KV"),
        (_NO_MEMORY_MAIN, "rank 1 of 2 could not compare the types of KV: EngineMemoryError: no m"),
    ],
    ids=["dead", "no memory"],
)
def test_a_rank_that_cannot_compare_the_base_gives_its_reason(
    base: Path, monkeypatch: pytest.MonkeyPatch, main: str, words: str
) -> None:
    monkeypatch.setattr("engine.parallel.group._MAIN", main)
    with pytest.raises(EngineError, match=words):
        make_runner(base, kv_cache_dtype="fp8", tensor_parallel_size=2)


def take_memory_from_the_last_rank() -> None:
    compare = Rank.compare_kv

    def compare_or_fail(self: Rank, pool: AdapterPool) -> KVChange:
        return _without_memory() if self.shard.rank == 3 else compare(self, pool)

    Rank.compare_kv = compare_or_fail  # type: ignore[method-assign]


@pytest.mark.slow
def test_the_reason_of_a_rank_comes_before_the_broken_exchanges_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(tmp_path / "base", num_attention_heads=4, num_key_value_heads=4)
    main = follower_main(
        "from tests.test_engine_kv_e4m3 import take_memory_from_the_last_rank; "
        "take_memory_from_the_last_rank()"
    )
    monkeypatch.setattr("engine.parallel.group._MAIN", main)
    words = "rank 3 of 4 could not compare the types of KV: EngineMemoryError: no memory is left"
    with pytest.raises(EngineError, match=words):
        make_runner(base, kv_cache_dtype="fp8", tensor_parallel_size=4, num_threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_no_memory_for_the_comparison_names_the_setting(
    base: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("engine.rank.measure_kv_rounding", _without_memory)
    with pytest.raises(EngineMemoryError, match=r"^no memory is left, change kv_cache_dtype$"):
        make_runner(base, kv_cache_dtype="fp8", tensor_parallel_size=size)


def test_an_overflow_shows() -> None:
    beyond = torch.tensor([1e9, -1e9, float("inf"), -float("inf"), float("nan"), 448.0])
    found = to_cached(beyond, E4M3).float()
    torch.testing.assert_close(
        found, torch.tensor([448.0, -448.0, *[float("nan")] * 3, 448.0]), equal_nan=True
    )
