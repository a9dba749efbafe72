"""Adapters registered by plain `mlflow` calls, in each layout, and served like any other."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from registry import adoption, flavor, plain_mlflow
from registry.cache import Cache
from registry.catalog import Catalog
from registry.client import Registry
from registry.entities import BaseVersion
from registry.errors import (
    ArtifactError,
    NotFoundError,
    RefusedVersionError,
    RegistrationError,
    RegistryError,
    RegistryUnavailableError,
)
from registry.listing import Row
from registry.sources import ArtifactSources
from registry.store import MlflowStore
from tests.registry_helpers import (
    ADAPTER_FACTS,
    adapter_folder,
    embedded_uri,
    register_adapter,
    register_base,
)


@pytest.fixture
def uri(tmp_path: Path) -> Iterator[str]:
    """MLflow's process-wide tracking URI, as a user's pipeline would set it."""
    uri = embedded_uri(tmp_path / "home")
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    mlflow.create_experiment("pipeline", (tmp_path / "home" / "artifacts" / "pipeline").as_uri())
    mlflow.set_experiment("pipeline")
    yield uri
    mlflow.set_registry_uri("")
    # The value of `get_tracking_uri` is not restored: MLflow would set its default, below the
    # working folder, in the environment that later tests and their processes see.
    mlflow.set_tracking_uri(None)  # type: ignore[arg-type]


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


def test_an_adapter_of_a_store_that_can_only_be_read_is_fetched(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_base(Registry(uri), tmp_path)

    def refuse(*_: object) -> None:
        raise RegistryError("PERMISSION_DENIED")

    monkeypatch.setattr(MlflowStore, "tag_version", refuse)
    client = register_bare(adapter_folder(tmp_path / "a"))
    registry = Registry(uri)
    (adapter,) = registry.snapshot().adapters
    assert client.get_model_version("pirate", "1").tags == {}
    # Another process than the listing one, like an engine.
    path = Registry(uri).fetch(adapter, Cache(tmp_path / "cache"))
    assert sorted(file.name for file in path.iterdir()) == TWO_FILES


@pytest.mark.parametrize(
    ("tokens", "found"),
    [([5, 6], (5, 6)), ([5, 2**70], ()), ([-1], ()), ([5] * 513, ()), ([5, "6"], ()), ("5", ())],
)
def test_invocation_is_a_list_of_token_ids(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: object, found: Sequence[int]
) -> None:
    """The store can only be read, so that the list comes from no tag: routing searches prompts for
    it before any engine has checked it."""
    register_base(Registry(uri), tmp_path)

    def refuse(*_: object) -> None:
        raise RegistryError("PERMISSION_DENIED")

    monkeypatch.setattr(MlflowStore, "tag_version", refuse)
    folder = adapter_folder(tmp_path / "a")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["alora_invocation_tokens"] = tokens
    (folder / "adapter_config.json").write_text(json.dumps(config))
    register_bare(folder)
    (adapter,) = Registry(uri).snapshot().adapters
    assert adapter.invocation == found


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
    register_base(registry, tmp_path, name="model")  # the end of base_model_name_or_path
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


@pytest.mark.parametrize("tags", [{"loraplex.base": "tiny"}, {"loraplex.kind": "adapter"}])
def test_a_version_that_is_tagged_as_an_adapter_and_holds_none_in_its_folder_is_rejected(
    uri: str, tmp_path: Path, tags: dict[str, str]
) -> None:
    registry = Registry(uri)
    register_base(registry, tmp_path)
    adapter_folder(tmp_path / "run" / "checkpoint-4")
    (tmp_path / "run" / "training_args.bin").write_bytes(b"x")
    register_bare(tmp_path / "run", tags=tags)
    catalog = registry.snapshot()
    (rejected,) = catalog.rejected
    ((key, value),) = tags.items()
    assert rejected.reason == (
        f"the tag {key} is {value!r}, but its source holds no adapter_config.json: create a "
        "version whose source is the folder with this file"
    )
    for model in ("pirate", "tiny:pirate"):
        with pytest.raises(RefusedVersionError, match=f"'pirate' version 1 .*: the tag {key}"):
            catalog.resolve(model)


def test_clients_do_not_learn_which_source_is_not_read(uri: str, tmp_path: Path) -> None:
    register_base(Registry(uri), tmp_path)
    client = MlflowClient()
    client.create_registered_model("pirate")
    client.create_model_version("pirate", "s3://secrets/x")
    with pytest.raises(NotFoundError, match=r"^no base model or adapter is named 'pirate'$"):
        settled(Registry(uri)).resolve("pirate")


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


def test_an_adapter_of_bitsandbytes_4_bits_is_that_of_the_base_of_that_name(
    uri: str, tmp_path: Path
) -> None:
    registry = Registry(uri)
    register_base(registry, tmp_path)
    register_bare(adapter_folder(tmp_path / "a", base="unsloth/tiny-unsloth-bnb-4bit"))
    assert registry.snapshot().resolve("tiny:pirate").adapter is not None


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


@pytest.mark.parametrize("quantization", ["", "bitsandbytes nf4", "awq 4 bits"])
def test_an_adapter_of_bitsandbytes_4_bits_has_any_base_of_that_name_but_an_awq_base(
    quantization: str,
) -> None:
    base = BaseVersion("tiny-awq", 1, "1" * 64, "", created_s=100, quantization=quantization)
    trained_on = "unsloth/tiny-awq-bnb-4bit"
    adapter = plain_mlflow.PlainAdapter("", (), ADAPTER_FACTS, (), trained_on)
    if quantization.startswith("awq"):
        with pytest.raises(RegistrationError, match="but the base is 'tiny-awq'"):
            plain_mlflow.match_base(adapter, "tiny-awq", Catalog((base,)))
    else:
        assert plain_mlflow.match_base(adapter, "tiny-awq", Catalog((base,))) == base


@pytest.mark.parametrize("trained_on", ["meta/Tiny", "unsloth/tiny-bnb-4bit", "meta/other", "bnb"])
@pytest.mark.parametrize("quantization", ["bitsandbytes nf4", "gptq gptq, 4 bits", ""])
def test_a_base_in_bitsandbytes_4_bits_has_the_adapters_of_the_plain_one(
    trained_on: str, quantization: str
) -> None:
    name = "tiny-unsloth-bnb-4bit"
    base = BaseVersion(name, 1, "1" * 64, "", created_s=100, quantization=quantization)
    if quantization.startswith("bitsandbytes") and "iny" in trained_on:
        (notice,) = plain_mlflow.check_trained_on(trained_on, base, "a remedy")
        assert f"{trained_on!r}: the adapter is served on {name!r}, which is that" in notice
    else:
        with pytest.raises(RegistrationError, match=f"but the base is '{name}'; a remedy"):
            plain_mlflow.check_trained_on(trained_on, base, "a remedy")


@pytest.mark.parametrize("newer", ["aaa", "zzz"])
def test_a_new_base_does_not_take_the_adapters_of_an_older_one_over(newer: str) -> None:
    older = BaseVersion("tiny", 1, "1" * 64, "", created_s=100, model_id="Meta/Tiny-1B")
    latest = replace(older, version=2, digest="2" * 64, created_s=300)
    theirs = replace(older, name=newer, created_s=200)
    adapter = plain_mlflow.PlainAdapter("", (), ADAPTER_FACTS, ("Meta/Tiny-1B",), "Meta/Tiny-1B")
    for bases in ((older, latest, theirs), (theirs, older, latest)):
        assert plain_mlflow.match_base(adapter, None, Catalog(bases)) == latest


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("adapter_config.json", "{", "not JSON"),
        ("adapter_config.json", "[]", "not a JSON object"),
        ("adapter_config.json", "[" * 100_000, "not JSON"),
        ("adapter_config.json", '{"r": "many"}', "no rank"),
        ("adapter_config.json", '{"peft_type": "IA3"}', "peft_type is 'IA3'; only 'LORA' is"),
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


# -- during listings -------------------------------------------------------------------------------


def settled(registry: Registry) -> Catalog:
    """Returns the catalog after all adoption jobs, as a later poll of a server does."""
    registry.snapshot(adopt="beside")
    registry._adoption.wait()
    catalog = registry.snapshot(adopt="beside")
    registry._adoption.wait()  # for the tags
    return catalog


def test_a_store_that_hangs_delays_no_alias_and_no_other_version_for_ever(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(uri, scratch=tmp_path / "cache" / "adoption")
    register_base(registry, tmp_path)
    register_adapter(registry, tmp_path, "quick", b"one")
    register_adapter(registry, tmp_path, "quick", b"two", alias=None)
    real = plain_mlflow.inspect
    asked, released, ended = threading.Event(), threading.Event(), threading.Event()

    def hang(repository: ArtifactRepository, scratch: Path) -> plain_mlflow.PlainAdapter | None:
        assert scratch.is_relative_to(tmp_path / "cache" / "adoption")
        if not asked.is_set():
            asked.set()
            released.wait(120)
            ended.set()
        return real(repository, scratch)

    monkeypatch.setattr(plain_mlflow, "inspect", hang)
    register_bare(adapter_folder(tmp_path / "a"), "hanging")
    registry.snapshot(adopt="beside")
    assert asked.wait(120)
    for version in (2, 1, 2):
        registry.set_alias("quick", "champion", version)
        found = registry.snapshot(adopt="beside").resolve("quick").adapter
        assert found is not None
        assert found.version == version
    assert not ended.is_set()  # none of them waited for the store
    register_bare(adapter_folder(tmp_path / "b", b"other weights"), "next")
    monkeypatch.setattr(adoption, "LONGEST_S", 0.0)
    assert registry.snapshot(adopt="beside")
    monkeypatch.setattr(adoption, "LONGEST_S", 600.0)
    catalog = settled(registry)
    assert catalog.resolve("next").adapter is not None
    (rejected,) = catalog.rejected
    assert rejected.name == "hanging"
    assert "did not send it within" in rejected.reason
    released.set()


def test_a_store_that_fails_is_not_asked_at_every_poll(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(uri)
    register_base(registry, tmp_path)
    register_bare(adapter_folder(tmp_path / "a"))
    asked: list[str] = []
    real = MlflowStore.version_files

    def fail(self: MlflowStore, name: str, version: int) -> ArtifactRepository:
        asked.append(name)
        raise RegistryUnavailableError("the bucket does not answer")

    monkeypatch.setattr(MlflowStore, "version_files", fail)
    registry._adoption._quarantine._now_s = lambda: 0.0
    for _ in range(5):
        (rejected,) = settled(registry).rejected
        assert "cannot be read now: the bucket does not answer" in rejected.reason
    assert asked == ["pirate"]
    monkeypatch.setattr(MlflowStore, "version_files", real)
    registry._adoption._quarantine._now_s = lambda: 60.0
    settled(registry)
    assert settled(registry).resolve("pirate").adapter is not None


class Reads:
    """An adoption whose store records each requested version and waits for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.seen: list[tuple[str, int]] = []
        self.begun = threading.Event()
        self.adoption = adoption.Adoption(self._open, None)

    def _open(self, name: str, version: int) -> ArtifactRepository:
        self.seen.append((name, version))
        self.begun.set()
        assert self.gate.acquire(timeout=120)
        raise ArtifactError("nothing is stored here")

    def look(self, rows: list[Row]) -> None:
        for row in rows:
            assert self.adoption.look(row) == (False, None)

    def finish(self) -> None:
        self.gate.release(100_000)
        self.adoption.wait()


