"""The effect check from the command to MLflow and back: real tiny models, real stores."""

import asyncio
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest

from engine.checks.effect_report import EffectReport, LogitChange, ModuleNorm, ProbePlan
from registry.cache import Cache
from registry.catalog import Catalog
from registry.client import Registry
from registry.entities import AdapterVersion, BaseVersion, EffectFacts, EffectRecord
from registry.errors import RegistrationError
from serve_app.cli import effect
from serve_app.cli import main as cli
from serve_app.cli.effect import PROBES, tokenize
from serve_app.cli.effect_plot import norms_svg
from serve_app.cli.registration import register_adapter, register_base
from serve_app.control.adapter_checks import AdapterChecks
from serve_app.control.cached_registry import CachedRegistry
from serve_app.text.base_text import BaseText
from tests.registry_helpers import embedded, empty_home
from tests.serve_folders import make_adapter_folder, make_base_folder
from tests.test_registry_server import running_server

SVG = "{http://www.w3.org/2000/svg}"
MEASURED = {
    *("loraplex.delta_norm", "loraplex.max_logit_change", "loraplex.mean_kl"),
    *("loraplex.argmax_changed", "loraplex.pages", "loraplex.device_bytes", "loraplex.load_s"),
    "loraplex.variant",
    "loraplex.checked_s",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return empty_home(tmp_path / "home", monkeypatch)


def uri(home: Path) -> str:
    return f"sqlite:///{home}/mlflow.db"


def tags(tracking_uri: str, name: str, version: int = 1) -> dict[str, str]:
    client = mlflow.MlflowClient(tracking_uri, tracking_uri)
    return dict(client.get_model_version(name, str(version)).tags)


def stored(tracking_uri: str, name: str, file: str, folder: Path) -> bytes:
    """A file of the report, through MLflow as anybody reads it."""
    client = mlflow.MlflowClient(tracking_uri, tracking_uri)
    source = client.get_model_version_download_uri(name, "1")
    got = mlflow.artifacts.download_artifacts(
        f"{source}/effect/{file}", dst_path=str(folder), tracking_uri=tracking_uri
    )
    return Path(got).read_bytes()


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    code = ended.value.code
    return code if isinstance(code, int) else 0


def register(tracking_uri: str, tmp_path: Path, **options: object) -> Registry:
    registry = Registry(tracking_uri)
    folder = tmp_path / "files"
    register_base(registry, make_base_folder(folder / "base"), "tiny")
    adapter = make_adapter_folder(folder / "adapter", rank=4)
    cache = Cache(tmp_path / "cache")
    register_adapter(registry, adapter, "pirate", "tiny", cache=cache, **options)  # type: ignore[arg-type]
    return registry


# -- registration ------------------------------------------------------------------------------


def test_registration_keeps_what_it_measured(home: Path, tmp_path: Path) -> None:
    registry = register(uri(home), tmp_path)
    kept = tags(uri(home), "pirate")
    assert kept["loraplex.effect"] == "changes"
    assert kept.keys() >= MEASURED
    report = json.loads(stored(uri(home), "pirate", "effect.json", tmp_path))
    assert (report["adapter"], report["base"]) == ("pirate", "tiny@1")
    assert report["logits"]["max_delta"] == pytest.approx(
        float(kept["loraplex.max_logit_change"]), rel=1e-4
    )
    assert report["sites"].keys() == {"model.layers.0.qkv"}
    assert report["prompts"] == list(PROBES)
    ElementTree.fromstring(stored(uri(home), "pirate", "norms.svg", tmp_path))
    assert registry.snapshot().resolve("pirate").adapter.effect == "changes"  # type: ignore[union-attr]


def test_report_is_no_part_of_what_is_served(home: Path, tmp_path: Path) -> None:
    """Neither of the digest nor of the files."""
    registry = register(uri(home), tmp_path)
    found = registry.snapshot().resolve("pirate").adapter
    assert found is not None
    tree = registry.fetch(found, Cache(tmp_path / "fresh"))
    assert {path.name for path in tree.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    other = embedded(tmp_path / "other")
    register_base(other, tmp_path / "files" / "base", "tiny")
    plain = register_adapter(
        other, tmp_path / "files" / "adapter", "x", "tiny", cache=Cache(tmp_path / "c2")
    )
    assert plain.version.digest == found.digest


def test_check_that_did_not_run_the_base_replaces_none_that_did(home: Path, tmp_path: Path) -> None:
    registry = register(uri(home), tmp_path)
    folder, cache = tmp_path / "files" / "adapter", Cache(tmp_path / "cache")
    register_adapter(registry, folder, "pirate", "tiny", cache=cache, probe="never")
    assert tags(uri(home), "pirate")["loraplex.effect"] == "changes"


def test_large_base_is_not_run_unasked_and_that_is_said() -> None:
    gib = 1024**3
    small = ProbePlan("cpu", "float32", 135_000_000, gib, 7 * gib)
    large = ProbePlan("cpu", "float32", 1_500_000_000, 6 * gib, 7 * gib)
    huge = ProbePlan("cpu", "float32", 8_030_000_000, 33 * gib, 7 * gib)
    on_gpu = ProbePlan("cuda", "bfloat16", 8_030_000_000, 17 * gib, 80 * gib)
    assert [effect.why_unprobed(plan, "auto") for plan in (small, on_gpu)] == [None, None]
    assert "would last minutes" in (effect.why_unprobed(large, "auto") or "")
    assert "8.03 billion parameters, in float32 33.0 GiB" in (
        effect.why_unprobed(huge, "auto") or ""
    )
    assert [effect.why_unprobed(plan, "always") for plan in (large, huge)] == [None, None]
    assert "as asked" in (effect.why_unprobed(small, "never") or "")


# -- the command -------------------------------------------------------------------------------


def test_check_prints_stores_and_writes(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(uri(home), tmp_path, probe="never")
    kept = tags(uri(home), "pirate")
    assert kept["loraplex.effect"] == "unprobed"
    assert "loraplex.max_logit_change" not in kept
    assert run("check", "tiny:pirate@champion", "--out", str(tmp_path / "out")) == 0
    out = capsys.readouterr().out
    assert "effect: changes" in out
    assert "4 matched, 0 not, 2 of the base's 9 modules" in out
    assert "greedy tokens" in out
    assert re.search(r"cost +rank 4: a prompt token is charged 1\.4% more", out)
    assert tags(uri(home), "pirate").keys() >= MEASURED
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"effect.json", "norms.svg"}


def test_check_as_json_is_json_and_stores_nothing_unless_it_may(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(uri(home), tmp_path, probe="never")
    assert run("check", "pirate", "--json", "--no-store", "--prompt", "Ahoy") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["prompts"]) == ("changes", ["Ahoy"])
    assert report["logits"]["num_positions"] == 4  # a token a byte
    assert tags(uri(home), "pirate")["loraplex.effect"] == "unprobed"


def test_check_of_what_changes_nothing_fails(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = Registry(uri(home))
    register_base(registry, make_base_folder(tmp_path / "base"), "tiny")
    folder = make_adapter_folder(tmp_path / "adapter", b_scale=0.0)
    cache = Cache(tmp_path / "cache")
    register_adapter(registry, folder, "noop", "tiny", cache=cache, allow_noop=True)
    assert run("check", "noop") == 1
    captured = capsys.readouterr()
    assert "effect: none" in captured.out
    assert captured.err.startswith("error: adapter noop@1: it changes nothing")
    assert run("check", "tiny") == 1
    assert "is a base model" in capsys.readouterr().err
    assert run("check", "nobody") == 1
    assert "'nobody'; loraplex models lists what is registered" in capsys.readouterr().err
    assert run("check", "noop", "--device", "abacus") == 1


def test_check_compares_with_peft_and_keeps_that(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(uri(home), tmp_path, probe="never")
    assert "loraplex.parity" not in tags(uri(home), "pirate")
    assert run("check", "pirate", "--parity", "--json", "--prompt", "Ahoy") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parity"]["num_positions"] == 4
    assert report["parity"]["max_difference"] < 1e-3
    words = tags(uri(home), "pirate")["loraplex.parity"]
    assert re.match(r"logits within \S+ of PEFT's, all 4 greedy tokens equal \(transf", words)
    assert run("check", "pirate") == 0  # does not compare, and the comparison stays true
    assert tags(uri(home), "pirate")["loraplex.parity"] == words
    capsys.readouterr()
    assert run("check", "pirate", "--parity", "--parity-bound", "0") == 1
    captured = capsys.readouterr()
    assert re.search(r"parity +logits within", captured.out)
    assert "the bound is 0" in captured.err


def test_prompt_longer_than_the_base_takes_is_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(uri(home), tmp_path, probe="never")
    for option in ("--parity", "--no-store"):
        assert run("check", "pirate", option, "--prompt", "Ahoy", "--prompt", "y" * 129) == 1
        assert "prompt 2 has 129 tokens, the base takes 128" in capsys.readouterr().err
        assert run("check", "pirate", option, "--prompt", "Ahoy", "--prompt", "") == 1
        assert "prompt 2 is empty" in capsys.readouterr().err


def test_registration_compares_with_peft_and_refuses_beyond_the_bound(
    home: Path, tmp_path: Path
) -> None:
    register(uri(home), tmp_path, probe="never")
    registry, cache = Registry(uri(home)), Cache(tmp_path / "cache")
    folder = tmp_path / "files" / "adapter"
    with pytest.raises(RegistrationError, match=r"'x' is refused: logits within .*bound is 1e-12"):
        register_adapter(registry, folder, "x", "tiny", cache=cache, parity=1e-12)
    assert len(registry.snapshot().adapters) == 1
    register_adapter(registry, folder, "x", "tiny", cache=cache, parity=1e-3)
    assert "greedy tokens equal" in tags(uri(home), "x")["loraplex.parity"]
    # Of files that are registered already, the comparison is kept, and the better check stays.
    register_adapter(registry, folder, "pirate", "tiny", cache=cache)
    register_adapter(registry, folder, "pirate", "tiny", cache=cache, probe="never", parity=1e-3)
    kept = tags(uri(home), "pirate")
    assert kept["loraplex.effect"] == "changes"
    assert "greedy tokens equal" in kept["loraplex.parity"]


def test_prompt_without_the_invocation_of_an_adapter_is_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = Registry(uri(home))
    base = make_base_folder(tmp_path / "base")
    register_base(registry, base, "tiny")
    folder = make_adapter_folder(tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    invocation = list(BaseText.from_folder(base).encode("!?"))
    text = json.dumps(config | {"alora_invocation_tokens": invocation})
    (folder / "adapter_config.json").write_text(text)
    registered = register_adapter(
        registry, folder, "judge", "tiny", cache=Cache(tmp_path / "cache"), parity=1e-3
    )
    assert registered.effect is not None
    logits = registered.effect.logits
    assert logits is not None
    assert registered.version.variant == "aLoRA"
    assert run("doctor", "--port", "1", "--json") in (0, 1)
    assert re.search(
        r"1 aLoRA \(0\.\d MiB\); aLoRA is charged from its invocation on", capsys.readouterr().out
    )
    # Each prompt has the two tokens in its middle, and the change is measured from there on.
    sizes = [min(len(prompt.encode()), 126) for prompt in PROBES]
    assert logits.num_positions == sum(size - size // 2 + 2 for size in sizes)
    assert run("check", "judge", "--prompt", "a!?b", "--no-store") == 0
    assert run("check", "judge", "--prompt", "a!b", "--parity") == 1
    words = "prompt 1 does not have the adapter's invocation tokens"
    assert f"{words} {' '.join(map(str, invocation))} " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["refused", "empty"])
def test_version_of_plain_mlflow_is_checked_in_place(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Nobody has looked at it before. The report lies beside its files, which stay the same."""
    registry = Registry(uri(home))
    register_base(registry, make_base_folder(tmp_path / "base"), "tiny")
    is_refused = name == "refused"
    folder = make_adapter_folder(
        tmp_path / "adapter",
        layer="transformer.h.0" if is_refused else "model.layers.0",
        b_scale=float(is_refused),
    )
    client = mlflow.MlflowClient(uri(home), uri(home))
    client.create_registered_model(name)
    client.create_model_version(name, str(folder), tags={"loraplex.base": "tiny"})
    assert run("check", name) == 1
    captured = capsys.readouterr()
    kept = tags(uri(home), name)
    if is_refused:
        assert "0 matched, 4 not" in captured.out
        assert "transformer.h.0" in captured.err
        assert kept["loraplex.effect"] == "refused"
    else:
        assert "changes nothing" in captured.err
        assert (kept["loraplex.effect"], kept["loraplex.noop"]) == ("none", "true")
    assert (folder / "effect" / "effect.json").is_file()
    digests = {Registry(uri(home)).snapshot().adapters[0].digest for _ in range(2)}
    assert digests == {kept["loraplex.digest"]}


def test_all_of_it_over_an_mlflow_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_server(tmp_path / "server") as server:
        register(server.uri, tmp_path, probe="never")
        assert tags(server.uri, "pirate")["loraplex.effect"] == "unprobed"
        assert run("check", "pirate", "--tracking-uri", server.uri) == 0
        assert "effect: changes" in capsys.readouterr().out
        assert tags(server.uri, "pirate").keys() >= MEASURED
        report = json.loads(stored(server.uri, "pirate", "effect.json", tmp_path))
        assert report["verdict"] == "changes"
        assert stored(server.uri, "pirate", "norms.svg", tmp_path).startswith(b"<?xml")


# -- prompts and plot --------------------------------------------------------------------------


def test_probes_are_chat_messages_where_the_base_has_a_template(tmp_path: Path) -> None:
    folder = make_base_folder(tmp_path / "base")
    (folder / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    text = BaseText.from_folder(folder)
    assert tokenize(text, ["hi"]) == (tuple(text.encode("<hi>")),)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('system first') }}")
    text = BaseText.from_folder(folder)
    assert tokenize(text, ["hi"]) == (tuple(text.encode("hi")),)


def make_report(norms: tuple[ModuleNorm, ...]) -> EffectReport:
    return EffectReport(
        verdict="changes",
        reason="it changes",
        num_matched=2 * len(norms),
        unmatched=(),
        num_targets=30,
        norms=norms,
        logits=LogitChange(1, 10, 0, 3.0, 1.0, 0.5, 0.9, 0.25),
        load=None,
        probe=None,
        seconds=1.0,
    )


def in_layer(layer: int, kind: str, delta: float) -> ModuleNorm:
    return ModuleNorm(f"model.layers.{layer}.self_attn.{kind}", "s", 8, delta, 10.0)


def cells(svg: str) -> dict[str, tuple[str, list[float]]]:
    """Module -> colour, and where its cell lies from left to right."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        name = group.attrib.get("id", "")
        if name.startswith(("model.layers.", "lm_head")):
            (path,) = group.iter(f"{SVG}path")
            corners = re.findall(r"[ML] ([-.0-9]+) ", path.attrib["d"])
            fill = path.attrib["style"].partition("fill: ")[2][:7]
            found[name] = (fill, [float(x) for x in corners])
    return found


def words_in(svg: str) -> list[str | None]:
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_plot_has_a_cell_for_every_module_darker_where_more_changes() -> None:
    norms = (
        in_layer(0, "q_proj", 0.5),
        in_layer(2, "q_proj", 1.0),
        in_layer(2, "v_proj", 0.0),
        ModuleNorm("lm_head", "lm_head", 8, 0.25, 10.0),
    )
    svg = norms_svg(make_report(norms), "<pirate> & $co$")
    found = cells(svg)
    assert len(found) == 4
    first, most, none, head = (found[norm.module][0] for norm in norms)
    assert int(most[1:3], 16) < int(first[1:3], 16) < int(head[1:3], 16)
    assert none == "#d62728"
    expected = {"<pirate> & $co$", "q_proj", "v_proj", "lm_head", "0", "1", "2", "10.0%", "2.50%"}
    assert expected <= set(words_in(svg))


@pytest.mark.parametrize("num_layers", [1, 30, 126])
def test_plot_keeps_its_cells_inside(num_layers: int) -> None:
    norms = tuple(in_layer(i, kind, 1.0) for i in range(num_layers) for kind in ("q", "k", "v"))
    svg = norms_svg(make_report(norms), "x")
    width = float(ElementTree.fromstring(svg).attrib["width"].removesuffix("pt"))
    found = cells(svg)
    assert len(found) == 3 * num_layers
    assert all(0 < x < width for _, corners in found.values() for x in corners)
    assert width < 1300


def test_equal_reports_make_equal_plots() -> None:
    report = make_report((in_layer(0, "q_proj", 0.5),))
    assert norms_svg(report, "x") == norms_svg(report, "x")


def test_plot_of_what_was_not_measured_says_so() -> None:
    bare = replace(make_report(()), verdict="refused", reason="no <place>", logits=None)
    assert "refused: no <place>" in words_in(norms_svg(bare, "x"))
    absolute = (replace(in_layer(0, "q_proj", 0.5), base=None),)
    svg = norms_svg(make_report(absolute), "x")
    assert "Frobenius norm of the change of each weight<" in svg


# -- beside serving ----------------------------------------------------------------------------


def register_plainly(tracking_uri: str, folder: Path, name: str) -> mlflow.MlflowClient:
    """Registers an adapter as a pipeline without loraplex does."""
    client = mlflow.MlflowClient(tracking_uri, tracking_uri)
    experiment = client.create_experiment(
        name, artifact_location=(folder.parent / f"{name}-runs").as_uri()
    )
    run = client.create_run(experiment)
    client.log_artifacts(run.info.run_id, str(folder), "adapter")
    client.create_registered_model(name)
    source = f"{run.info.artifact_uri}/adapter"
    client.create_model_version(name, source, tags={"loraplex.base": "tiny"})
    return client


def test_a_plain_version_that_cannot_be_served_says_why_in_mlflow(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(uri(home), tmp_path)
    folder = make_adapter_folder(tmp_path / "dora")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    client = register_plainly(uri(home), folder, "dora")
    reader = CachedRegistry(uri(home), tmp_path / "node")
    version = Registry(uri(home)).snapshot().resolve("dora").adapter
    assert version is not None
    assert (version.effect, version.refused) == ("", "")
    adopted = client.get_model_version("dora", "1").tags
    assert not {"loraplex.noop", "loraplex.num_parameters", *MEASURED} & adopted.keys()
    reader.check_adapter(version)
    checked = client.get_model_version("dora", "1")
    assert "DoRA" in checked.tags["loraplex.refused"]
    assert checked.description.startswith("loraplex does not serve this version:")
    found = Registry(uri(home)).snapshot().resolve("dora").adapter
    assert found is not None
    assert "DoRA" in found.refused
    capsys.readouterr()
    assert run("models") == 0
    assert "cannot be served" in capsys.readouterr().out


def test_a_verdict_that_changes_takes_its_reason_along(home: Path, tmp_path: Path) -> None:
    registry = register(uri(home), tmp_path, probe="never")
    adapter = registry.snapshot().resolve("pirate").adapter
    assert adapter is not None
    client = mlflow.MlflowClient(uri(home), uri(home))
    facts = EffectFacts("refused", 1, False, reason="it uses DoRA")
    registry.attach_effect(adapter, EffectRecord(facts, ()))
    assert "DoRA" in client.get_model_version("pirate", "1").description
    assert run("check", "pirate", "--if-quick", "--device", "cpu") == 0
    now = client.get_model_version("pirate", "1")
    assert not now.description
    assert "loraplex.refused" not in now.tags
    client.update_model_version("pirate", "1", "of the team")
    registry.attach_effect(adapter, EffectRecord(facts, ()))
    assert client.get_model_version("pirate", "1").description == "of the team"


async def test_unmeasured_versions_are_checked_one_at_a_time_and_not_for_ever() -> None:
    base = BaseVersion("base", 1, "d" * 64, "source")
    plain = AdapterVersion("plain", 1, "a" * 64, "base", base.digest, 8, (), "source")
    others = [replace(plain, name=name, digest=name * 64) for name in "bc"]
    measured = replace(plain, name="known", digest="e" * 64, effect="changes")
    catalog = Catalog((base,), (plain, *others, measured))
    checked: list[str] = []
    running, most = 0, 0

    def check(version: AdapterVersion) -> None:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        checked.append(version.name)
        running -= 1

    checks = AdapterChecks()
    for _ in range(200):  # no verdict ever comes: as in a registry that takes no tags
        checks.update(catalog, check)
        await asyncio.sleep(0.002)
    assert most == 1
    assert Counter(checked) == {"plain": 3, "b": 3, "c": 3}
