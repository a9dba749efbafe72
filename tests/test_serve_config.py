"""The config file: accepted values, and refusals with their words."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError

from engine.config import EngineConfig
from engine.core import Engine
from registry.catalog import Catalog, DefaultAliases
from serve_app.config import (
    EngineArgs,
    ModelArgs,
    PlatformArgs,
    RegistryArgs,
    artifact_root,
    cache_folder,
    default_home,
    in_words,
    tracking_uri,
)
from serve_app.control.base_plan import with_aliases
from tests.fakes import make_request
from tests.grammar_helpers import DeferringRunner, grammars, run, schema_grammar, token_ids

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def args_of(path: Path) -> dict[str, object]:
    (application,) = yaml.safe_load(path.read_text())["applications"]
    args: dict[str, object] = application["args"]
    return args


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_file_is_valid_and_serves_something(path: Path) -> None:
    assert PlatformArgs.model_validate(args_of(path)).models


def test_several_bases_stand_in_one_file() -> None:
    path = next(path for path in CONFIGS if path.stem == "two_bases")
    models = PlatformArgs.model_validate(args_of(path)).models
    assert [model.name for model in models] == ["smollm2-135m-instruct", "tiny-qwen3"]


def test_sizes_are_written_with_units() -> None:
    assert EngineArgs(adapter_pool_bytes="256MiB").adapter_pool_bytes == 256 * 1024**2  # type: ignore[arg-type]
    assert EngineArgs(kv_cache_bytes="1.5GB").kv_cache_bytes == 1_500_000_000  # type: ignore[arg-type]
    assert EngineArgs(kv_cache_bytes=4096).kv_cache_bytes == 4096
    assert RegistryArgs(cache_bytes="20GiB").cache_bytes == 20 * 1024**3  # type: ignore[arg-type]
    assert RegistryArgs().cache_bytes is None


@pytest.mark.parametrize("size", ["many", "12 parsecs", "-1MiB", "", "1e3"])
def test_a_bad_size_is_refused_by_name(size: str) -> None:
    with pytest.raises(ValidationError, match="adapter_pool_bytes"):
        PlatformArgs.model_validate(
            {"models": [{"name": "a", "engine": {"adapter_pool_bytes": size}}]}
        )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"modles": []}, "modles"),
        ({"models": [{"name": "a", "engine": {"blok_size": 8}}]}, "blok_size"),
        ({"models": [{"name": "a", "engine": {"device": "tpu"}}]}, "device"),
        ({"models": [{"name": "a", "engine": {"max_lora_rank": 513}}]}, "max_lora_rank"),
        (
            {"models": [{"name": "a", "engine": {"tensor_parallel_size": 9}}]},
            "tensor_parallel_size",
        ),
        ({"models": [{"name": "a", "engine": {"speculation": "on"}}]}, "speculation"),
        (
            {"models": [{"name": "a", "engine": {"num_speculative_tokens": 0}}]},
            "num_speculative_tokens",
        ),
        ({"models": [{"name": "a", "replicas": 0}]}, "replicas"),
        ({"models": [{"name": "a", "max_ongoing_requests": 901}]}, "max_ongoing_requests"),
        ({"models": [{}]}, "name"),
        (
            {"models": [{"name": "a", "response_template": "hermes"}]},
            r"models\.0\.response_template\s.*'qwen-xml', 'chatml-json', .*'granite'.*'hermes'",
        ),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "models listed twice: a"),
        ({"registry": {"poll_interval_s": 0}}, "poll_interval_s"),
        ({"registry": {"alias": "latest"}}, "is not a legal alias"),
        ({"registry": {"webhook_url": "front:8000"}}, "webhook_url"),
        ({"models": [{"name": "a", "alias": "a b"}]}, "is not a legal alias"),
        (
            {"models": [{"name": "a@1", "alias": "x"}, {"name": "a@2", "alias": "y"}]},
            "different aliases",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_field(args: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PlatformArgs.model_validate(args)


def test_a_bare_off_is_a_word_though_yaml_reads_false() -> None:
    engine = yaml.safe_load("speculation: off")
    assert engine == {"speculation": False}
    assert EngineArgs.model_validate(engine).speculation == "off"
    with pytest.raises(ValidationError):
        EngineArgs.model_validate({"speculation": True})


def test_a_refusal_shows_numbers_and_words_but_no_address() -> None:
    wrong = {
        "models": [{"name": "a", "engine": {"kv_host_bytes": -1, "device": "tpu"}}],
        "registry": {"webhook_url": "front:secret@host"},
    }
    with pytest.raises(ValidationError) as refusal:
        PlatformArgs.model_validate(wrong)
    words = in_words(refusal.value, "args.")
    assert "args.models.0.engine.kv_host_bytes: must be at least 0, got -1" in words
    assert ", got 'tpu'" in words
    assert "registry.webhook_url" in words
    assert "secret" not in words
    assert "Value error" not in words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "models: [{name: a, engine: {block_size: '8'}}]",
            "models.0.engine.block_size: must be a whole number, in digits and without quotes, "
            "got '8'",
        ),
        (
            "models: [{name: a, engine: {max_model_len: true}}]",
            "models.0.engine.max_model_len: must be a number, got true",
        ),
        (
            "models: [{name: a, engine: {kv_host_bytes: false}}]",
            "models.0.engine.kv_host_bytes: must be a number, got false",
        ),
        (
            "models: [{name: a, engine: {gpu_memory_utilization: '0.5'}}]",
            "models.0.engine.gpu_memory_utilization: must be a number without quotes, got '0.5'",
        ),
        ("models: [{name: a, replicas: true}]", "models.0.replicas: must be a number, got true"),
        (
            "ingress: {max_header_bytes: 32KiB}",
            "ingress.max_header_bytes: must be a whole number, in digits and without quotes, "
            "got '32KiB'",
        ),
        (
            "fairness: {weights: {a: '2'}}",
            "fairness.weights.a: must be a number, got '2'",
        ),
        (
            "fairness: {weights: {a: true}}",
            "fairness.weights.a: must be a number, got true",
        ),
    ],
)
def test_no_other_value_becomes_a_number(line: str, words: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        PlatformArgs.model_validate(yaml.safe_load(line))
    assert in_words(refusal.value) == words


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("kv_cache_dtype: fp8_e4m3", "'auto' or 'fp8', got 'fp8_e4m3'; did you mean fp8?"),
        ("quantization: fp8_e4m3", "or 'int4', got 'fp8_e4m3'; did you mean fp8?"),
        ("dtype: bf16", "or 'float16', got 'bf16'; did you mean bfloat16?"),
        ("device: tpu", "or 'cuda', got 'tpu'; did you mean cpu?"),
        ("backend: xla", "or 'triton', got 'xla'"),
        ("speculation: true", "or 'auto', got true"),
    ],
)
def test_a_word_that_is_not_known_is_told_with_the_known_one(line: str, end: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        EngineArgs.model_validate(yaml.safe_load(line))
    words = in_words(refusal.value)
    assert words.startswith(f"{line.partition(':')[0]}: must be ")
    assert words.endswith(end)


MAPPING = "is empty and must be a mapping of keys to values: add a key below it or remove the key"
LIST = "is empty and must be a list: add an item that begins with '- ' below it or remove the key"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("models:", f"models: {LIST}"),
        ("registry:", f"registry: {MAPPING}"),
        ("models: [{name: a, engine: }]", f"models.0.engine: {MAPPING}"),
        ("models: [null]", f"models.0: {MAPPING}"),
        ("models: [a]", "models.0: must be a mapping of keys to values"),
        (
            "models: [{name: }]",
            "models.0.name: is empty and must be text: set it or remove the key",
        ),
        ("models: [{}]", "models.0.name: is missing"),
        ("ingress: {allowed_hosts: }", f"ingress.allowed_hosts: {LIST}"),
        ("ingress: {allowed_hosts: a}", "ingress.allowed_hosts: must be a list"),
        ("fairness: {weights: }", f"fairness.weights: {MAPPING}"),
    ],
)
def test_an_empty_section_is_refused_without_the_words_of_python(line: str, words: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        PlatformArgs.model_validate(yaml.safe_load(line))
    assert in_words(refusal.value) == words


def test_numbers_that_yaml_reads_as_text_or_with_a_point_are_numbers() -> None:
    """YAML 1.1 reads 1e-3 as text."""
    fields = yaml.safe_load("{name: a, stall_timeout_s: 1e2, idle_timeout_s: 5, replicas: 2.0}")
    model = ModelArgs.model_validate(fields)
    assert (model.stall_timeout_s, model.idle_timeout_s, model.replicas) == (100.0, 5.0, 2)


def test_the_engine_gets_what_the_file_says_and_else_its_own_defaults() -> None:
    ours = EngineArgs(max_num_seqs=3).to_config("/models/a", "d1", "cpu")
    assert ours == EngineConfig("/models/a", "d1", device="cpu", max_num_seqs=3)


def test_the_file_can_switch_off_that_grammars_force_tokens() -> None:
    grammar = schema_grammar({"enum": ["text that leaves no choice"]})
    request = make_request("a", max_tokens=99, ignore_eos=False, grammar=grammar)
    answers = {}
    for is_forced in (True, False):
        engine = {"force_grammar_tokens": is_forced, "block_size": 4}
        args = PlatformArgs.model_validate({"models": [{"name": "a", "engine": engine}]})
        config = args.models[0].engine.to_config("/models/a", "d1", "cpu")
        made = Engine(config, DeferringRunner(), grammars=grammars())
        (answers[is_forced],) = run(made, [request]).values()
    assert token_ids(answers[True]) == token_ids(answers[False])
    assert max(len(output.token_ids) for output in answers[True]) > 1
    assert all(len(output.token_ids) == 1 for output in answers[False])


def test_a_model_travels_as_json_and_comes_back() -> None:
    model = ModelArgs(name="a@champion", engine=EngineArgs(num_blocks=7))
    assert ModelArgs.model_validate(model.model_dump(mode="json")) == model


def test_the_file_wins_over_the_environment_and_the_home_is_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LORAPLEX_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(RegistryArgs()) == f"sqlite:///{tmp_path}/mlflow.db"
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert tracking_uri(RegistryArgs()) == "http://127.0.0.1:5000"
    assert tracking_uri(RegistryArgs(tracking_uri="sqlite:////x.db")) == "sqlite:////x.db"


def test_a_database_is_told_where_files_lie_by_file_or_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LORAPLEX_ARTIFACT_ROOT", raising=False)
    assert artifact_root(RegistryArgs()) is None
    monkeypatch.setenv("LORAPLEX_ARTIFACT_ROOT", str(tmp_path))
    assert artifact_root(RegistryArgs()) == tmp_path
    assert artifact_root(RegistryArgs(artifact_root=Path("/files"))) == Path("/files")


def test_a_bases_alias_is_of_its_name_whatever_version_is_served() -> None:
    models = (ModelArgs(name="a@2", alias="stable"), ModelArgs(name="a@3"), ModelArgs(name="b"))
    named = with_aliases(Catalog(), "champion", models)
    assert named.default_aliases == DefaultAliases("champion", (("a", "stable"),))


def test_without_a_variable_the_home_is_below_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAPLEX_HOME", raising=False)
    assert default_home() == Path.home() / ".loraplex"