def plain_rows(name: str, num: int) -> list[Row]:
    return [Row(name, version, "source", {}, (), 0) for version in range(1, num + 1)]


def test_the_slow_versions_of_one_model_do_not_keep_those_of_another_out() -> None:
    reads = Reads()
    reads.look(plain_rows("first", 1))
    assert reads.begun.wait(120)
    reads.look([*plain_rows("slow", 4), *plain_rows("small", 2)])
    reads.finish()
    assert reads.seen == [
        ("first", 1),
        *(("slow", 1), ("small", 1), ("slow", 2), ("small", 2)),
        *(("slow", 3), ("slow", 4)),
    ]


def test_a_version_that_the_listing_shows_no_more_is_not_read() -> None:
    reads = Reads()
    gone, kept = plain_rows("gone", 3), plain_rows("kept", 3)
    reads.look(gone[:1])
    assert reads.begun.wait(120)
    reads.look([*gone[1:], *kept])
    reads.adoption.keep(kept[1:])
    reads.finish()
    assert reads.seen == [("gone", 1), ("kept", 2), ("kept", 3)]
    reads.look(kept[:1])  # it is there again
    reads.finish()
    assert reads.seen[-1] == ("kept", 1)


def test_a_look_does_not_compare_the_version_with_each_that_waits() -> None:
    """Comparing would make 380 million comparisons in these listings: 15 s of a CPU, not 0.2 s."""
    reads = Reads()
    waiting = plain_rows("team", 16_000)
    began_s = time.thread_time()
    reads.look(waiting)
    reads.look(waiting)
    assert time.thread_time() - began_s < 4
    reads.adoption.keep([])
    reads.finish()
    assert len(reads.seen) == 1


