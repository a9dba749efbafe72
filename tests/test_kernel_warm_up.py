"""The kernels that are compiled before an engine is ready: listed completely, found again by a
launch, and compiled without a device."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Literal

import pytest
import torch

from engine import device_step, kernel_trace, warm_batches
from engine.config import EngineConfig, KVCacheDtype
from engine.int4_forms import Int4Forms, likely_forms, possible_forms
from engine.kernel_trace import trace_kernels
from engine.kv_cache import KVCache
from engine.model import Model
from engine.model_config import ModelConfig, parse_model_config
from engine.step_inputs import StepLimits
from engine.warm_batches import GREEDY, BatchShape, make_batch, step_sizes
from engine.warm_up import insert_those_that_fit
from kernels.backend import HAS_TRITON
from kernels.kernel_call import KernelCall, Pointer
from lora.pool import AdapterPool
from tests.lora_helpers import make_adapter, make_pool

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Triton on its next version's defaults
]
if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["page"])
    def copy_words(words_ptr, table_ptr, page, WORDS: tl.constexpr):
        tl.store(words_ptr + tl.load(table_ptr + page), WORDS)


Quantization = Literal["auto", "none", "fp8"]
ROOT = Path(__file__).parent.parent
HOPPER, AMPERE = (9, 0), (8, 0)
LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
GEMMA3: dict[str, object] = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "sliding_window": 1024,
}
MODELS: dict[str, dict[str, object]] = {
    "llama-3-8b": LLAMA,
    "llama-3-70b": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    "qwen3-8b": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 12288},
    "mistral-with-a-window": LLAMA
    | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "vocab_size": 32003},
    "qwen2-with-biases": LLAMA | {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584},
    "gemma-3-4b": GEMMA3,
    "smollm3": LLAMA | {"architectures": ["SmolLM3ForCausalLM"]},
    "olmo-2-7b": LLAMA | {"architectures": ["Olmo2ForCausalLM"], "intermediate_size": 11008},
    "tiny-with-a-wide-vocabulary": LLAMA
    | {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    | {"num_attention_heads": 2, "num_key_value_heads": 1},
}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
INT4_MODELS: dict[str, dict[str, object]] = {
    "llama-3-8b-gptq": LLAMA | {"quantization_config": GPTQ},
    "qwen2-with-biases-awq": MODELS["qwen2-with-biases"]
    | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}},
}


def model_named(name: str) -> ModelConfig:
    return parse_model_config((MODELS | INT4_MODELS)[name], {})


@cache
def traced(
    name: str,
    max_tokens: int = 2048,
    max_seqs: int = 256,
    num_pages: int = 64,
    capability: tuple[int, int] = HOPPER,
    dtype: torch.dtype = torch.bfloat16,
    affine_adapters: bool = True,
    quantization: Quantization = "none",
    kv_cache_dtype: KVCacheDtype = "auto",
    num_ranks: int = 1,
) -> frozenset[KernelCall]:
    model = replace(model_named(name), num_layers=2)
    model = replace(model, sliding_windows=model.sliding_windows[:2], ropes=model.ropes[:2])
    config = EngineConfig(
        "",
        "",
        adapter_pool_bytes=pool_bytes(model, num_pages),
        max_num_batched_tokens=max_tokens,
        max_num_seqs=max_seqs,
        max_lora_rank=64,
        affine_adapters=affine_adapters,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=num_ranks,
    )
    int4 = likely_forms(model, num_ranks) if quantization == "auto" else {}
    return trace_kernels(config, model, dtype, 4096, capability, int4)


def pool_bytes(model: ModelConfig, num_pages: int) -> int:
    from engine.model_config import lora_sites
    from lora.page_image import PageLayout

    return num_pages * PageLayout(lora_sites(model), torch.bfloat16).page_bytes


def names(calls: frozenset[KernelCall]) -> set[str]:
    return {f"{call.module}.{call.name}" for call in calls}


# -- the list -----------------------------------------------------------------------------------


def test_every_kernel_is_launched_where_launches_are_recorded() -> None:
    """`kernel[grid](...)` appears in `launch` alone: a kernel launched elsewhere could not be
    listed."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in sorted((ROOT / "kernels").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    lines = (ROOT / "kernels" / "triton_launch.py").read_text().splitlines()
    own = {
        f"triton_launch.py:{number}"
        for number, line in enumerate(lines, start=1)
        if "kernel[grid](*" in line or "compiled[grid](*" in line or "compiled[(*grid, 1" in line
    }
    assert set(found) == own
    assert len(own) == 3


