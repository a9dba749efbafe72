"""The command line against real things: a registry in a temp home, an HTTP server that streams."""

import builtins
import inspect
import io
import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
from rich.console import Console
from rich.table import Table

from registry.errors import RegistrationError
from serve_app.cli import main as cli
from serve_app.cli.commands.common import print_table
from serve_app.cli.sse import IncompleteStreamError, StreamReader
from serve_app.home import cause, default_home, prepare
from tests.openai_server import OpenAIServer, event, openai_server
from tests.ports import free_port
from tests.registry_helpers import embedded_uri, empty_home
from tests.serve_folders import make_adapter_folder, make_base_folder

# Signature modules whose bodies are in one module of the same name; others: one a command.


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return empty_home(tmp_path / "home", monkeypatch)


@pytest.fixture(scope="module")
def served() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


def run(*words: str) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    code = ended.value.code
    return code if isinstance(code, int) else 0


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    waiting = iter(lines)

    def read(prompt: str = "") -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)


# -- help ---------------------------------------------------------------------------------------

EVERY_HELP = """
import sys
from contextlib import suppress
import rich, typer
from serve_app.cli import main as cli

def walk(command, words):
    with suppress(SystemExit):
        cli.main([*words, "--help"])
    for name, below in getattr(command, "commands", {}).items():
        walk(below, [*words, name])

walk(typer.main.get_command(cli.build()), [])
foreign = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
print(*sorted(foreign), file=sys.stderr)
"""


def test_every_help_imports_typer_and_rich_and_no_other_library() -> None:
    """So that it answers at once: a body's libraries take seconds."""
    done = subprocess.run([sys.executable, "-c", EVERY_HELP], capture_output=True, text=True)
    assert done.stdout.count("Usage: ") > 25
    loaded = set(done.stderr.splitlines()[-1].split())
    heavy = "torch ray mlflow numpy transformers fastapi pydantic safetensors tokenizers httpx yaml"
    assert loaded.isdisjoint({*heavy.split(), "msgspec", "jinja2", "starlette", "sqlalchemy"})
    assert {"typer", "rich", "serve_app"} <= loaded


def commands() -> Iterator[tuple[str, Any]]:
    waiting: list[tuple[str, Any]] = [("loraplex", typer.main.get_command(cli.build()))]
    while waiting:
        name, command = waiting.pop()
        yield name, command
        below = getattr(command, "commands", {})
        waiting += [(f"{name} {word}", one) for word, one in below.items()]


def test_every_command_option_and_argument_has_a_help_text() -> None:
    found = dict(commands())
    assert "loraplex canary start" in found
    assert [name for name, command in found.items() if not command.help] == []
    bare = [
        f"{name} {one.name}"
        for name, command in found.items()
        for one in command.params
        if not getattr(one, "help", None)
    ]
    assert bare == []


def test_every_signature_has_a_body_with_the_same_parameters() -> None:
    found = 0
    for name, command in commands():
        signature = inspect.unwrap(command.callback or (lambda: None))
        if signature.__module__ == "serve_app.cli.signatures":
            bodies = "register" if " register " in name else signature.__name__
            body = getattr(import_module(f"serve_app.cli.commands.{bodies}"), signature.__name__)
            assert list(inspect.signature(body).parameters) == list(
                inspect.signature(signature).parameters
            ), name
            found += 1
    assert found == 8


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"loraplex {version('loraplex')}\n"


# -- a home that cannot be used -----------------------------------------------------------------

NEEDS_HOME = (("models",), ("demo",), ("serve", "configs/quickstart.yaml"), ("check", "x"))


@pytest.mark.parametrize("words", NEEDS_HOME, ids=lambda words: words[0])
def test_a_home_that_is_a_file_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    (tmp_path / "file").write_text("")
    for home, reason in (("file", "is a file"), ("file/below", "is below")):
        monkeypatch.setenv("LORAPLEX_HOME", str(tmp_path / home))
        assert run(*words) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: LORAPLEX_HOME ({tmp_path / home}) {reason}")
        assert error.count("\n") == 1