def test_a_model_made_anew_is_read_anew(uri: str, tmp_path: Path) -> None:
    registry = Registry(uri)
    register_base(registry, tmp_path)
    client = register_bare(adapter_folder(tmp_path / "a", b"old weights"))
    (old,) = settled(registry).adapters
    client.delete_registered_model("pirate")
    register_bare(adapter_folder(tmp_path / "b", b"new weights"))
    (new,) = settled(registry).adapters
    assert (old.version, new.version) == (1, 1)
    assert old.digest != new.digest


@pytest.mark.parametrize(
    ("source", "listed", "is_read"),
    [
        ("s3://models/x", (), False),
        ("s3://models/x", ("s3",), True),
        ("s3://models/x", ("s3://models",), True),
        ("s3://secrets/x", ("s3://models",), False),
        ("gs://models/x", ("s3",), False),
        ("http://169.254.169.254/latest", (), False),
        ("file:///etc", (), False),
        ("/etc", (), False),
        ("file:///root/artifacts/../../etc", (), False),
        ("file://elsewhere/root/artifacts/x", (), False),
        ("file:///etc", ("file",), True),
        ("file:///root/artifacts/x", (), True),
        ("models:/x/1", (), False),
        ("http://[::1", ("http",), False),
        ("ftp://host/x", (), False),
        ("mlflow-artifacts:/1/x", (), False),
    ],
)
def test_only_sources_of_the_registry_or_of_the_operators_list_are_read(
    source: str, listed: tuple[str, ...], is_read: bool
) -> None:
    sources = ArtifactSources("postgresql://host/db", Path("/root/artifacts"), listed, no_root)
    if is_read:
        sources.check(source)
    else:
        with pytest.raises(ArtifactError, match="source"):
            sources.check(source)