def launched_kernels() -> set[str]:
    """Every kernel that a launcher or a call of `launch` names."""
    found = set()
    for path in sorted((ROOT / "kernels").glob("*.py")):
        module = f"kernels.{path.stem}"
        imported = {}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported |= {alias.name: node.module for alias in node.names}
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("Launcher", "launch")
                and isinstance(node.args[0], ast.Name)
            ):
                name = node.args[0].id
                found.add(f"{imported.get(name, module)}.{name}")
    return found


def test_the_list_has_every_kernel_of_the_folder() -> None:
    """Collects them over models: few rows with and without norms, norms of what a layer adds,
    windows, an older device, FP8, 4 bits, several ranks."""
    everywhere = frozenset[KernelCall]().union(
        traced("llama-3-8b"),
        traced("qwen3-8b"),
        traced("mistral-with-a-window"),
        traced("olmo-2-7b"),
        traced("llama-3-8b", capability=AMPERE),
        traced("llama-3-8b", quantization="fp8"),
        traced("llama-3-8b-gptq", quantization="auto"),
        traced("llama-3-8b-gptq", quantization="auto", capability=AMPERE),
        traced("llama-3-8b", num_ranks=2),
    )
    assert names(everywhere) == launched_kernels()


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        *((name, "none") for name in sorted(MODELS.keys() - {"smollm3"})),
        ("llama-3-8b", "fp8"),
        ("qwen2-with-biases", "fp8"),
        *((name, "auto") for name in INT4_MODELS),
    ],
)
def test_no_number_of_tokens_reaches_a_kernel_beyond_the_list(
    name: str, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every eleventh number of tokens up to 160, other numbers for each model, all around the
    thresholds above, with any number of single tokens, and adapters of other ranks beside each
    other. Each mix of adapters meets a third of the shapes, the next mix another third."""
    listed = traced(name, quantization=quantization)
    thirds = count()
    above = (191, 192, 193, 255, 500, 512, 700, 1000, 1023, 1024, 1025, 1500, 2000, 2048)

    def every_shape(num_tokens: int) -> Iterator[BatchShape]:
        for num_decodes in {0, 1, 2, num_tokens // 3, num_tokens - 2}:
            rest = num_tokens - num_decodes
            if 0 <= num_decodes <= 128 and rest > 1:
                yield BatchShape(num_decodes, (rest,))
                if rest > 3:
                    yield BatchShape(num_decodes, (rest - rest // 2, rest // 2))
        if num_tokens <= 128:
            yield BatchShape(num_tokens, ())

    def a_third(num_tokens: int, limits: object) -> Iterator[BatchShape]:
        return islice(every_shape(num_tokens), next(thirds) % 3, None, 3)

    first = 1 + sorted(MODELS | INT4_MODELS).index(name)
    sizes = (*range(first, first + 155, 11), *above)
    assert len(sizes) % 3, "each mix would meet the same third"
    monkeypatch.setattr(kernel_trace, "step_sizes", lambda _: sizes)
    monkeypatch.setattr(kernel_trace, "batch_shapes", a_third)
    monkeypatch.setattr(warm_batches, "adapter_ranks", lambda *_: (1, 16, 17, 40))
    monkeypatch.setattr(
        kernel_trace,
        "mixes",
        lambda found: (
            (None,),
            (found[0], found[3], found[4]),
            (found[2], None, found[1]),
            (found[3],),
            (found[4], None),
        ),
    )
    found = traced.__wrapped__(name, quantization=quantization)
    assert found - listed == frozenset()
    assert len(found) > 20


@pytest.mark.parametrize("changes", [{"mixed_graphs": False}, {"enforce_eager": True}])
def test_tiles_beside_each_other_are_listed_without_graphs(
    changes: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode of one adapter and a prompt of another, neither affine, launched kernel by
    kernel."""
    model = replace(model_named("llama-3-8b"), num_layers=1)
    config = replace(EngineConfig("", "", max_lora_rank=64), **changes)
    listed = trace_kernels(config, model, torch.bfloat16, 4096, HOPPER)

    def of_two(limits: StepLimits, pool: AdapterPool, adapters: list[str]) -> Iterator[object]:
        assert all(map(pool.acquire, adapters[:2]))
        yield make_batch(BatchShape(1, (100,)), tuple(adapters[:2]), limits, 1, GREEDY)

    monkeypatch.setattr(kernel_trace, "_trace_batches", of_two)
    found = trace_kernels(config, model, torch.bfloat16, 4096, HOPPER)
    assert found - listed == frozenset()


@pytest.mark.parametrize("name", ["gemma-3-4b", "smollm3"])
def test_every_kind_of_layer_is_in_the_list(name: str) -> None:
    """The first layers of these are alike; a later one has no window, or no positions."""
    whole = trace_kernels(
        EngineConfig("", "", adapter_pool_bytes=0), model_named(name), torch.bfloat16, 4096, HOPPER
    )
    assert traced(name, num_pages=0, max_tokens=8192) < whole


def test_two_layers_of_two_kinds_are_both_in_the_list() -> None:
    config = EngineConfig("", "", adapter_pool_bytes=0)
    model = model_named("gemma-3-4b")
    two = replace(
        model, num_layers=2, sliding_windows=model.sliding_windows[4:6], ropes=model.ropes[4:6]
    )
    assert two.sliding_windows == (1024, None)
    listed, whole = (
        trace_kernels(config, one, torch.bfloat16, 4096, HOPPER) for one in (two, model)
    )
    assert listed == whole


def test_step_sizes_lie_around_powers_of_two() -> None:
    assert step_sizes(20) == (1, 2, 3, 4, 5, 8, 9, 16, 17, 20)


def test_the_number_of_kernels_stays_small() -> None:
    """A constant that takes many values at run time would show here."""
    assert len(traced("llama-3-8b", affine_adapters=False)) == 64
    assert len(traced("llama-3-8b")) == 83
    assert traced("llama-3-8b", max_tokens=8192) == traced("llama-3-8b")
    assert traced("llama-3-8b", max_seqs=64) == traced("llama-3-8b")
    assert traced("llama-3-8b", num_pages=700) == traced("llama-3-8b")


def test_an_engine_in_fp8_has_products_of_its_own() -> None:
    found = traced("llama-3-8b", quantization="fp8")
    assert "kernels.triton_linear_few._linear_few_kernel" not in names(found)
    new = [call.name for call in found - traced("llama-3-8b")]
    # Two widths; four weights with and without LoRA, in four tiles; two splits of three heights.
    assert Counter(new) == {
        "_quantize_rows_kernel": 2,
        "_fp8_few_kernel": 8,
        "_fp8_mid_kernel": 16,
        "_split_sum_kernel": 2,
    }


def test_fp8_keys_have_kernels_of_their_own() -> None:
    for capability in (HOPPER, (8, 9)):
        plain = traced("llama-3-8b", capability=capability)
        narrow = traced("llama-3-8b", capability=capability, kv_cache_dtype="fp8")
        assert len(narrow) == len(plain)
        new = {call.name for call in narrow - plain}
        assert new == {call.name for call in plain - narrow}
        assert new == {
            *("_decode_kernel", "_prefill_kernel", "_rope_kv_write_kernel", "_rope_few_kernel"),
            *("_lora_rope_kernel", "_lora_rope_large_kernel"),
        }


def test_an_engine_in_4_bits_has_products_of_its_own() -> None:
    found = traced("llama-3-8b-gptq", quantization="auto")
    assert "kernels.triton_linear_few._linear_few_kernel" not in names(found)
    new = [call.name for call in found - traced("llama-3-8b")]
    # Four weights, in four tiles of tokens; K in parts for one; two norms that add a shrink's
    # planes of another number.
    assert Counter(new) == {
        "_int4_wide_kernel": 16,
        "_split_sum_kernel": 1,
        "_write_out_kernel": 4,
        "_lora_add_rms_norm_kernel": 2,
    }
    older = traced("llama-3-8b-gptq", quantization="auto", capability=AMPERE)
    new = [call.name for call in older - traced("llama-3-8b", capability=AMPERE)]
    # Few rows with and without LoRA, more in three tiles; K in parts for three, of two heights.
    assert Counter(new) == {
        "_int4_few_kernel": 8,
        "_int4_mid_kernel": 12,
        "_split_sum_kernel": 2,
        "_write_out_kernel": 4,
    }
    assert traced("llama-3-8b-gptq") == traced("llama-3-8b")


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-4b", "smollm3", "last-layer-in-16-bits"])
def test_few_layers_launch_what_all_layers_launch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture may load no kernel, and only these run before it."""
    forms: Int4Forms = {}
    if name == "last-layer-in-16-bits":
        name = "llama-3-8b-gptq"
        forms = {n: form for n, form in likely_forms(model_named(name)).items() if ".31." not in n}
    config = EngineConfig("", "", adapter_pool_bytes=pool_bytes(model_named(name), 8))
    monkeypatch.setattr(kernel_trace, "_trace_batches", lambda *_: iter(()))
    monkeypatch.setattr(device_step, "graph_sizes", lambda _: (1, 64, 256))
    monkeypatch.setattr(device_step, "mixed_sizes", lambda _: (64, 1024))
    of_each_kind = Model.layers_of_each_kind

    def few(model: Model, kv: KVCache) -> tuple[int, ...]:
        layers = of_each_kind(model, kv)
        assert len(layers) < model.config.num_layers / 2
        return layers

    def every(model: Model, kv: KVCache) -> tuple[int, ...]:
        return tuple(range(model.config.num_layers))

    found = []
    for layers in (few, every):
        monkeypatch.setattr(Model, "layers_of_each_kind", layers)
        found.append(trace_kernels(config, model_named(name), torch.bfloat16, 4096, HOPPER, forms))
    assert found[0] == found[1]


def test_layers_in_other_forms_are_in_the_list() -> None:
    """A base whose last layers are dequantized, or have zero points."""
    model, config = model_named("llama-3-8b-gptq"), EngineConfig("", "", adapter_pool_bytes=0)
    every = likely_forms(model)
    last = {name: form for name, form in every.items() if ".31." in name}
    some = every.items() - last.items()
    found = {
        kind: trace_kernels(config, model, torch.bfloat16, 4096, HOPPER, forms)
        for kind, forms in {
            "all": every,
            "none": {},
            "some": dict(some),
            "zeros": dict(some) | {n: replace(form, has_zeros=True) for n, form in last.items()},
        }.items()
    }
    assert found["some"] == found["all"] | found["none"]
    assert found["zeros"] > found["all"]


def test_ranks_that_dequantize_what_is_sorted_find_their_kernels() -> None:
    """They cannot cut the columns of o and down in 4 bits if these are sorted by their groups."""
    model = replace(model_named("llama-3-8b-gptq"), num_layers=2)
    model = replace(model, sliding_windows=model.sliding_windows[:2], ropes=model.ropes[:2])
    config = EngineConfig("", "", adapter_pool_bytes=0, quantization="auto", tensor_parallel_size=2)

    def listed(forms: Int4Forms) -> frozenset[KernelCall]:
        return trace_kernels(config, model, torch.bfloat16, 4096, HOPPER, forms)

    possible = possible_forms(config, model, torch.bfloat16, HOPPER)
    warm = frozenset[KernelCall]().union(*map(listed, possible))
    cut = ("o_proj.weight", "down_proj.weight")
    kept = {
        name: replace(form, has_order=True)
        for name, form in likely_forms(model, 2).items()
        if not name.endswith(cut)
    }
    found = listed(kept)
    assert "kernels.triton_linear_few._linear_few_kernel" in names(found)
    assert found <= warm


def test_a_warm_up_leaves_out_adapters_that_the_host_has_no_room_for() -> None:
    sizes = [make_pool().pack(make_adapter(name)).num_bytes for name in "ab"]
    for limit, wanted in ((sum(sizes), ["a", "b"]), (sum(sizes) - 1, ["b"]), (sizes[0] - 1, [])):
        pool = make_pool(host_bytes=limit)
        assert insert_those_that_fit(pool, [make_adapter("a"), make_adapter("b")]) == wanted


def test_an_engine_without_adapters_needs_no_kernels_for_them() -> None:
    without = traced("llama-3-8b", num_pages=0)
    assert not [name for name in names(without) if "lora" in name]
    assert without < traced("llama-3-8b")


def test_the_kernels_follow_the_device_and_the_type() -> None:
    assert "kernels.gluon_prefill_attention._prefill_kernel" in names(traced("llama-3-8b"))
    older = names(traced("llama-3-8b", capability=AMPERE))
    assert "kernels.triton_prefill_attention._prefill_kernel" in older
    assert not [name for name in older if "gluon" in name]
    wide = names(traced("llama-3-8b", dtype=torch.float32))
    assert "kernels.triton_linear_few._linear_few_kernel" not in wide


def test_calls_survive_their_way_to_another_process() -> None:
    for call in traced("llama-3-8b"):
        assert KernelCall.from_json(json.loads(json.dumps(call.to_json()))) == call


def test_options_keep_the_order_of_the_launch() -> None:
    """Triton's key in memory holds the text of the options: in another order, the first launch
    would read the kernel from the disk again."""
    for call in traced("llama-3-8b"):
        if call.name == "_rope_kv_write_kernel":
            assert [name for name, _ in call.options] == [
                "num_warps", "launch_pdl", "enable_fp_fusion"
            ]  # fmt: skip


def test_integers_stand_for_all_of_their_kind() -> None:
    from kernels.kernel_call import describe_call

    words, longs = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)

    def described(page: int) -> KernelCall:
        return describe_call(copy_words, (words, longs, page), {"WORDS": 2048})

    assert described(3) == described(16) == described(1)
    assert described(3) != described(2**40)
    assert described(3).arguments[:2] == (Pointer("int32"), Pointer("int64"))
    shifted = describe_call(copy_words, (words[1:], longs, 3), {"WORDS": 2048})
    assert shifted.arguments[0] == Pointer("int32", is_aligned=False)


def test_the_quick_key_of_a_call_names_its_binary() -> None:
    """Whatever the kernel specializes: `describe_call` follows Triton's own rules."""
    from kernels.gluon_attention import describe_rows
    from kernels.gluon_prefill_attention import _prefill_kernel
    from kernels.kernel_call import binary_key, describe_call

    words, half = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.bfloat16)
    caches = [torch.zeros(4, page, 2, 64, dtype=torch.bfloat16) for page in (16, 32)]
    tables = [words, words[1:]]
    sinks = [None, half, half[1:]]
    calls = [
        (q, rows, rows, q, work, words, tiles, 4, words, words, table, stride, 0.5, sink)
        for q in (half, words)
        for rows in (describe_rows(cache, 128) for cache in caches)
        for work in tables
        for tiles in (1, 7, 2**40)
        for table in tables
        for stride in (1, 2, 16, 24, 2**40, 2**40 + 8)
        for sink in sinks
    ]
    found: dict[object, set[object]] = {}
    for arguments in calls:
        described = describe_call(_prefill_kernel, arguments, {})
        found.setdefault(binary_key(_prefill_kernel, arguments), set()).add(described)
    assert all(len(described) == 1 for described in found.values())
    assert len({one for described in found.values() for one in described}) == len(found)

    def constant(value: object) -> tuple[object, ...]:
        return binary_key(copy_words, (words, words, 3, value))

    assert len({constant(value) for value in (32, 48, 0.0, 1.0, None, True)}) == 6