def test_a_full_disk_is_one_sentence(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    assert run("models") == 1
    error = f"error: LORAPLEX_HOME ({home}) has less than 4 MiB free; set LORAPLEX_HOME"
    assert capsys.readouterr().err.startswith(error)


def test_a_disk_that_is_full_in_the_middle_names_the_home(home: Path) -> None:
    words = cause(OSError(28, "No space left on device"))
    assert words.startswith(f". LORAPLEX_HOME ({home}) has ")


def test_a_new_home_is_its_owners_alone_and_an_existing_one_keeps_its_mode(tmp_path: Path) -> None:
    assert stat.S_IMODE(prepare(tmp_path / "new" / "home").stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    assert stat.S_IMODE(prepare(tmp_path / "shared").stat().st_mode) == 0o755


def test_the_default_home_is_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LORAPLEX_HOME")
    (tmp_path / ".loraplex").mkdir(mode=0o755)
    assert stat.S_IMODE(prepare(default_home()).stat().st_mode) == 0o700


# -- tables and JSON ----------------------------------------------------------------------------


def test_a_piped_table_cuts_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    name = "adapter-" * 60
    table = Table("adapter", "base", box=None)
    table.add_row(name, name)
    print_table(table)
    assert capsys.readouterr().out.count(name) == 2


def test_a_narrow_terminal_folds_a_name() -> None:
    table = Table("adapter", box=None)
    table.add_row("x" * 100)
    print_table(table)  # sets how the cells overflow
    narrow = Console(file=io.StringIO(), width=30)
    narrow.print(table)
    shown = cast(io.StringIO, narrow.file).getvalue()
    assert shown.count("x") == 100


def test_models_and_doctor_print_json_with_stable_names(
    tmp_path: Path, served: OpenAIServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run("register", "base", str(make_base_folder(tmp_path / "base")), "--name", "tiny")
    capsys.readouterr()
    assert run("models", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"bases", "adapters", "rejected", "dangling"}
    assert (found["bases"][0]["name"], found["bases"][0]["aliases"]) == ("tiny", ["champion"])
    assert run("models", "--json", "--url", served.url) == 0
    assert "id" in json.loads(capsys.readouterr().out)["models"][0]
    run("doctor", "--json", "--port", "1")
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert findings[0].keys() == {"what", "state", "words", "remedy"}


# -- register and models ----------------------------------------------------------------------


def test_what_is_registered_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = make_base_folder(tmp_path / "base")
    adapter = make_adapter_folder(tmp_path / "adapter", rank=4)
    assert run("register", "base", str(base), "--name", "tiny") == 0
    words = ("register", "adapter", str(adapter), "--name", "pirate", "--base", "tiny")
    assert run(*words, "--alias", "canary") == 0
    out = capsys.readouterr().out
    assert "Base model tiny version 1 is registered" in out
    assert "Adapter pirate version 1 is registered" in out
    assert "q_proj, v_proj" in out
    assert run("models") == 0
    listed = capsys.readouterr().out
    assert "tiny@1 @champion  LlamaForCausalLM" in listed
    assert "pirate@1 @canary  rank 4  q_proj,v_proj" in listed


def test_adapter_without_effect_is_refused_unless_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("register", "base", str(make_base_folder(tmp_path / "base")), "--name", "tiny")
    adapter = make_adapter_folder(tmp_path / "adapter", b_scale=0.0)
    words = ("register", "adapter", str(adapter), "--name", "noop", "--base", "tiny")
    assert run(*words) == 1
    assert "--allow-noop" in capsys.readouterr().err
    assert run(*words, "--allow-noop") == 0
    assert "warning: the adapter changes nothing" in capsys.readouterr().out
    run("models")
    assert "changes nothing" in capsys.readouterr().out


def test_refusal_is_one_sentence_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("register", "base", str(make_base_folder(tmp_path / "base")), "--name", "tiny")
    adapter = make_adapter_folder(tmp_path / "adapter", hidden_size=64)
    assert run("register", "adapter", str(adapter), "--name", "wide", "--base", "tiny") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: adapter 'wide' for base tiny@1 is refused")
    assert "Traceback" not in error
    run("models")
    assert "wide" not in capsys.readouterr().out


def test_empty_registry_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models") == 0
    assert "loraplex demo" in capsys.readouterr().out


def test_a_command_that_reads_the_registry_does_not_create_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "fresh"
    monkeypatch.setenv("LORAPLEX_HOME", str(home))
    file = tmp_path / "new" / "mlflow.db"
    uri = f"sqlite:///{file}"
    adapter = make_adapter_folder(tmp_path / "adapter", rank=4)
    served = tmp_path / "serve.yaml"
    served.write_text(
        f"http_options: {{host: 127.0.0.1, port: {free_port()}}}\n"
        "applications:\n- name: p\n  route_prefix: /\n  import_path: serve_app.app:build\n"
        f"  args: {{models: [{{name: tiny}}], registry: {{tracking_uri: '{uri}'}}}}\n"
    )
    for words in (
        ("models", "--tracking-uri", uri),
        ("check", "pirate", "--tracking-uri", uri),
        ("register", "adapter", str(adapter), "--name", "a", "--base", "b", "--tracking-uri", uri),
        ("warm", str(served)),
    ):
        assert run(*words) == 1
        expected = f"error: the registry {uri} does not exist: there is no file {file}"
        assert capsys.readouterr().err.startswith(expected)
    assert run("serve", str(served)) == 1
    assert "Register it first" in capsys.readouterr().err
    run("doctor")
    assert run("models") == 0  # of a new home
    assert not file.parent.exists()
    assert not (home / "mlflow.db").exists()


def test_a_command_that_reads_tries_once_whether_the_home_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Path] = []
    monkeypatch.setattr(
        "serve_app.cli.commands.store.prepare", lambda home: prepared.append(prepare(home))
    )
    for register in (False, True):
        if register:
            run("register", "base", str(make_base_folder(tmp_path / "base")), "--name", "tiny")
        prepared.clear()
        assert run("models") == 0
        assert prepared == [default_home()]


def test_a_missing_registry_of_the_environment_is_named_and_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other/mlflow.db")
    assert run("models") == 1
    assert f"sqlite:///{tmp_path}/other/mlflow.db does not exist" in capsys.readouterr().err
    assert run("doctor") == 1
    assert "does not exist" in capsys.readouterr().out
    assert not (tmp_path / "other").exists()


def test_registry_that_cannot_be_reached_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "--tracking-uri", "nonsense://nowhere") == 1
    assert "nonsense" in capsys.readouterr().err


def test_models_of_a_running_server(
    served: OpenAIServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("models", "--url", served.url) == 0
    assert "tiny:pirate" in capsys.readouterr().out


# -- chat ---------------------------------------------------------------------------------------


def test_chat_streams_an_answer_and_keeps_the_conversation(
    served: OpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "/system Be brief.", "Hello", "Again", "/quit")
    assert run("chat", "--url", served.url) == 0
    out = capsys.readouterr().out
    assert "Arr, matey![2J" in out
    assert "\x1b" not in out  # what a model writes must not steer the terminal
    body = served.bodies[-1]
    assert body["model"] == "tiny"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Arr, matey!\x1b[2J"},
        {"role": "user", "content": "Again"},
    ]


def test_chat_switches_adapters_and_back(
    served: OpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = len(served.bodies)
    type_lines(
        monkeypatch, "/adapter pirate", "Hi", "/reset", "/adapter nobody", "/adapter none", "Hi"
    )
    assert run("chat", "--url", served.url) == 0
    assert [body["model"] for body in served.bodies[before:]] == ["pirate", "tiny"]
    assert len(served.bodies[-1]["messages"]) == 1  # type: ignore[arg-type]
    assert "does not serve 'nobody'" in capsys.readouterr().out


def test_chat_reports_a_cut_stream_and_forgets_the_turn(
    served: OpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "Hello", "Again")
    assert run("chat", "cut", "--url", served.url) == 0
    assert "without a finish reason" in capsys.readouterr().out
    assert len(served.bodies[-1]["messages"]) == 1  # type: ignore[arg-type]


def test_ctrl_c_stops_the_answer_not_the_program(
    served: OpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "Go on and on", "/system x", "/quit")
    served.on_endless = lambda: os.kill(os.getpid(), signal.SIGINT)
    # A shell starts its background jobs, and so a test run among them, without this handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run("chat", "endless", "--url", served.url) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    out = capsys.readouterr().out
    assert "(stopped)" in out
    assert "Instructions set." in out


def test_chat_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chat", "--url", "http://127.0.0.1:1") == 1
    assert "loraplex serve" in capsys.readouterr().err


def test_an_address_without_a_protocol_is_no_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "--url", "localhost:8000") == 1
    words = "localhost:8000 is not a URL: it must begin with http:// or https://"
    assert words in " ".join(capsys.readouterr().err.split())


# -- bench --------------------------------------------------------------------------------------


def bench(served: OpenAIServer, json_file: Path, models: str, *more: str) -> int:
    words = ("bench", "--url", served.url, "--models", models, "--json", str(json_file))
    return run(*words, "--requests", "8", "--concurrency", "3", *more)


def last_line(path: Path) -> dict[str, object]:
    line: dict[str, object] = json.loads(path.read_text().splitlines()[-1])
    return line


def test_bench_counts_tokens_and_times(
    served: OpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(served, tmp_path / "b.jsonl", "tiny,tiny:pirate") == 0
    lines = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [line["model"] for line in lines] == ["tiny", "tiny:pirate", "all"]
    assert [line["requests"] for line in lines] == [4, 4, 8]
    assert lines[-1]["output_tokens"] == 32
    assert lines[-1]["failures"] == 0
    assert lines[-1]["ttft_p50_ms"] > 0
    assert "tokens/s" in capsys.readouterr().out


def test_bench_without_streams_has_no_first_token_time(
    served: OpenAIServer, tmp_path: Path
) -> None:
    assert bench(served, tmp_path / "b.jsonl", "tiny", "--no-stream") == 0
    line = last_line(tmp_path / "b.jsonl")
    assert (line["output_tokens"], line["ttft_p50_ms"]) == (32, None)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("cut", "without a finish reason"),
        ("no-done", r"without [DONE]"),
        ("error", "the engine died"),
        ("unknown", "answered 404: no model is named 'unknown'"),
    ],
)
def test_bench_counts_what_only_looks_like_an_answer_as_failed(
    served: OpenAIServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    reason: str,
) -> None:
    assert bench(served, tmp_path / "b.jsonl", f"tiny,{model}") == 1
    line = last_line(tmp_path / "b.jsonl")
    assert (line["requests"], line["failures"]) == (8, 4)
    error = capsys.readouterr().err
    assert "4 of 8 requests failed" in error
    assert reason in error


def test_stream_reader_refuses_what_is_no_chunk() -> None:
    reader = StreamReader()
    assert reader.read(": a comment") == ""
    assert reader.read(event({"choices": [{"delta": {"content": "x"}}]}).strip()) == "x"
    with pytest.raises(IncompleteStreamError, match="no chat chunk"):
        reader.read("data: {")


# -- doctor -------------------------------------------------------------------------------------


def test_doctor_says_what_is_missing_and_is_content(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--port", "1") in (0, 1)  # 1 where somebody else's kernels are installed
    out = capsys.readouterr().out
    for word in ("Python", "torch", "cores", "memory", "disk", "home", "registry"):
        assert word in out
    assert "loraplex demo" in out


@pytest.mark.parametrize("version", [1, 2])
def test_doctor_counts_the_memory_of_its_container(
    version: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text(f"MemTotal: {64 * 1024**2} kB\nMemAvailable: {48 * 1024**2} kB\n")
    monkeypatch.setattr("engine.host_memory._MEMINFO", meminfo)
    monkeypatch.setattr("engine.host_memory._CGROUP", group)
    folder = group / "memory" if version == 1 else group
    folder.mkdir(parents=True)
    limit, used = folder / "memory.max", folder / "memory.current"
    cached = f"inactive_file {1024**3}\n"
    if version == 1:
        limit, used = folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"
        cached = f"inactive_file 4096\ntotal_inactive_file {1024**3}\n"
    used.write_text(f"{6 * 1024**3}\n")
    (folder / "memory.stat").write_text(cached)
    for words, shown in (
        (str(8 * 1024**3), "8.0 GiB, 3.0 GiB available"),
        ("max" if version == 2 else str(2**63 - 4096), "64.0 GiB, 48.0 GiB available"),
    ):
        limit.write_text(f"{words}\n")
        run("doctor", "--json", "--port", "1")
        findings = json.loads(capsys.readouterr().out)["findings"]
        (memory,) = [one for one in findings if one["what"] == "memory"]
        assert memory["words"] == shown


def test_doctor_looks_at_the_registry_of_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = embedded_uri(tmp_path / "other")
    folder = make_base_folder(tmp_path / "base")
    assert run("register", "base", str(folder), "--name", "tiny", "--tracking-uri", other) == 0
    for uri, words in ((other, "1 base and 0 adapter versions"), (f"{other}2", "does not exist")):
        capsys.readouterr()
        run("doctor", "--json", "--port", "1", "--tracking-uri", uri)
        findings = json.loads(capsys.readouterr().out)["findings"]
        (found,) = [one for one in findings if one["what"] == "registry"]
        assert found["words"].startswith(uri)
        assert words in found["words"]
    assert run("doctor", "--base", str(folder), "--tracking-uri", other) == 1
    assert "--tracking-uri" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["refused", "closed"])
def test_a_registry_that_is_down_is_one_sentence_that_says_what_to_do(
    answer: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    server = socket.create_server(("127.0.0.1", 0))
    uri = f"http://127.0.0.1:{server.getsockname()[1]}"
    why = {"refused": "Connection refused", "closed": "the connection was closed"}[answer]
    if answer == "closed":
        threading.Thread(target=_close_each, args=(server,), daemon=True).start()
    else:
        server.close()
    assert run("models", "--tracking-uri", uri) == 1
    assert capfd.readouterr().err == (
        f"error: MLflow at {uri}, listing models: no answer ({why}); start it, or name another "
        "registry in MLFLOW_TRACKING_URI\n"
    )
    server.close()
    if answer == "refused":
        assert run("doctor", "--tracking-uri", uri, "--json") == 1
        findings = json.loads(capfd.readouterr().out)["findings"]
        (found,) = [one for one in findings if one["what"] == "registry"]
        assert found["words"].endswith(f"{uri}, listing models: no answer ({why})")


def _close_each(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            server.accept()[0].close()


@pytest.mark.parametrize("kind", [("base",), ("adapter", "--base", "tiny")])
def test_a_folder_that_is_missing_is_not_called_a_file(
    tmp_path: Path, kind: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for name, words in (("model.gguf", "does not exist"), ("file", "is not a folder")):
        path = tmp_path / name
        assert run("register", kind[0], str(path), "--name", "mine", *kind[1:]) == 1
        assert f"{path} {words}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("runs:/12ab/adapter", "`mlflow artifacts download -u runs:/12ab/adapter -d FOLDER`"),
        ("models:/pirate/3", "`mlflow artifacts download -u models:/pirate/3 -d FOLDER`"),
        ("mlflow-artifacts:/1/a", "download -u mlflow-artifacts:///1/a -d FOLDER`"),
        ("file:///data/my%20adapter", "is a URI, and a folder is needed: /data/my adapter\n"),
        ("hf://org/name", "`hf download org/name --local-dir FOLDER`, then register FOLDER\n"),
        ("https://huggingface.co/org/name", "`hf download org/name --local-dir FOLDER`"),
        ("org/name", "does not exist; if it is a repository of the Hugging Face Hub: `hf download"),
        ("s3://bucket/adapter", "fetch its files, then register their folder\n"),
        ("org/missing.gguf", "org/missing.gguf does not exist\n"),
    ],
)
def test_an_address_in_place_of_a_folder_is_refused_with_the_command_that_fetches_it(
    capsys: pytest.CaptureFixture[str], address: str, words: str
) -> None:
    for kind in (("base",), ("adapter", "--base", "tiny")):
        assert run("register", kind[0], address, "--name", "mine", *kind[1:]) == 1
        said = capsys.readouterr().err
        assert words in said
        is_version = address.startswith(("runs", "models", "mlflow")) and kind[0] == "adapter"
        assert ("its tag loraplex.base names the base" in said) == is_version
    assert run("doctor", "--base", address) == 1
    assert words in capsys.readouterr().err


def test_doctor_of_a_gguf_file_that_is_cut_off_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    assert run("doctor", "--base", str(path)) == 1
    assert "tiny.gguf cannot be read: " in capsys.readouterr().err


def test_doctor_fails_where_the_home_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LORAPLEX_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", embedded_uri(tmp_path / "other"))
    assert run("doctor") == 1
    captured = capsys.readouterr()
    assert "set LORAPLEX_HOME" in captured.out
    assert "must be put right" in captured.err


def test_doctor_of_a_base_says_whether_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_base_folder(tmp_path / "base")
    assert run("doctor", "--base", str(base), "--memory", "80") == 0
    assert "yes, with about" in capsys.readouterr().out
    assert run("doctor", "--base", str(base), "--memory", "0.1") == 1
    captured = capsys.readouterr()
    assert "no: nothing is left for KV" in captured.out
    assert "before loraplex can serve this base" in captured.err


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ((), "a larger device, a smaller base, or engine.quantization: fp8"),
        (
            ("--quantization", "auto"),
            "a larger device, a smaller base, or engine.quantization: fp8",
        ),
        (("--quantization", "fp8"), "a larger device or a smaller base"),
        (("--ranks", "2"), "a larger device or a smaller base"),
    ],
)
def test_doctor_advises_only_what_is_not_set_and_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], remedy: str
) -> None:
    base = make_base_folder(tmp_path / "base")
    assert run("doctor", "--base", str(base), "--memory", "0.1", "--json", *options) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    (unfit,) = [finding for finding in findings if finding["what"] == "fits"]
    assert unfit["remedy"] == remedy


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("--quantization", "fp8_e4m3", "auto, none, fp8, int4"),
        ("--kv-cache-dtype", "fp8_e4m3", "auto, fp8"),
    ],
)
def test_doctor_says_which_value_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, known: str
) -> None:
    base = make_base_folder(tmp_path / "base")
    assert run("doctor", "--base", str(base), option, value) == 1
    words = " ".join(capsys.readouterr().err.split())
    assert f"{option} is {value}: known are {known}; did you mean fp8?" in words


