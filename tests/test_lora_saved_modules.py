"""Saved heads and embeddings become LoRA rows, and the engine then computes what PEFT does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from engine.checks.parity import check_parity, measure_parity
from engine.checks.validation import ConversionLimits, convert_adapter, read_checked
from engine.model_config import read_model_config
from lora.adapter import WEIGHTS_FILE
from lora.errors import AdapterError
from lora.low_rank import Conversion
from tests.engine_helpers import VOCAB, load_hf, make_adapter, make_base, make_runner, random_prompt
from tests.peft_kinds import LINEARS, check_against_peft

HEAD, EMBEDDING = "lm_head", "embed_tokens"
ROWS = sorted(set(random_prompt(26, seed=5)))[::2]  # of the prompt, and likely answers


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {
        "untied": make_base(folder / "untied"),
        "tied": make_base(folder / "tied", tie_word_embeddings=True),
    }


def save_modules(
    folder: Path,
    base: Path,
    modules: tuple[str, ...],
    rows: list[int],
    copies: bool = False,
    **fields: object,
) -> Path:
    """Saves an adapter of PEFT's in which these rows of the saved modules are trained. `copies`:
    with the head and the embedding under their own names, too."""
    torch.manual_seed(1)
    values: dict[str, object] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(LINEARS),
        "modules_to_save": list(modules),
        "init_lora_weights": False,
    }
    model = get_peft_model(load_hf(base), LoraConfig(**values | fields))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter[rows] += 0.1 * torch.randn(len(rows), parameter.shape[1])
            elif "lora_" in name:
                parameter.normal_(std=0.08)
    model.save_pretrained(str(folder), save_embedding_layers=copies or "auto")
    return folder


def convert(
    folder: Path, base: Path, limits: ConversionLimits | None = None
) -> tuple[Path, Conversion]:
    out = folder.parent / f"{folder.name}-converted"
    out.mkdir()
    made = convert_adapter(folder, base, out, limits or ConversionLimits(1e-3))
    assert made is not None
    return out, made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tying", ["untied", "tied"])
@pytest.mark.parametrize("modules", [(HEAD,), (EMBEDDING,), (HEAD, EMBEDDING)])
@pytest.mark.parametrize("form", ["few rows", "all rows"])
def test_tokens_and_logits_are_pefts(
    tying: str, modules: tuple[str, ...], form: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases[tying]
    rows = ROWS if form == "few rows" else list(range(VOCAB))
    kind = save_modules(tmp_path / "kind", base, modules, rows)
    # Fewer ranks than rows: the difference is factored; 48 columns have no more than 48 ranks.
    limits = ConversionLimits(1e-5, max_rank=48)
    out, made = convert(kind, base, limits)
    assert made.rank == (len(rows) if form == "few rows" else 48)
    assert made.error < 1e-5
    assert made.kind.startswith("saved ")
    lora = make_adapter(tmp_path / "lora", base, rank=4, targets=("q_proj", "up_proj"))
    check_against_peft(make_runner(base), base, kind, lora, converted=out)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fields", [{"use_rslora": True}, {"bias": "lora_only"}, {}])
def test_other_fields_of_the_adapter_keep_their_meaning(
    fields: dict[str, object], bases: dict[str, Path], tmp_path: Path
) -> None:
    more: dict[str, object] = {
        "target_modules": r".*\.(q_proj|up_proj|v_proj)",
        "exclude_modules": ["v_proj"],
        "rank_pattern": {"up_proj": 7},
        "alpha_pattern": {".*q_proj": 3},
    }
    base = bases["untied"]
    kind = save_modules(tmp_path / "kind", base, (HEAD, EMBEDDING), ROWS, **more | fields)
    out, _ = convert(kind, base)
    check_parity(out, base, 1)
    found = measure_parity(out, kind, base, [random_prompt(40, seed=2)])
    assert found.max_difference < 3e-4
    assert found.num_prompts == 2  # the second has the tokens whose rows are changed


@pytest.mark.parametrize("tying", ["untied", "tied"])
@pytest.mark.parametrize("modules", [(HEAD,), (EMBEDDING,), (HEAD, EMBEDDING)])
def test_module_that_peft_writes_twice_is_read_once(
    tying: str, modules: tuple[str, ...], bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases[tying]
    kind = save_modules(tmp_path / "kind", base, modules, ROWS, copies=True)
    names = [name for name in load_file(kind / WEIGHTS_FILE) if ".modules_to_save.weight" in name]
    assert len(names) == len(modules)
    out, made = convert(kind, base)
    assert made.rank == len(ROWS)
    read_checked(out, "", base, read_model_config(base))
    found = measure_parity(out, kind, base, [random_prompt(40, seed=2)])
    assert found.max_difference < 3e-4
    spoil(kind, names[0], load_file(kind / WEIGHTS_FILE)[names[0]] + 1)
    with pytest.raises(AdapterError, match=r"twice with other numbers: .*save_embedding_layers=F"):
        convert_adapter(kind, base, tmp_path, ConversionLimits(1e-3))


def test_module_that_equals_the_bases_is_left_out_with_a_note(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases["untied"]
    kind = save_modules(tmp_path / "kind", base, (HEAD,), [], use_dora=True)
    out, made = convert(kind, base)
    assert made.words == ""
    assert made.notes == ("the saved lm_head equals the base's: it is left out",)
    assert not [key for key in load_file(out / "adapter_model.safetensors") if "lm_head" in key]
    make_runner(base).load_adapter("kind", out)


def test_difference_of_too_many_ranks_is_refused_with_its_error(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases["untied"]
    kind = save_modules(tmp_path / "kind", base, (HEAD,), list(range(VOCAB)))
    with pytest.raises(
        AdapterError,
        match=r"saved lm_head differs .* more than 8 rows, and as LoRA"
        r" lm_head needs .*; at rank 8, .* \(--max-error\)",
    ):
        convert(kind, base, ConversionLimits(1e-3, max_rank=8))
    out = tmp_path / "rough"
    out.mkdir()
    made = convert_adapter(kind, base, out, ConversionLimits(0.9, max_rank=8))
    assert made is not None
    assert 0 < made.error <= 0.9


def test_rows_beyond_the_bytes_allowed_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["untied"]
    kind = save_modules(tmp_path / "kind", base, (HEAD, EMBEDDING), ROWS)
    needed = 2 * 2 * len(ROWS) * (VOCAB + 48)  # two modules, of numbers of two bytes
    with pytest.raises(
        AdapterError, match=rf"0\.\d+[1-9]\d* \(--max-saved-mib\): lm_head .*\(rank {len(ROWS)}"
    ):
        convert(kind, base, ConversionLimits(1e-3, max_bytes=needed - 1))
    out = tmp_path / "enough"
    out.mkdir()
    assert convert_adapter(kind, base, out, ConversionLimits(1e-3, max_bytes=needed)) is not None


def test_memory_is_checked_before_the_module_is_read(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = save_modules(tmp_path / "kind", bases["untied"], (HEAD,), ROWS)
    monkeypatch.setattr("engine.checks.validation.available_bytes", lambda: 100_000)
    with pytest.raises(
        AdapterError, match=r"factor the saved lm_head of shape \[131, 48\], .* GiB"
    ):
        convert(kind, bases["untied"])


def spoil(folder: Path, key: str, tensor: torch.Tensor | None) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {**load_file(path), key: tensor}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


HEAD_KEY = "base_model.model.lm_head.weight"
SPOILED: dict[str, tuple[torch.Tensor | None, str]] = {
    "missing": (None, "modules_to_save names lm_head, the file has no weight of it"),
    "of an extended vocabulary": (torch.ones(140, 48), r"shape \[140, 48\], the base has \[131, 4"),
    "not a number": (torch.full((VOCAB, 48), torch.nan), "saved lm_head holds NaN"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_saved_module_that_does_not_fit_is_refused(
    name: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    kind = save_modules(tmp_path / "kind", bases["untied"], (HEAD,), ROWS)
    tensor, reason = SPOILED[name]
    spoil(kind, HEAD_KEY, tensor)
    with pytest.raises(AdapterError, match=reason):
        convert(kind, bases["untied"])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"modules_to_save": ["lm_head", "norm"]}, r"whole modules \(norm\), which is not supp"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is not a list"),
        ({"modules_to_save": ["score"], "task_type": "SEQ_CLS"}, "only adapters of models that ge"),
        ({"use_dora": True}, "has use_dora and saves lm_head"),
        ({"alora_invocation_tokens": [5]}, "has alora_invocation_tokens and saves lm_head"),
    ],
)
def test_configuration_that_is_not_served_is_refused(
    fields: dict[str, object], reason: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    kind = save_modules(tmp_path / "kind", bases["untied"], (HEAD,), ROWS)
    path = kind / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(AdapterError, match=reason):
        convert(kind, bases["untied"])


def test_plain_loading_names_the_conversion(bases: dict[str, Path], tmp_path: Path) -> None:
    kind = save_modules(tmp_path / "kind", bases["untied"], (HEAD,), ROWS)
    with pytest.raises(AdapterError, match="register adapter converts lm_head and embed_tokens"):
        make_runner(bases["untied"]).load_adapter("kind", kind)
