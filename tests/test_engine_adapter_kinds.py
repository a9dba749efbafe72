"""DoRA adapters and adapters with biases beside LoRA and the base, against PEFT in float32."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import pytest
from peft import LoraConfig

from engine.config import EngineConfig
from engine.runner import ModelRunner
from lora.errors import AdapterError
from lora.page_image import AFFINE
from tests.engine_helpers import make_adapter, make_base, make_runner, random_prompt
from tests.peft_kinds import LINEARS, base_logprobs_beside, check_against_peft, save_peft

BASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),  # biases on q, k and v
    "qwen3": ("qwen3", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
}
TOKENS = sorted(set(random_prompt(26, seed=5)))[::2]  # of the prompt, and likely answers
CONFIGS: dict[str, dict[str, object]] = {
    "DoRA": {"use_dora": True},
    "DoRA of some modules and ranks": {
        "use_dora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"down_proj": 20},
        "use_rslora": True,
    },
    "DoRA with all biases": {"use_dora": True, "bias": "all"},
    "lora_bias": {"lora_bias": True},
    "trained biases": {"bias": "lora_only"},
    "all biases, of modules without LoRA too": {
        "bias": "all",
        "target_modules": ["o_proj", "down_proj"],
    },
    "both kinds of biases": {"lora_bias": True, "bias": "lora_only"},
    "trained tokens": {"trainable_token_indices": TOKENS},
    "trained tokens of embedding and head": {
        "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS[:3]},
        "use_dora": True,
    },
}


PAIRS = (
    *(("qwen2", name) for name in CONFIGS),
    ("llama, tied", "trained tokens"),
    *(("llama with biases", name) for name in ("DoRA", "trained biases", "both kinds of biases")),
    *(("llama", name) for name in ("DoRA", "lora_bias")),
    ("qwen3", "DoRA"),
)


@cache
def base_of(family: str) -> Path:
    """Returns a base that the tests of this file share."""
    folder = Path(mkdtemp(prefix="loraplex-test-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    name, changes = BASES[family]
    return make_base(folder / "base", name, **changes)


def make_kind(folder: Path, base: Path, name: str) -> Path:
    fields: dict[str, object] = {"r": 5, "lora_alpha": 7, "target_modules": list(LINEARS)}
    return save_peft(folder, base, LoraConfig(**fields | CONFIGS[name]))  # type: ignore[arg-type]


def load_kind(base: Path, tmp_path: Path, name: str) -> ModelRunner:
    runner = make_runner(base)
    runner.load_adapter("kind", make_kind(tmp_path / "kind", base, name))
    return runner


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_tokens_and_logits_are_pefts_beside_lora_and_the_base(
    family: str, name: str, tmp_path: Path
) -> None:
    base = base_of(family)
    kind = make_kind(tmp_path / "kind", base, name)
    lora = make_adapter(tmp_path / "lora", base, rank=4, targets=LINEARS)
    check_against_peft(make_runner(base), base, kind, lora)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["DoRA", "both kinds of biases"])
def test_row_of_the_base_has_the_same_bits_beside_them(name: str, tmp_path: Path) -> None:
    runner = load_kind(base_of("qwen2"), tmp_path, name)
    assert base_logprobs_beside(runner, "kind") == base_logprobs_beside(runner, None)


def test_engine_without_room_for_affine_rows_refuses_them_and_serves_lora(tmp_path: Path) -> None:
    base = base_of("llama")
    runner = make_runner(base, affine_adapters=False)
    assert EngineConfig("", "").affine_adapters
    with pytest.raises(AdapterError, match="affine_adapters to true"):
        runner.load_adapter("kind", make_kind(tmp_path / "kind", base, "DoRA"))
    runner.load_adapter("lora", make_adapter(tmp_path / "lora", base, 4, ("q_proj",)))
    assert runner.adapters.acquire("lora")


def test_affine_rows_take_their_own_bytes(tmp_path: Path) -> None:
    """One row of gains where the base has no bias, two where it has; pages are of whole blocks."""
    base = base_of("qwen2")
    runner = load_kind(base, tmp_path, "DoRA")
    make_adapter(tmp_path / "lora", base, rank=5, targets=LINEARS)
    dora, lora = (runner.read_adapter(name, tmp_path / name) for name in ("kind", "lora"))
    assert AFFINE in dora.site_kinds
    assert AFFINE not in lora.site_kinds
    assert lora.num_bytes < dora.num_bytes < 1.35 * lora.num_bytes