def no_root() -> None:
    return None


def test_a_tracking_server_proxies_its_own_and_its_default_root_counts() -> None:
    def of(root: str | None) -> ArtifactSources:
        return ArtifactSources("http://mlflow:5000", None, (), lambda: root)

    for source in (
        "mlflow-artifacts:/1/x",
        "mlflow-artifacts://mlflow:5000/1",
        "http://mlflow:5000/a",
    ):
        of(None).check(source)
    of("s3://models/mlflow").check("s3://models/mlflow/7/x")
    of("file:///srv/mlflow").check("file:///srv/mlflow/3/x")
    for root, source in (
        (None, "mlflow-artifacts://other/1/x"),
        (None, "http://mlflow:5001/a"),
        (None, "file:///srv/mlflow/x"),
        ("s3://models/mlflow", "s3://secrets/x"),
        ("s3://models/mlflow", "gs://models/mlflow"),
        ("file:///srv/mlflow", "file:///srv/other"),
        ("mlflow-artifacts:/", "s3://models/x"),
    ):
        with pytest.raises(ArtifactError):
            of(root).check(source)


def test_a_version_elsewhere_is_refused_with_the_setting_that_allows_it(
    uri: str, tmp_path: Path
) -> None:
    register_base(Registry(uri), tmp_path)
    client = MlflowClient()
    client.create_registered_model("pirate")
    client.create_model_version("pirate", "s3://secrets/x")
    (rejected,) = settled(Registry(uri)).rejected
    assert "registry.artifact_schemes does not list s3://secrets" in rejected.reason


def test_an_sqlite_registry_reads_every_file_of_its_machine(uri: str, tmp_path: Path) -> None:
    register_base(Registry(uri), tmp_path)
    client = MlflowClient()
    client.create_registered_model("pirate")
    client.create_model_version("pirate", adapter_folder(tmp_path / "elsewhere").as_uri())
    assert settled(Registry(uri)).rejected == ()
    with pytest.raises(ArtifactError):
        ArtifactSources(uri, None, (), no_root).check("file://elsewhere/x")
