"""Adapters registered by plain `mlflow` calls, in each layout, and served like any other."""

from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from registry import flavor
from registry.cache import Cache
from registry.client import Registry
from registry.store import MlflowStore
from tests.registry_helpers import adapter_folder, embedded_uri, register_base


@pytest.fixture
def uri(tmp_path: Path) -> Iterator[str]:
    """MLflow's process-wide tracking URI, as a user's pipeline would set it."""
    uri = embedded_uri(tmp_path / "home")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    mlflow.create_experiment("pipeline", (tmp_path / "pipeline").as_uri())
    mlflow.set_experiment("pipeline")
    yield uri
    mlflow.set_registry_uri("")
    mlflow.set_tracking_uri(before)


def register_bare(
    folder: Path, name: str = "pirate", tags: dict[str, str] | None = None
) -> MlflowClient:
    client = MlflowClient()
    with mlflow.start_run() as run:
        mlflow.log_artifacts(str(folder), "adapter")
    if not list(client.search_registered_models(f"name = '{name}'")):
        client.create_registered_model(name)
    source = f"{run.info.artifact_uri}/adapter"
    client.create_model_version(name, source, run.info.run_id, tags=tags)
    return client


def fetched_names(registry: Registry, tmp_path: Path, model: str = "pirate") -> list[str]:
    adapter = registry.snapshot().resolve(model).adapter
    assert adapter is not None
    path = registry.fetch(adapter, Cache(tmp_path / "cache"))
    return sorted(file.name for file in path.iterdir())


TWO_FILES = ["adapter_config.json", "adapter_model.safetensors"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    made: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, unk_token="<unk>"
    )
    return made


@pytest.mark.parametrize("tags", [{"loraplex.base": "tiny"}, {"loraplex.kind": "adapter"}, {}])
def test_bare_folder_is_found(uri: str, tmp_path: Path, tags: dict[str, str]) -> None:
    registry = Registry(uri)
    base = register_base(registry, tmp_path)
    folder = adapter_folder(tmp_path / "a", base="organisation/tiny", rank=16)
    (folder / "optimizer.pt").write_bytes(b"x")
    client = register_bare(folder, tags=tags)
    client.set_registered_model_alias("pirate", "canary", "1")
    found = registry.snapshot().resolve("tiny:pirate@canary").adapter
    assert found is not None
    assert (found.base_digest, found.rank) == (base.digest, 16)
    assert found.targets == ("k_proj", "q_proj")
    assert fetched_names(registry, tmp_path) == TWO_FILES


def test_digest_is_computed_once_and_written_back(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_base(Registry(uri), tmp_path)
    client = register_bare(adapter_folder(tmp_path / "a"))
    first = Registry(uri).snapshot()
    tags = client.get_model_version("pirate", "1").tags
    assert tags["loraplex.digest"] == first.adapters[0].digest

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(MlflowStore, "version_files", refuse)
    assert Registry(uri).snapshot() == first


def test_same_content_has_the_same_digest_however_registered(uri: str, tmp_path: Path) -> None:
    registry = Registry(uri)
    register_base(registry, tmp_path)
    folder = adapter_folder(tmp_path / "a")
    register_bare(folder, "bare")
    flavor.log_model(folder, base="tiny", registered_model_name="flavoured")
    bare, flavoured = registry.snapshot().adapters
    assert bare.digest == flavoured.digest
    assert fetched_names(registry, tmp_path, "flavoured") == TWO_FILES


def test_transformers_flavour_with_a_peft_adapter_is_found(uri: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    registry = Registry(uri)
    register_base(registry, tmp_path)
    register_base(registry, tmp_path, name="model")  # what base_model_name_or_path ends in
    mlflow.transformers.log_model(
        {"model": tuned, "tokenizer": tiny_tokenizer()},
        name="adapter",
        base_model_path=str(tmp_path / "model"),
        task="text-generation",
        registered_model_name="pirate",
        pip_requirements=[],
    )
    found = registry.snapshot().resolve("model:pirate").adapter
    assert found is not None
    assert (found.rank, found.targets) == (2, ("q_proj",))
    assert fetched_names(registry, tmp_path) == TWO_FILES


def test_other_models_of_the_registry_are_left_alone(uri: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "forest.pkl").write_bytes(b"x")
    client = register_bare(tmp_path / "other", "forest")
    catalog = Registry(uri).snapshot()
    assert (catalog.entries(), catalog.rejected) == ((), ())
    assert client.get_model_version("forest", "1").tags == {}


def test_adapter_without_a_registered_base_is_named_and_found_later(
    uri: str, tmp_path: Path
) -> None:
    registry = Registry(uri)
    register_bare(adapter_folder(tmp_path / "a"))
    catalog = registry.snapshot()
    assert catalog.adapters == ()
    assert "'organisation/tiny', 'tiny'" in catalog.rejected[0].reason
    register_base(registry, tmp_path)
    catalog = registry.snapshot()
    assert (len(catalog.adapters), catalog.rejected) == (1, ())


def test_an_adapter_that_names_another_base_is_rejected_unless_forced(
    uri: str, tmp_path: Path
) -> None:
    registry = Registry(uri)
    register_base(registry, tmp_path)
    folder = adapter_folder(tmp_path / "a", base="organisation/another")
    client = register_bare(folder, tags={"loraplex.base": "tiny"})
    catalog = registry.snapshot()
    assert catalog.adapters == ()
    assert "'organisation/another'" in catalog.rejected[0].reason
    client.set_model_version_tag("pirate", "1", "loraplex.force", "true")
    assert registry.snapshot().resolve("tiny:pirate").adapter is not None


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("adapter_config.json", "{", "no JSON"),
        ("adapter_config.json", "[]", "no JSON object"),
        ("adapter_config.json", "[" * 100_000, "no JSON"),
        ("adapter_config.json", '{"r": "many"}', "no rank"),
        ("adapter_model.safetensors", None, "no weights in the safetensors format"),
    ],
)
def test_broken_adapter_is_rejected_with_the_reason(
    uri: str, tmp_path: Path, file: str, content: str | None, reason: str
) -> None:
    registry = Registry(uri)
    register_base(registry, tmp_path)
    folder = adapter_folder(tmp_path / "a")
    if content is None:
        (folder / file).rename(folder / "adapter_model.bin")
    else:
        (folder / file).write_text(content)
    register_bare(folder)
    rejected = registry.snapshot().rejected
    assert [(one.name, one.version) for one in rejected] == [("pirate", 1)]
    assert reason in rejected[0].reason


def test_plain_runs_in_a_new_embedded_store_keep_their_files_beside_it(tmp_path: Path) -> None:
    home = tmp_path / "new"
    uri = f"sqlite:///{home / 'mlflow.db'}"
    Registry(uri).snapshot()
    default = MlflowClient(uri).get_experiment("0")
    assert default.artifact_location.startswith((home / "artifacts").as_uri())
