"""Registration end to end: real tiny folders, a real registry, nothing left after a refusal."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoHaConfig
from safetensors.torch import load_file, save_file

from engine.checks.validation import ConversionLimits
from registry.cache import Cache
from registry.client import Registry
from registry.entities import AdapterFacts
from registry.errors import InvalidNameError, RegistrationError
from serve_app.cli import effect
from serve_app.cli.registration import register_adapter, register_base
from tests.peft_kinds import save_peft
from tests.registry_helpers import embedded
from tests.serve_folders import make_adapter_folder, make_base_folder


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return embedded(tmp_path / "home")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def base(registry: Registry, tmp_path: Path) -> Path:
    folder = make_base_folder(tmp_path / "base")
    register_base(registry, folder, "tiny")
    return folder


def num_versions(registry: Registry) -> tuple[int, int]:
    catalog = registry.snapshot()
    return len(catalog.bases), len(catalog.adapters)


def test_base_is_registered_with_what_the_engine_found(registry: Registry, tmp_path: Path) -> None:
    folder = make_base_folder(tmp_path / "base")
    registered = register_base(registry, folder, "tiny")
    version = registry.snapshot().resolve("tiny").base
    assert version.digest == registered.version.digest
    assert (version.architecture, version.max_model_len) == ("LlamaForCausalLM", 128)
    assert version.num_parameters > 0
    assert registered.warnings == ()


def test_adapter_is_registered_below_its_base(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter", rank=4)
    version = register_adapter(registry, folder, "pirate", "tiny", cache=cache).version
    assert (version.base_name, version.rank, version.targets) == ("tiny", 4, ("q_proj", "v_proj"))
    assert registry.snapshot().resolve("tiny:pirate").adapter is not None


def test_an_adapter_is_registered_with_its_invocation_tokens(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "judge")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["alora_invocation_tokens"] = [91, 17, 60]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    version = register_adapter(registry, folder, "judge", "tiny", cache=cache).version
    assert version.invocation == (91, 17, 60)
    (listed,) = registry.snapshot().adapters
    assert listed.invocation == (91, 17, 60)


def test_same_content_again_is_the_same_version(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter")
    first = register_adapter(registry, folder, "pirate", "tiny", cache=cache).version
    again = register_adapter(registry, folder, "pirate", "tiny", cache=cache).version
    assert (again.version, again.digest) == (first.version, first.digest)
    assert num_versions(registry) == (1, 1)


def test_adapter_that_changes_nothing_is_refused_unless_allowed(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter", b_scale=0.0)
    with pytest.raises(RegistrationError, match=r"changes nothing.*--allow-noop"):
        register_adapter(registry, folder, "noop", "tiny", cache=cache)
    assert num_versions(registry) == (1, 0)
    registered = register_adapter(registry, folder, "noop", "tiny", cache=cache, allow_noop=True)
    assert registered.version.is_noop
    assert registered.version.effect == "none"
    assert any("changes nothing" in warning for warning in registered.warnings)


def test_adapter_whose_change_is_lost_in_rounding_is_refused_where_the_base_is_run(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter", b_scale=1e-30)
    with pytest.raises(RegistrationError, match=r"changes nothing: the logits.*--allow-noop"):
        register_adapter(registry, folder, "lost", "tiny", cache=cache)
    assert num_versions(registry) == (1, 0)
    unseen = register_adapter(registry, folder, "lost", "tiny", cache=cache, probe="never")
    assert unseen.version.effect == "unprobed"


def test_adapter_with_which_the_model_gives_no_numbers_is_refused(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter", b_scale=1e38)
    with pytest.raises(RegistrationError, match="NaN or infinite at"):
        register_adapter(registry, folder, "wild", "tiny", cache=cache, allow_noop=True)
    assert num_versions(registry) == (1, 0)


def test_adapter_of_another_base_is_refused_with_the_shapes(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter", hidden_size=64)
    with pytest.raises(RegistrationError, match=r"adapter 'wide' for base tiny@1.*64"):
        register_adapter(registry, folder, "wide", "tiny", cache=cache)
    assert num_versions(registry) == (1, 0)


def test_adapter_whose_tensors_match_nothing_is_refused(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter", layer="transformer.h.0")
    with pytest.raises(RegistrationError, match=r"transformer\.h\.0"):
        register_adapter(registry, folder, "lost", "tiny", cache=cache)
    assert num_versions(registry) == (1, 0)


def test_truncated_adapter_is_refused(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RegistrationError, match="refused"):
        register_adapter(registry, folder, "short", "tiny", cache=cache)
    assert num_versions(registry) == (1, 0)


def test_a_configuration_of_any_size_is_refused_without_being_read(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter")
    with (folder / "adapter_config.json").open("r+b") as file:
        file.truncate(2**43)  # without taking room on the disk
    with pytest.raises(RegistrationError, match="is larger than 1048576 bytes"):
        register_adapter(registry, folder, "pirate", "tiny", cache=cache)
    assert num_versions(registry) == (1, 0)


def test_adapter_of_an_unknown_base_is_refused_with_the_remedy(
    registry: Registry, cache: Cache, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter")
    with pytest.raises(RegistrationError, match=r"'tiny'.*register the base first"):
        register_adapter(registry, folder, "pirate", "tiny", cache=cache)


def test_base_that_holds_nan_is_refused(registry: Registry, tmp_path: Path) -> None:
    folder = make_base_folder(tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RegistrationError, match=r"model\.norm\.weight"):
        register_base(registry, folder, "broken")
    assert num_versions(registry) == (0, 0)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("chat_template.jinja", "{% if %}", "template"),
        ("tokenizer.json", '{"version": "1.0"}', r"tokenizer\.json"),
    ],
)
def test_base_whose_text_side_cannot_be_opened_is_refused(
    registry: Registry, tmp_path: Path, file: str, content: str, reason: str
) -> None:
    folder = make_base_folder(tmp_path / "base")
    (folder / file).write_text(content)
    with pytest.raises(RegistrationError, match=f"base model 'tiny' is refused: .*{reason}"):
        register_base(registry, folder, "tiny")
    assert num_versions(registry) == (0, 0)


def test_base_with_remote_code_is_refused(registry: Registry, tmp_path: Path) -> None:
    folder = make_base_folder(tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Mine"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RegistrationError, match="auto_map"):
        register_base(registry, folder, "remote")
    assert num_versions(registry) == (0, 0)


def test_folder_that_is_no_model_is_refused_before_anything_is_read(
    registry: Registry, cache: Cache, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RegistrationError, match=r"no config\.json"):
        register_base(registry, tmp_path / "empty", "tiny")
    with pytest.raises(RegistrationError, match=r"no adapter_config\.json"):
        register_adapter(registry, tmp_path / "empty", "pirate", "tiny", cache=cache)
    with pytest.raises(RegistrationError, match="nowhere does not exist"):
        register_base(registry, tmp_path / "nowhere", "tiny")
    with pytest.raises(InvalidNameError):
        register_base(registry, tmp_path / "empty", "a:b")


def test_a_folder_without_the_model_itself_is_refused_with_where_it_is(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for number in (20, 100):
        make_adapter_folder(run / f"checkpoint-{number}")
    with pytest.raises(RegistrationError, match=r"do: 'checkpoint-100', 'checkpoint-20'$"):
        register_adapter(registry, run, "pirate", "tiny", cache=cache)
    with pytest.raises(RegistrationError, match=r"it is a whole model: loraplex register base$"):
        register_adapter(registry, base, "pirate", "tiny", cache=cache)
    with pytest.raises(RegistrationError, match=r"it is an adapter: loraplex register adapter$"):
        register_base(registry, run / "checkpoint-20", "other")


def test_an_adapter_of_another_base_is_refused_unless_forced(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    other = make_adapter_folder(tmp_path / "other", trained_on="Meta/Another-1B")
    with pytest.raises(RegistrationError, match=r"'Meta/Another-1B'.*'tiny'.*--force"):
        register_adapter(registry, other, "foreign", "tiny", cache=cache)
    assert num_versions(registry) == (1, 0)
    register_adapter(registry, other, "foreign", "tiny", cache=cache, force=True)
    assert num_versions(registry) == (1, 1)


@pytest.mark.parametrize("trained_on", ["somewhere/TINY", "/models/base/", "Meta/Tiny-1B", ""])
def test_an_adapter_may_call_its_base_by_any_of_its_names(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path, trained_on: str
) -> None:
    register_base(registry, base, "tiny", model_id="Meta/Tiny-1B")
    folder = make_adapter_folder(tmp_path / "own", trained_on=trained_on)
    register_adapter(registry, folder, "own", "Meta/Tiny-1B", cache=cache)
    assert registry.snapshot().resolve("Meta/Tiny-1B:own").adapter is not None


@pytest.mark.parametrize("name", ["tiny-bnb-4bit", "Tiny-1B-unsloth-bnb-4bit"])
def test_an_adapter_of_the_base_in_bitsandbytes_4_bits_is_registered_with_a_notice(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path, name: str
) -> None:
    register_base(registry, base, "tiny", model_id="Meta/Tiny-1B")
    folder = make_adapter_folder(tmp_path / "own", trained_on=f"unsloth/{name}")
    notice = register_adapter(registry, folder, "own", "tiny", cache=cache).warnings[0]
    assert notice == (
        f"base_model_name_or_path is 'unsloth/{name}': the adapter was trained on 'tiny' "
        "rounded to bitsandbytes' 4 bits, and is served on 'tiny' as it is registered"
    )


@pytest.mark.parametrize(
    "name", ["tiny-AWQ", "tiny-awq-4bit", "other-bnb-4bit", "-bnb-4bit", "tiny-awq-bnb-4bit"]
)
def test_other_endings_of_a_name_mean_another_base(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path, name: str
) -> None:
    folder = make_adapter_folder(tmp_path / "other", trained_on=f"unsloth/{name}")
    with pytest.raises(RegistrationError, match=rf"'unsloth/{name}', but the base is 'tiny'"):
        register_adapter(registry, folder, "other", "tiny", cache=cache)
    assert num_versions(registry) == (1, 0)


def test_a_base_registered_by_its_repository_id_has_both_names(
    registry: Registry, tmp_path: Path
) -> None:
    folder = make_base_folder(tmp_path / "base")
    version = register_base(registry, folder, "Meta/Tiny-1B").version
    assert (version.name, version.model_id) == ("Tiny-1B", "Meta/Tiny-1B")
    assert registry.snapshot().resolve("Meta/Tiny-1B").base.digest == version.digest
    with pytest.raises(InvalidNameError, match="is not a legal model id"):
        register_base(registry, folder, "tiny", model_id="no slash")


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def test_the_text_files_that_an_adapter_brings_are_listed_with_it(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    files = {
        "chat_template.jinja": "you said: {{ messages[0].content }}",
        "generation_config.json": '{"temperature": 0.2}',
        "tokenizer.json": (base / "tokenizer.json").read_text(),
    }
    folder = write_files(make_adapter_folder(tmp_path / "adapter"), files)
    registered = register_adapter(registry, folder, "pirate", "tiny", cache=cache)
    assert registered.effect is not None
    assert registered.effect.brings == ("chat template", "generation defaults")
    found = registry.snapshot().resolve("pirate").adapter
    assert found is not None
    assert found.text == "chat template, generation defaults"


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_an_adapter_with_its_bases_text_files_brings_none(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path, has_tokenizer: bool
) -> None:
    files = {"tokenizer.json": (base / "tokenizer.json").read_text()} if has_tokenizer else {}
    folder = write_files(make_adapter_folder(tmp_path / "adapter"), files)
    version = register_adapter(registry, folder, "pirate", "tiny", cache=cache).version
    assert version.text == ""


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"added_tokens.json": '{"<tool>": 256}'}, "id 256, but the base has 256 embedding rows"),
        ({"generation_config.json": '{"num_beams": 4}'}, "num_beams is 4, which is not served"),
        ({"chat_template.jinja": "{% if %}"}, "chat template"),
    ],
)
def test_an_adapter_whose_text_files_cannot_be_served_is_refused(
    registry: Registry,
    cache: Cache,
    base: Path,
    tmp_path: Path,
    files: dict[str, str],
    reason: str,
) -> None:
    folder = write_files(make_adapter_folder(tmp_path / "adapter"), files)
    with pytest.raises(RegistrationError, match=f"adapter 'pirate' is refused: .*{reason}"):
        register_adapter(registry, folder, "pirate", "tiny", cache=cache)
    assert num_versions(registry) == (1, 0)


def test_a_version_that_plain_mlflow_registered_is_compared_later(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    for name, files in (("bare", {}), ("templated", {"chat_template.jinja": "hi"})):
        folder = write_files(make_adapter_folder(tmp_path / name), files)
        version = registry.register_adapter(
            folder, name, base="tiny", facts=AdapterFacts(2, ("q_proj", "v_proj"))
        )
        assert version.text == ("" if name == "bare" else "unknown")
    adapter = registry.snapshot().resolve("templated").adapter
    assert adapter is not None
    found_out = effect.prove(tmp_path / "templated", adapter.digest, base, mode="never")
    registry.attach_effect(
        adapter, effect.record(found_out, "templated", registry.snapshot().resolve("tiny").base)
    )
    adapter = registry.snapshot().resolve("templated").adapter
    assert adapter is not None
    assert adapter.text == "chat template"


def test_loha_adapter_is_registered_as_lora_with_its_rank_and_error(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_loha_folder(tmp_path / "loha", base)
    version = register_adapter(registry, folder, "loha", "tiny", cache=cache).version
    assert (version.rank, version.targets) == (4, ("q_proj",))
    assert version.converted == "LoRA from LoHa, rank 4, relative error 1.0e-07"
    found = registry.snapshot().resolve("loha").adapter
    assert found is not None
    assert found.converted == version.converted
    stored = registry.fetch(found, cache)
    assert json.loads((stored / "adapter_config.json").read_text())["peft_type"] == "LORA"
    again = register_adapter(registry, folder, "loha", "tiny", cache=cache).version
    assert again.version == version.version


def test_loha_adapter_that_becomes_lora_with_too_large_an_error_is_refused(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_loha_folder(tmp_path / "loha", base)
    close, rough = (ConversionLimits(error, max_rank=2) for error in (1e-3, 0.9))
    with pytest.raises(RegistrationError, match=r"needs rank 4 for a relative error of 0.001"):
        register_adapter(registry, folder, "loha", "tiny", cache=cache, limits=close)
    assert num_versions(registry) == (1, 0)
    registered = register_adapter(registry, folder, "loha", "tiny", cache=cache, limits=rough)
    assert registered.version.rank <= 2


def test_a_converted_adapter_beyond_the_parity_bound_is_refused_with_the_option_of_its_error(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_loha_folder(tmp_path / "loha", base)
    with pytest.raises(
        RegistrationError, match=r"0\. To register it anyway: a smaller --max-error"
    ):
        register_adapter(registry, folder, "loha", "tiny", cache=cache, parity=0.0)
    assert num_versions(registry) == (1, 0)


def test_conversion_that_would_last_too_long_is_refused_before_it_begins(
    registry: Registry, cache: Cache, base: Path, tmp_path: Path
) -> None:
    folder = make_loha_folder(tmp_path / "loha", base)
    limits = ConversionLimits(1e-3, max_minutes=1e-9)
    with pytest.raises(RegistrationError, match=r"would take about .* allowed are 1e-09 \(--max-m"):
        register_adapter(registry, folder, "loha", "tiny", cache=cache, limits=limits)
    assert num_versions(registry) == (1, 0)


def make_loha_folder(folder: Path, base: Path) -> Path:
    return save_peft(folder, base, LoHaConfig(r=2, alpha=4, target_modules=["q_proj"]), std=0.5)
