"""Registration, snapshots and fetching on the embedded SQLite store, also by several processes."""

import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.exceptions import MlflowException

from registry import mlflow_errors
from registry.cache import TEXT_FILES, Cache
from registry.client import Registry
from registry.errors import (
    DigestMismatchError,
    InvalidNameError,
    NotFoundError,
    RegistrationError,
    RegistryError,
    RegistryUnavailableError,
)
from registry.mlflow_errors import call
from registry.sqlite_database import create_sqlite
from registry.store import MlflowStore
from tests.registry_helpers import (
    ADAPTER_FACTS,
    BASE_FACTS,
    adapter_folder,
    base_folder,
    embedded,
    embedded_uri,
    register_adapter,
    register_base,
)


def stored_files(home: Path) -> list[Path]:
    return [path for path in (home / "artifacts").rglob("*") if path.is_file()]


def test_registered_folder_resolves_and_comes_back_verified(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    base = register_base(registry, tmp_path)
    adapter = register_adapter(registry, tmp_path)
    found = registry.snapshot().resolve("tiny:pirate@champion")
    assert (found.base, found.adapter) == (base, adapter)
    assert adapter.base_digest == base.digest
    assert (adapter.rank, adapter.targets) == (4, ("k_proj", "q_proj"))
    assert (base.architecture, base.max_model_len) == ("LlamaForCausalLM", 64)
    path = registry.fetch(adapter, Cache(tmp_path / "cache"))
    assert sorted(p.name for p in path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_same_content_is_the_same_version_and_moves_the_alias(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    first = register_adapter(registry, tmp_path / "1", content=b"one")
    second = register_adapter(registry, tmp_path / "2", content=b"two")
    assert (first.version, second.version) == (1, 2)
    assert registry.snapshot().resolve("pirate").adapter == second
    again = register_adapter(registry, tmp_path / "3", content=b"one")
    assert (again.version, again.aliases) == (1, ("champion",))
    catalog = registry.snapshot()
    assert len(catalog.adapters) == 2
    assert catalog.resolve("pirate").adapter == again


def test_version_without_alias_does_not_move_champion(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    first = register_adapter(registry, tmp_path, content=b"one")
    register_adapter(registry, tmp_path, content=b"two", alias=None)
    assert registry.snapshot().resolve("pirate").adapter == first


def test_adapter_on_a_new_version_of_its_base_is_a_new_version(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    old = register_base(registry, tmp_path, content=b"old")
    register_adapter(registry, tmp_path / "1")
    new = register_base(registry, tmp_path, content=b"new")
    assert registry.snapshot().resolve("tiny:pirate").base.digest == old.digest
    assert register_adapter(registry, tmp_path / "2").version == 2
    assert registry.snapshot().resolve("tiny:pirate").base.digest == new.digest


def test_own_tags_are_kept_and_ours_are_reserved(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    folder = base_folder(tmp_path / "base")
    with pytest.raises(RegistrationError, match="loraplex"):
        registry.register_base(folder, "x", facts=BASE_FACTS, tags=(("loraplex.rank", "1"),))
    base = registry.register_base(folder, "x", facts=BASE_FACTS, tags=(("team", "blue"),))
    assert base.tags == (("team", "blue"),)


def test_linked_base_is_held_once(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    folder = base_folder(tmp_path / "base")
    base = registry.register_base(folder, "tiny", facts=BASE_FACTS, link=True)
    tree = registry.fetch(base, Cache(tmp_path / "cache"))
    assert (tree / "model.safetensors").samefile(folder / "model.safetensors")


def test_text_files_come_without_weights_then_without_network(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    base = register_base(registry, tmp_path)
    cache = Cache(tmp_path / "cache")
    steps: list[tuple[str, int, int]] = []
    text = registry.fetch(base, cache, TEXT_FILES, lambda *step: steps.append(step))
    assert sorted(path.name for path in text.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
    ]
    assert len(steps) == 3
    for path in stored_files(tmp_path / "home"):
        path.unlink()
    assert registry.fetch(base, cache, TEXT_FILES) == text


def test_tampered_artifact_is_refused(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    adapter = register_adapter(registry, tmp_path)
    for path in stored_files(tmp_path / "home"):
        if path.name == "adapter_model.safetensors":
            path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(DigestMismatchError, match="adapter_model"):
        registry.fetch(adapter, Cache(tmp_path / "cache"))


def test_tampered_manifest_is_refused(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    base = register_base(registry, tmp_path)
    for path in stored_files(tmp_path / "home"):
        if path.name == "loraplex.json":
            path.write_text("[]")
    with pytest.raises(DigestMismatchError):
        registry.fetch(base, Cache(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["a/b", "../a", "", "a b", "a:b", "a@b"])
def test_illegal_name_is_refused(tmp_path: Path, name: str) -> None:
    registry = embedded(tmp_path / "home")
    with pytest.raises(InvalidNameError):
        registry.register_base(base_folder(tmp_path / "base"), name, facts=BASE_FACTS)


def test_unknown_base_is_refused(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    with pytest.raises(RegistrationError, match="no base model is named 'nobody'"):
        register_adapter(registry, tmp_path, base="nobody")


def test_name_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    with pytest.raises(RegistrationError, match="a base model already"):
        register_adapter(registry, tmp_path, name="tiny")


def test_folder_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    folder = base_folder(tmp_path / "base")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(RegistrationError, match=r"safetensors format; pytorch_model\.bin"):
        registry.register_base(folder, "tiny", facts=BASE_FACTS)
    with pytest.raises(RegistrationError, match="not a folder"):
        registry.register_base(tmp_path / "nowhere", "tiny", facts=BASE_FACTS)


def test_pickles_code_and_checkpoints_are_left_out(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    folder = base_folder(tmp_path / "base")
    for name in ("optimizer.pt", "rng_state.pth", "training_args.bin", "modeling.py", ".hidden"):
        (folder / name).write_bytes(b"x")
    base_folder(folder / "checkpoint-100")
    clean = registry.register_base(base_folder(tmp_path / "clean"), "clean", facts=BASE_FACTS)
    assert registry.register_base(folder, "tiny", facts=BASE_FACTS).digest == clean.digest


def test_symlink_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    folder = base_folder(tmp_path / "base")
    (tmp_path / "secret").write_text("secret")
    (folder / "extra.json").symlink_to(tmp_path / "secret")
    with pytest.raises(RegistrationError, match="symlink that leaves"):
        registry.register_base(folder, "tiny", facts=BASE_FACTS)


def test_hugging_face_cache_folder_is_taken(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    folder = base_folder(tmp_path / "models--tiny" / "snapshots" / "abc")
    blobs = tmp_path / "models--tiny" / "blobs"
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "123")
    (folder / "model.safetensors").symlink_to(Path("../../blobs/123"))
    base = registry.register_base(folder, "tiny", facts=BASE_FACTS, link=True)
    tree = registry.fetch(base, Cache(tmp_path / "cache"))
    assert not (tree / "model.safetensors").is_symlink()


@pytest.mark.parametrize("step", ["finalize", "create_version", "set_alias"])
def test_failed_registration_leaves_nothing(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = embedded(tmp_path / "home")

    def fail(*_: object, **__: object) -> None:
        raise RegistryError("pulled the plug")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowStore, step, fail)
        with pytest.raises(RegistryError, match="pulled the plug"):
            register_base(registry, tmp_path)
    assert registry.snapshot().entries() == ()
    assert registry._store.listing() == ([], [])
    assert stored_files(tmp_path / "home") == []


def register_some(uri: str, folder: Path, writer: int) -> None:
    registry = Registry(uri)
    for number in range(4):
        name = f"writer{writer}-{number}"
        register_adapter(registry, folder / str(writer), name=name, content=name.encode())
        registry.snapshot()
    register_adapter(registry, folder / str(writer), name="shared", content=b"same")


def test_two_processes_register_at_once(tmp_path: Path) -> None:
    uri = embedded_uri(tmp_path / "home")
    registry = Registry(uri)
    register_base(registry, tmp_path)
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=register_some, args=(uri, tmp_path, writer)) for writer in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    catalog = registry.snapshot()
    assert len(catalog.adapters) == 9  # "shared" once
    assert catalog.resolve("shared").adapter is not None


@pytest.mark.parametrize(
    "words",
    [
        "(sqlite3.OperationalError) database is locked",
        "(sqlite3.IntegrityError) UNIQUE constraint failed: registered_model_aliases.name",
    ],
)
def test_a_write_that_came_second_is_tried_again_but_not_for_ever(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append, monotonic=lambda: 0.0)
    monkeypatch.setattr(mlflow_errors, "time", clock)

    def locked_until(success: int) -> str:
        tries.append(1)
        if len(tries) < success:
            raise MlflowException(words)
        return "written"

    assert call("writing", lambda: locked_until(3)) == "written"
    with pytest.raises(RegistryUnavailableError, match=r"writing: .*sqlite3"):
        call("writing", lambda: locked_until(100))
    assert len(tries) == 3 + 6
    assert len(pauses) == 2 + 5
    assert 0.05 <= pauses[0] <= 0.1
    assert 0.8 <= pauses[-1] <= 1.6


def test_a_database_that_stays_locked_is_not_waited_for_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each try waits 20 s: six of them would keep the poller for two minutes."""
    now_s = [0.0]
    clock = SimpleNamespace(sleep=lambda _: None, monotonic=lambda: now_s[0])
    monkeypatch.setattr(mlflow_errors, "time", clock)

    def locked() -> None:
        now_s[0] += 20
        raise MlflowException("(sqlite3.OperationalError) database is locked")

    with pytest.raises(RegistryUnavailableError, match="locked"):
        call("listing", locked)
    assert now_s == [20.0]


def test_unknown_version_is_not_found(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    base = register_base(registry, tmp_path)
    registry._store.delete_version(base.name, base.version)
    with pytest.raises(NotFoundError):
        registry.fetch(base, Cache(tmp_path / "cache"))


def test_new_database_is_made_quietly_and_calls_nobody(tmp_path: Path) -> None:
    program = (
        "import socket, sys\n"
        "def refuse(*a): sys.stderr.write(f'connects to {a}'); raise OSError('no network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from registry.client import Registry\n"
        f"print(Registry('sqlite:///{tmp_path}/new/home/mlflow.db').snapshot().entries())\n"
    )
    root = str(Path(__file__).parent.parent)
    # MLflow sends no telemetry from CI or tests by itself: remove these hints.
    hints = ("CI", "PYTEST_CURRENT_TEST", "GITHUB_ACTIONS", "MLFLOW_DISABLE_TELEMETRY")
    environment = {k: v for k, v in os.environ.items() if k not in hints} | {"PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip(), done.stderr) == ("()", "")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_progress_counts_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    folder = adapter_folder(tmp_path / "adapter")
    (folder / "README.md").write_text("# Pirate")
    total = sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".md")
    steps: list[tuple[str, int, int]] = []
    with caplog.at_level(logging.INFO, "registry.manifest"):
        registry.register_adapter(
            folder,
            "pirate",
            base="tiny@champion",
            facts=ADAPTER_FACTS,
            progress=lambda *step: steps.append(step),
        )
    assert [stage for stage, _, _ in steps] == ["hash", "hash", "upload", "upload"]
    assert steps[-1] == ("upload", total, total)
    assert "README.md" in caplog.text


def test_settings_of_a_model_are_read_changed_and_removed(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    register_adapter(registry, tmp_path)
    assert registry.snapshot().setting("pirate", "pin") is None
    registry.set_setting("pirate", "pin", "true")
    registry.set_setting("pirate", "canary_weight", "0.1")
    catalog = registry.snapshot()
    assert catalog.setting("pirate", "pin") == "true"
    assert catalog.setting("pirate", "canary_weight") == "0.1"
    registry.set_setting("pirate", "pin", None)
    registry.set_setting("pirate", "pin", None)
    assert registry.snapshot().setting("pirate", "pin") is None
    assert registry.snapshot().revision != catalog.revision
    with pytest.raises(NotFoundError, match="'nobody'"):
        registry.set_setting("nobody", "pin", "true")
    with pytest.raises(ValueError, match="'pins'"):
        registry.set_setting("pirate", "pins", "true")


def test_alias_is_moved_and_removed(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    register_adapter(registry, tmp_path / "1", content=b"one")
    register_adapter(registry, tmp_path / "2", content=b"two", alias="canary")
    registry.set_alias("pirate", "canary", 1)
    assert [one.aliases for one in registry.snapshot().adapters] == [("canary", "champion"), ()]
    registry.set_alias("pirate", "canary", None)
    registry.set_alias("pirate", "canary", None)
    assert [one.aliases for one in registry.snapshot().adapters] == [("champion",), ()]
    with pytest.raises(NotFoundError):
        registry.set_alias("pirate", "champion", 9)


def test_an_interrupted_creation_leaves_no_half_of_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(engine: object) -> None:
        raise KeyboardInterrupt

    home = tmp_path / "home"
    uri = f"sqlite:///{home}/mlflow.db"
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.store.db.utils._upgrade_db", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Registry(uri).snapshot()
    assert list(home.iterdir()) == []
    base = register_base(Registry(uri), tmp_path)
    assert Registry(uri).snapshot().bases == (base,)


@pytest.mark.parametrize("name", ["plain.db", "my%20own.db", "a name.db?timeout=3"])
def test_a_new_database_is_where_mlflow_looks_for_it(tmp_path: Path, name: str) -> None:
    uri = f"sqlite:///{tmp_path}/{name}"
    base = register_base(Registry(uri), tmp_path)
    assert Registry(uri).snapshot().bases == (base,)
    assert len(list(tmp_path.glob("*.db*"))) == 1


def test_a_new_database_is_spared_what_a_lost_one_left(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "mlflow.db").symlink_to(elsewhere / "real.db")
    (elsewhere / "real.db-journal").write_bytes(b"of a server that was killed")
    (elsewhere / ".real.db-killed").mkdir()
    base = register_base(Registry(f"sqlite:///{home}/mlflow.db"), tmp_path)
    assert Registry(f"sqlite:///{elsewhere}/real.db").snapshot().bases == (base,)
    assert (home / "mlflow.db").is_symlink()
    assert [path.name for path in elsewhere.iterdir()] == ["real.db"]


def test_a_database_in_memory_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    create_sqlite("sqlite:///:memory:", "artifacts")
    create_sqlite("sqlite:///file:here.db?mode=rwc&uri=true", "artifacts")
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_server_is_named_without_its_password() -> None:
    """MLflow's own text has the whole URI."""
    url = "http://user:secret@127.0.0.1:9/api/2.0/mlflow: failed"

    def fail() -> None:
        raise MlflowException(f"API request to {url} with exception")

    with pytest.raises(RegistryUnavailableError) as raised:
        call("listing models", fail)
    assert "secret" not in str(raised.value)
    assert "http://user@127.0.0.1:9/api/2.0/mlflow" in str(raised.value)
