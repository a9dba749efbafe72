"""The estimate of a base's memory, and what `register base` and `doctor --base` say of it."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from engine.checkpoint import Checkpoint
from engine.checks.fit import RESERVED_BYTES, estimate_fit
from engine.config import EngineConfig
from engine.errors import UnsupportedModelError
from engine.int4_forms import stored_forms
from engine.kv_cache import block_bytes
from engine.kv_layout import kv_layout, num_uncommitted
from engine.memory_plan import GIB
from engine.model_config import read_model_config
from engine.parallel.shards import Shard
from engine.tools.gguf import convert_gguf
from engine.weight_files import SINGLE_FILE
from engine.weights import WeightBuilder
from serve_app.cli import main as cli
from serve_app.cli.commands.gguf_file import as_outline
from serve_app.cli.commands.store import open_registry
from tests.engine_helpers import make_base
from tests.gguf_files import write_gguf
from tests.int4_bases import write_int4
from tests.quantized_bases import write_quantized
from tests.registry_helpers import empty_home
from tests.test_engine_gptq_awq import AWQ, awq

META = torch.device("meta")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return empty_home(tmp_path / "home", monkeypatch)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_are_those_that_are_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    folder, _ = write_quantized(make_base(tmp_path / "base"), tmp_path / "quantized", AWQ, awq)
    config = read_model_config(folder)
    parameters = WeightBuilder(Shard(config), dtype, torch.device("cpu")).load(folder).parameters
    held = sum(one.numel() * one.itemsize for one in parameters.values())
    assert WeightBuilder(Shard(config), dtype, META).weights.nbytes == held
    fit = estimate_fit(folder, 4 * GIB)
    assert fit.stored_bytes == (folder / SINGLE_FILE).stat().st_size
    assert fit.stored_as == "awq gemm, 4 bits in groups of 16 (21 modules)"


@pytest.mark.parametrize("name", ["gptq, sorted", "awq", "packed per channel, asymmetric"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_quantized_bases_are_those_that_are_loaded(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    folder = write_int4(tmp_path, name)[1]
    config, cpu = read_model_config(folder), torch.device("cpu")
    forms, _ = stored_forms(config, Checkpoint(folder, config))
    some = {key: form for key, form in forms.items() if "layers.0" in key}
    for int4, is_fp8 in ((forms, False), (some, False), (some, True), ({}, True)):
        weights = WeightBuilder(Shard(config), dtype, cpu, int4=int4, is_fp8=is_fp8).load(folder)
        layers = (
            one
            for layer in weights.layers
            for one in (getattr(layer, field.name) for field in fields(layer))
            if one is not None
        )
        held = sum(one.nbytes for one in (weights.embedding, weights.head, weights.norm, *layers))
        shapes = WeightBuilder(Shard(config), dtype, META, int4=int4, is_fp8=is_fp8).weights
        assert shapes.nbytes == held


def test_a_base_in_4_bits_leaves_more_room(tmp_path: Path) -> None:
    folder = write_int4(tmp_path, "gptq, sorted")[1]
    kept, wide = estimate_fit(folder, 4 * GIB, "auto"), estimate_fit(folder, 4 * GIB)
    assert kept.weight_bytes < wide.weight_bytes
    assert kept.served_as == (
        "4 bits in 8 of 8 matrices, the rest bfloat16, Triton's kernels of 4 bits up to 256 "
        "tokens, cuBLAS beyond"
    )
    assert wide.served_as == "dequantized to bfloat16, Triton's and cuBLAS' kernels"
    in_fp8 = estimate_fit(folder, 4 * GIB, "fp8")
    assert kept.weight_bytes < in_fp8.weight_bytes < wide.weight_bytes
    assert in_fp8.served_as.startswith("FP8 e4m3, the rest bfloat16")
    assert "dequantized" not in kept.facts()


def test_more_memory_has_room_for_more(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "base")
    small, large = estimate_fit(folder, 4 * GIB), estimate_fit(folder, 8 * GIB)
    narrow = estimate_fit(folder, 8 * GIB, kv_cache_dtype="fp8")
    assert narrow.kv_tokens == pytest.approx(2 * large.kv_tokens, rel=1e-3)
    assert small.fits
    assert large.kv_tokens > small.kv_tokens > 0
    assert large.num_adapters >= small.num_adapters > 0
    assert not estimate_fit(folder, RESERVED_BYTES).fits
    assert "nothing is left for KV" in estimate_fit(folder, RESERVED_BYTES).facts()["fits"]


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(261, 8192), (260, 6656), (0, 0)])
def test_a_long_sequence_needs_the_blocks_of_steps_planned_ahead_and_the_null_block(
    tmp_path: Path, num_blocks: int, num_tokens: int
) -> None:
    """A window of 64 tokens and two steps of 2048 lie in 261 blocks of 16; in 260, 52 of 128."""
    base = make_base(tmp_path / "base", "mistral", sliding_window=64, max_position_embeddings=8192)
    config, large = read_model_config(base), estimate_fit(base, 8 * GIB)
    layout = kv_layout(config.sliding_windows, 16, 8192)
    needed = RESERVED_BYTES + large.weight_bytes + large.num_adapters * large.adapter_bytes
    needed += (num_blocks + 1) * block_bytes(config, layout, torch.bfloat16)
    fit = estimate_fit(base, math.ceil(needed / EngineConfig("", "").gpu_memory_utilization) + 1)
    assert fit.num_adapters == large.num_adapters
    assert layout.blocks_needed(8192, num_uncommitted(2048, runs_ahead=True)) == 261
    assert fit.kv_tokens == num_tokens
    assert fit.fits == bool(num_tokens)


def test_ranks_share_a_base(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_base(tmp_path / "base")
    config, dtype = read_model_config(folder), torch.bfloat16
    whole, half = estimate_fit(folder, 4 * GIB), estimate_fit(folder, 4 * GIB, num_ranks=2)
    assert half.kv_tokens > whole.kv_tokens
    assert half.weight_bytes < whole.weight_bytes
    shard = Shard(config, 1, 2)
    held = WeightBuilder(shard, dtype, torch.device("cpu")).load(folder).parameters
    estimated = WeightBuilder(shard, dtype, META).weights.nbytes
    assert estimated == sum(one.nbytes for one in held.values())
    assert run("doctor", "--base", str(folder), "--memory", "80", "--ranks", "2") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "on each of 2 ranks" in said
    assert run("doctor", "--base", str(folder), "--memory", "80", "--ranks", "4") == 1
    assert "does not divide num_attention_heads 6" in " ".join(capsys.readouterr().out.split())
    asked = ("--base", str(folder), "--memory", "80", "--ranks", "2", "--quantization", "fp8")
    assert run("doctor", *asked) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "shape [40, 48] on each of 2 ranks, and FP8 products need multiples of 16" in said
    wide = make_base(tmp_path / "wide", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    more = ("--lora-dtype", "int8", "--kv-cache-dtype", "fp8")
    assert run("doctor", "--base", str(wide), *asked[2:], *more) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "FP8 e4m3, the rest bfloat16" in said
    assert "on each of 2 ranks" in said
    assert run("doctor", "--ranks", "4") == 1
    assert "--base FOLDER" in capsys.readouterr().err


def test_a_base_that_is_refused_is_refused_here(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "base")
    (folder / SINGLE_FILE).write_bytes(b"no header")
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        estimate_fit(folder)


def test_doctor_tells_of_a_base_before_it_is_loaded(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = write_quantized(make_base(tmp_path / "base"), tmp_path / "quantized", AWQ, awq)
    asked = ("--memory", "80", "--quantization", "auto")
    assert run("doctor", "--base", str(folder), *asked) == 0
    said = capsys.readouterr().out
    assert "awq gemm, 4 bits in groups of 16 (21 modules)" in said
    assert "dequantized to bfloat16" in said
    assert "tokens of KV" in said
    assert "kernels read groups of 32, 64, 128" in " ".join(said.split())
    assert run("doctor", "--base", str(folder), "--memory", "80", "--quantization", "fp8") == 0
    assert "FP8 e4m3, the rest bfloat16" in capsys.readouterr().out
    assert run("doctor", "--base", str(folder), "--quantization", "int8") == 1
    assert "--quantization is int8: known are auto, none, fp8, int4" in capsys.readouterr().err
    assert run("doctor", "--base", str(folder), "--memory", "1") == 1
    assert "nothing is left for KV" in capsys.readouterr().out
    asked = ("--memory", "80", "--kv-cache-dtype")
    assert run("doctor", "--base", str(folder), *asked, "fp8") == 0
    assert "tokens of KV in FP8" in " ".join(capsys.readouterr().out.split())
    assert run("doctor", "--base", str(folder), *asked, "fp4") == 1
    assert "--kv-cache-dtype is fp4: known are auto, fp8" in capsys.readouterr().err
    (folder / "config.json").unlink()
    assert run("doctor", "--base", str(folder)) == 1
    assert "no config.json" in capsys.readouterr().out
    assert run("doctor", "--kv-cache-dtype", "fp8") == 1
    assert "--kv-cache-dtype is fp8: it is for --base FOLDER" in capsys.readouterr().err
    assert run("doctor", "--quantization", "fp8") == 1
    assert "--base FOLDER" in capsys.readouterr().err
    assert run("doctor", "--memory", "80") == 1
    assert "--base FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])  # some norms of Gemma's are float32
def test_the_fit_of_a_gguf_file_is_that_of_the_converted_base(
    tmp_path: Path, architecture: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", architecture, ("Q4_K", "Q6_K"), hidden=256)
    types = convert_gguf(path, tmp_path / "converted")
    converted = estimate_fit(tmp_path / "converted", 4 * GIB)
    with as_outline(path) as (folder, outlined):
        fit = estimate_fit(folder, 4 * GIB)
        assert (folder / SINGLE_FILE).stat().st_blocks * 512 < 64 * 1024  # no bytes of weights
    assert not folder.exists()
    assert outlined == types
    assert replace(fit, stored_bytes=0) == replace(converted, stored_bytes=0)
    # The headers differ in their padding.
    assert abs(fit.stored_bytes - converted.stored_bytes) < 4096


def test_doctor_of_a_gguf_file_says_whether_the_base_fits_and_makes_nothing(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "tiny-Q8_0.gguf")
    before = set(tmp_path.rglob("*"))
    assert run("doctor", "--base", str(path), "--memory", "80", "--json") == 0
    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    made_of = "plain weights in bfloat16, converted from Q8_0 (15 tensors), F32 (5 tensors)"
    assert found["stored as"]["words"].startswith(made_of)
    assert found["fits"]["state"] == "ok"
    assert run("doctor", "--base", str(path), "--memory", "0.1") == 1
    assert "nothing is left for KV" in capsys.readouterr().out
    assert set(tmp_path.rglob("*")) == before


def test_a_gguf_file_is_registered_by_its_path(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "tiny-Q8_0.gguf")
    assert run("register", "base", str(path), "--name", "tiny") == 0
    said = capsys.readouterr().out
    assert "plain weights in bfloat16, converted from Q8_0 (15 tensors), F32 (5 tensors)" in said
    version = open_registry(None).snapshot().resolve("tiny").base
    assert version.architecture == "LlamaForCausalLM"
    assert "tiny-q8_0" in version.known_as
    assert not list(home.glob(".gguf.*"))
    other = write_gguf(tmp_path / "other.gguf", "falcon")
    assert run("register", "base", str(other), "--name", "other") == 1
    assert "general.architecture is 'falcon'" in capsys.readouterr().err
    assert not list(home.glob(".gguf.*"))