def test_doctor_refuses_a_base_that_is_no_folder_and_a_wrong_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_base_folder(tmp_path / "base")
    for path, words in (
        (tmp_path / "nowhere", "does not exist"),
        (base / "config.json", "is not a folder"),
    ):
        assert run("doctor", "--base", str(path)) == 1
        assert f"--base {path} {words}" in capsys.readouterr().err
    for memory in ("-1", "0", "nan", "inf", "1e300"):
        assert run("doctor", "--base", str(base), "--memory", memory) == 2
        assert "'--memory'" in capsys.readouterr().err
    assert run("doctor", "--memory", "80") == 1
    assert "--memory is 80: it is for --base FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("canary", "start", "pirate", "--version", "1", "--weight", "nan"), "weight"),
        (("bases", "add", "tiny", "--idle-timeout", "nan"), "idle_timeout_s"),
    ],
)
def test_no_number_is_not_sent(
    words: tuple[str, ...],
    field: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LORAPLEX_ADMIN_TOKEN", "token")
    assert run(*words) == 1
    assert f"{field}: must be a finite number, got nan" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--parity-bound", "--max-minutes", "--max-saved-mib", "--max-error"]
)
def test_options_of_numbers_refuse_what_is_none(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["-1", "nan", *(["inf"] if option in ("--max-saved-mib", "--max-error") else [])]
    for value in wrong:
        words = (str(tmp_path), "--name", "a", "--base", "b", option, value)
        assert run("register", "adapter", *words) == 2
        assert option in capsys.readouterr().err


def test_errors_of_the_rooms_become_sentences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> object:
        raise RegistrationError("no [such] thing")

    monkeypatch.setattr(cli, "build", refuse)
    assert run("models") == 1
    assert capsys.readouterr().err == "error: no [such] thing\n"


def test_command_of_an_extra_that_is_missing_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("serve_app.cli.commands.demo", "serve_app.cli.demo.prepare", "engine.tools.gguf"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run("demo") == 1
    assert "pip install 'loraplex[demo]'" in capsys.readouterr().err
    assert run("--help") == 0
    assert "doctor" in capsys.readouterr().out