# -- the cache ----------------------------------------------------------------------------------

SMALL = ("_silu_mul_kernel", "_gather_embedding_kernel")
_SCRIPT = """
import json, sys
from pathlib import Path
from kernels.kernel_cache import use_cache
from kernels.kernel_call import KernelCall
from kernels.kernel_compiler import compile_all, missing_calls, targeted
cache, does_compile, lines = sys.argv[1], sys.argv[2] == "True", json.loads(sys.argv[3])
calls = [KernelCall.from_json(line) for line in lines]
done = []
with targeted((9, 0)):
    missing = missing_calls(calls) if use_cache(cache) else ()
    failures = ()
    if does_compile:
        failures = compile_all(missing, (9, 0), Path(cache), lambda: done.append(1), 2)
        assert len(done) == len(missing)
    left = missing_calls(missing) if does_compile else missing
print(json.dumps([len(missing), [failure.reason for failure in failures], len(left)]))
"""


@dataclass(frozen=True, slots=True)
class Found:
    num_missing: int
    failures: tuple[str, ...]
    num_left: int
    log: str


def in_new_process(cache: Path, calls: list[KernelCall], *, compiles: bool = False) -> Found:
    """A process reads a kernel from the disk once: only a new one looks again."""
    lines = json.dumps([call.to_json() for call in calls])
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(cache), str(compiles), lines],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    num_missing, failures, num_left = json.loads(ended.stdout)
    return Found(num_missing, tuple(failures), num_left, ended.stderr)


