"""The check of an adapter's effect, with Hugging Face + PEFT as the oracle of the logits."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from engine.checks.effect import examine, plan_probe
from engine.checks.effect_report import EffectReport, LogitChange, ModuleNorm, ProbePlan, judge
from engine.errors import EngineMemoryError, UnsupportedModelError
from engine.host_memory import available_bytes
from lora.adapter import ModuleWeights
from tests.engine_helpers import VOCAB, hf_logits, load_hf, make_adapter, make_base, random_prompt
from tests.peft_kinds import save_peft
from tests.test_engine_alora import make_alora

ATTENTION = ("q_proj", "v_proj")
EVERYTHING = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("lm_head", "embed_tokens"),
)
PROMPTS = (random_prompt(9, seed=1), random_prompt(21, seed=2))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def check(
    adapter: Path, base: Path, prompts: tuple[list[int], ...] | None = PROMPTS
) -> EffectReport:
    return examine(adapter, "digest", base, plan_probe(base, "cpu"), prompts, "nobody asked")


def change_weights(adapter: Path, name_part: str, factor: float) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({k: v * (factor if name_part in k else 1) for k, v in tensors.items()}, path)


def logits_of(report: EffectReport) -> LogitChange:
    assert report.logits is not None
    return report.logits


# -- the norm of the delta ---------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "wide", "tall"), [(1, 7, 5), (8, 48, 33), (64, 40_000, 24)])
def test_norm_is_that_of_the_product_which_is_never_made(rank: int, wide: int, tall: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(rank, wide, generator=generator)
    b = torch.randn(rank, tall, generator=generator)
    product = b.double().T @ a.double()
    assert ModuleWeights(a, b).delta_norm() == pytest.approx(float(product.norm()), rel=1e-9)


def test_norm_of_halves_that_never_meet_is_zero() -> None:
    """Neither is zero, their product is."""
    a = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    b = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert ModuleWeights(a, b).delta_norm() == 0


def test_norms_are_those_of_pefts_own_delta_weights(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base, rank=5, targets=EVERYTHING)
    report = check(folder, base)
    model = PeftModel.from_pretrained(load_hf(base), str(folder))
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert {norm.module for norm in report.norms} == layers.keys()
    for norm in report.norms:
        layer = layers[norm.module]
        delta = layer.get_delta_weight("default").detach()
        assert norm.delta == pytest.approx(float(delta.norm()), rel=1e-5)
        weight = layer.get_base_layer().weight.detach()
        assert norm.base == pytest.approx(float(weight.norm()), rel=1e-5)
    by_hand = math.hypot(*(n.delta for n in report.norms if n.site == "model.layers.1.qkv"))
    assert report.sites["model.layers.1.qkv"] == pytest.approx(by_hand)
    assert report.delta_norm == pytest.approx(math.hypot(*report.sites.values()))


# -- the logits --------------------------------------------------------------------------------


def test_adapter_with_an_invocation_is_measured_where_it_is_active(
    base: Path, tmp_path: Path
) -> None:
    """One prompt has the tokens; the other gets them in its middle."""
    invocation = [91, 17]
    folder = make_alora(tmp_path / "adapter", base, invocation, seed=3)
    first, second = random_prompt(9, seed=1), random_prompt(20, seed=2)
    invoked = [*first[:5], *invocation, *first[5:]]
    report = check(folder, base, (invoked, second))
    plain = load_hf(base)
    prompts = (invoked, [*second[:10], *invocation, *second[10:]])
    before = [hf_logits(plain, prompt) for prompt in prompts]
    adapted = PeftModel.from_pretrained(plain, str(folder)).eval()
    after = [hf_logits(adapted, prompt) for prompt in prompts]
    changes = [(y - x)[start:].abs() for x, y, start in zip(before, after, (5, 10), strict=True)]
    found = logits_of(report)
    assert found.num_positions == 6 + 12
    assert found.max_delta == pytest.approx(max(float(c.max()) for c in changes), rel=1e-3)
    mean = float(torch.cat(changes).mean())
    assert found.mean_delta == pytest.approx(mean, rel=1e-3)
    assert report.kind == "aLoRA"
    assert report.cost == (
        "rank 20: a prompt token is charged 6.8% more than the base's, an output token 20.0%, from "
        "its invocation on; the tokens before are the base's and share its KV blocks"
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("targets", [ATTENTION, EVERYTHING])
def test_change_of_the_logits_is_that_of_peft(
    family: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", family)
    folder = make_adapter(tmp_path / "adapter", base, rank=4, targets=targets)
    found = logits_of(check(folder, base))
    plain = load_hf(base)
    before = torch.cat([hf_logits(plain, prompt) for prompt in PROMPTS])
    adapted = PeftModel.from_pretrained(plain, str(folder)).eval()
    after = torch.cat([hf_logits(adapted, prompt) for prompt in PROMPTS])
    kl = torch.nn.functional.kl_div(
        after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert (found.num_prompts, found.num_positions, found.num_non_finite) == (2, 30, 0)
    assert found.max_delta == pytest.approx(float((after - before).abs().max()), rel=1e-3)
    assert found.mean_delta == pytest.approx(float((after - before).abs().mean()), rel=1e-3)
    assert found.mean_kl == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found.max_kl == pytest.approx(float(kl.max()), rel=1e-3)
    changed = (after.argmax(-1) != before.argmax(-1)).double().mean()
    assert found.argmax_changed == pytest.approx(float(changed))
    assert found.noise is None or found.noise < found.max_delta / 100


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "LoRA with biases"),
        ({"use_dora": True, "bias": "all"}, "DoRA with biases"),
    ],
)
def test_kind_is_named_and_its_own_numbers_alone_are_an_effect(
    fields: dict[str, object], kind: str, tmp_path: Path
) -> None:
    """Magnitudes and biases are all that changes anything: B is zero."""
    base = make_base(tmp_path / "base", "qwen2")
    config = LoraConfig(r=2, target_modules=list(ATTENTION), **fields)  # type: ignore[arg-type]
    folder = save_peft(tmp_path / "adapter", base, config, std=0.0)
    report = check(folder, base)
    assert (report.verdict, report.kind, report.unmatched) == ("changes", kind, ())
    assert report.num_matched == len(load_file(folder / "adapter_model.safetensors"))
    adapted = PeftModel.from_pretrained(load_hf(base), str(folder)).eval()
    change = [hf_logits(adapted, p) - hf_logits(load_hf(base), p) for p in PROMPTS]
    largest = float(torch.cat(change).abs().max())
    assert logits_of(report).max_delta == pytest.approx(largest, rel=1e-3)
    assert min(norm.delta for norm in report.norms) > 0


def test_sound_adapter_is_found_to_change_the_logits(base: Path, tmp_path: Path) -> None:
    report = check(make_adapter(tmp_path / "adapter", base, rank=4, targets=ATTENTION), base)
    assert report.verdict == "changes"
    assert (report.num_matched, report.unmatched, report.num_targets) == (12, (), 23)
    assert "30 positions of 2 prompts" in report.reason
    assert report.warnings == ()


def test_adapter_whose_b_is_zero_changes_nothing(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base, rank=4, targets=EVERYTHING)
    for half in ("lora_B", "lora_embedding_B"):
        change_weights(folder, half, 0.0)
    report = check(folder, base)
    assert report.verdict == "none"
    assert report.delta_norm == 0
    found = logits_of(report)
    assert (found.max_delta, found.mean_kl, found.argmax_changed) == (0, 0, 0)


def test_adapter_that_vanishes_in_rounding_changes_nothing(base: Path, tmp_path: Path) -> None:
    """Its delta is not zero, and float32 does not see it."""
    folder = make_adapter(tmp_path / "adapter", base, rank=4, targets=("v_proj",))
    change_weights(folder, "lora_B", 1e-20)
    report = check(folder, base)
    assert report.delta_norm > 0
    assert report.verdict == "none"
    assert "are the base's, bit by bit" in report.reason


def test_faint_adapter_passes_with_a_warning(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base, rank=4, targets=ATTENTION)
    change_weights(folder, "lora_B", 1e-4)
    report = check(folder, base)
    assert report.verdict == "changes"
    assert any("faint" in warning for warning in report.warnings)


def test_module_without_change_and_a_scale_too_large_are_warned_of(
    base: Path, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "adapter", base, rank=4, targets=ATTENTION)
    change_weights(folder, "layers.1.self_attn.q_proj.lora_B", 0.0)
    change_weights(folder, "layers.2.self_attn.v_proj.lora_B", 1000.0)
    silent, loud = check(folder, base).warnings
    assert silent == "no change in 1 of 6 modules: model.layers.1.self_attn.q_proj"
    assert loud.startswith("in 1 of 6 modules the change is larger than the weight itself")
    assert "model.layers.2.self_attn.v_proj" in loud


def test_adapter_that_makes_logits_infinite_is_told_apart(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base, rank=4, targets=("lm_head",))
    change_weights(folder, "lora_", 1e22)
    report = check(folder, base)
    assert report.verdict == "non_finite"
    assert "at 30 of 30 positions" in report.reason


def test_without_prompts_the_base_is_not_run(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base, rank=4, targets=ATTENTION)
    report = check(folder, base, prompts=None)
    assert (report.verdict, report.reason) == ("unprobed", "nobody asked")
    assert (report.logits, report.probe, report.ratio) == (None, None, None)
    assert report.delta_norm > 0
    change_weights(folder, "lora_B", 0.0)
    assert check(folder, base, prompts=None).verdict == "none"


def test_refusal_counts_what_matches_and_what_does_not(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base, rank=4, targets=ATTENTION)
    path = folder / "adapter_model.safetensors"
    renamed = {k.replace("layers.2.", "layers.9."): v for k, v in load_file(path).items()}
    save_file(renamed, path)
    report = check(folder, base)
    assert (report.verdict, report.num_matched, len(report.unmatched)) == ("refused", 8, 4)
    assert "layers.9" in report.reason
    assert all("layers.9" in reason for reason in report.unmatched)
    path.write_bytes(b"no safetensors")
    broken = check(folder, base)
    assert (broken.verdict, broken.num_matched, broken.norms) == ("refused", 0, ())


def test_prompts_the_base_cannot_read_are_refused(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base, rank=4, targets=ATTENTION)
    for prompt in ([], [3, VOCAB]):
        with pytest.raises(UnsupportedModelError, match="probe prompt"):
            check(folder, base, ([5], prompt))


# -- cost --------------------------------------------------------------------------------------


def test_cost_counts_pages_and_bytes(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base, rank=20, targets=ATTENTION)
    cost = check(folder, base, prompts=None).load
    assert cost is not None
    assert (cost.device, cost.dtype, cost.num_pages) == ("cpu", "float32", 2)
    config = json.loads((base / "config.json").read_text())
    q, kv, hidden = 6 * 16, 2 * 16, config["hidden_size"]
    used = 20 * 4 * 3 * (2 * hidden + q + kv)  # no more rows than the rank, no other modules
    assert used <= cost.host_bytes <= used + 16 * 1024
    assert used <= cost.device_bytes <= used + 32 * 1024
    assert cost.read_s > 0
    assert cost.peak_host_bytes is None or cost.peak_host_bytes >= 0


def test_plan_counts_the_base(base: Path) -> None:
    plan = plan_probe(base, "cpu")
    weights = sum(p.numel() for p in load_hf(base).parameters())
    assert (plan.device, plan.dtype, plan.num_parameters) == ("cpu", "float32", weights)
    assert 4 * weights < plan.needed_bytes < plan.available_bytes
    assert plan.fits


def test_base_that_does_not_fit_is_not_loaded(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base, rank=4, targets=ATTENTION)
    plan = ProbePlan("cpu", "float32", 8_030_000_000, 33 * 1024**3, 7 * 1024**3)
    with pytest.raises(EngineMemoryError, match=r"8\.03 billion.*33\.0 GiB.*cpu has 7\.0 free"):
        examine(folder, "digest", base, plan, PROMPTS)


_PEAK = """
import json, sys
from engine.host_memory import peak_of
print(json.dumps(peak_of(lambda: len(bytearray(b"x") * int(sys.argv[1])))))
"""


def test_peak_of_work_is_what_it_holds_at_most() -> None:
    """Measures a new process: the threads of other tests, and pages that the system takes back from
    a large process, would make the peak smaller."""
    size = 64 * 1024**2
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(size)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result, peak = json.loads(done.stdout)
    assert result == size
    assert peak is None or 0.9 * size < peak < 3 * size
    assert available_bytes() > size


def test_noise_of_the_base_is_no_effect() -> None:
    norms = (ModuleNorm("m", "s", 1, 1.0, 1.0),)
    change = LogitChange(1, 5, 0, 1e-4, 1e-5, 1e-9, 1e-8, 0.0, noise=1e-4)
    verdict, reason = judge(norms, change, "")
    assert verdict == "none"
    assert "noise" in reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_base_runs_in_the_type_that_is_served(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base, rank=4, targets=EVERYTHING)
    plan = plan_probe(base)
    assert (plan.device, plan.dtype) == ("cuda", "bfloat16")
    report = examine(folder, "digest", base, plan, PROMPTS)
    assert report.verdict == "changes"
    assert report.load is not None
    assert report.load.device == "cuda"
    exact = logits_of(check(folder, base))
    assert logits_of(report).mean_delta == pytest.approx(exact.mean_delta, rel=0.1)
    assert logits_of(report).mean_kl == pytest.approx(exact.mean_kl, rel=0.2)