def small_calls() -> list[KernelCall]:
    return sorted(
        (call for call in traced("llama-3-8b") if call.name in SMALL), key=lambda call: call.name
    )


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("kernels")
    found = in_new_process(cache, small_calls(), compiles=True)
    assert (found.num_missing, found.failures) == (2, ())
    return cache


def test_another_process_finds_what_was_compiled_here_without_a_gpu(filled: Path) -> None:
    assert in_new_process(filled, small_calls()).num_missing == 0
    other = replace(small_calls()[0], options=(("launch_pdl", True), ("num_warps", 8)))
    assert in_new_process(filled, [other]).num_missing == 1


def test_the_cache_can_be_carried_to_another_folder(filled: Path, tmp_path: Path) -> None:
    shutil.copytree(filled, tmp_path / "carried")
    assert in_new_process(tmp_path / "carried", small_calls()).num_missing == 0


def test_damaged_entries_are_compiled_again(tmp_path: Path) -> None:
    """Each of four entries is damaged in another way: cut, emptied, removed, with a group that is
    none."""
    cache = tmp_path / "damaged"
    wide = [replace(call, options=(*call.options, ("num_stages", 1))) for call in small_calls()]
    calls = [*small_calls(), *wide]
    assert in_new_process(cache, calls, compiles=True).num_missing == 4
    cut, emptied, removed, grouped = cache.rglob("*.cubin")
    cut.write_bytes(cut.read_bytes()[:-100])
    emptied.with_suffix(".json").write_bytes(b"")
    removed.unlink()
    (group,) = grouped.parent.glob("__grp__*")
    group.write_text('["not a group"]')
    assert in_new_process(cache, calls, compiles=True).num_missing == 4
    assert in_new_process(cache, calls).num_missing == 0


def test_entries_of_another_program_are_compiled_again_without_a_word(tmp_path: Path) -> None:
    """~/.triton/cache is that of all programs, whose manager stores paths and no digests."""
    assert in_new_process(tmp_path, small_calls(), compiles=True).num_missing == 2
    for group in tmp_path.rglob("__grp__*"):
        paths = {path.name: str(path) for path in group.parent.iterdir() if path != group}
        group.write_text(json.dumps({"child_paths": paths}))
    found = in_new_process(tmp_path, small_calls(), compiles=True)
    assert found.num_missing == 2
    assert "kernel cache" not in found.log
    assert in_new_process(tmp_path, small_calls()).num_missing == 0


def test_processes_share_a_folder_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = in_new_process(tmp_path / "file" / "kernels", small_calls(), compiles=True)
    assert (found.num_missing, found.failures, found.num_left) == (2, (), 0)
    assert found.log.count("cannot be written") == 1


def test_a_kernel_that_cannot_be_compiled_fails_alone(tmp_path: Path) -> None:
    good, other = small_calls()
    bad = replace(other, options=(*other.options, ("num_wraps", 4)))
    found = in_new_process(tmp_path, [bad, good], compiles=True)
    assert len(found.failures) == 1
    assert "num_wraps" in found.failures[0]
    assert in_new_process(tmp_path, [good]).num_missing == 0


def test_hashes_of_kernels_do_not_depend_on_their_order() -> None:
    """Triton's own do: inner functions that were hashed before count in full, others do not."""
    script = """
import sys, json
from importlib import import_module
from kernels.triton_launch import fix_cache_key
keys = {}
for name in json.loads(sys.argv[1]):
    module, _, kernel = name.rpartition(".")
    found = getattr(import_module(module), kernel)
    fix_cache_key(found)
    keys[name] = found.cache_key
print(json.dumps(keys))
"""
    listed = sorted(names(traced("llama-3-8b")))
    found = [
        subprocess.run(
            [sys.executable, "-c", script, json.dumps(order)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        ).stdout
        for order in (listed, listed[::-1])
    ]
    first, second = (json.loads(text) for text in found)
    assert first == second
    assert len(first) == len(listed)
