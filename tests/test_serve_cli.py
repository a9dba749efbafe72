"""The command line against real things: a registry in a temp home, an HTTP server that streams."""

import builtins
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.errors import RegistrationError
from serve_app import cli
from serve_app.sse import StreamError, StreamReader
from tests.openai_server import OpenAIServer, event, openai_server
from tests.registry_helpers import embedded_uri
from tests.serve_folders import make_adapter_folder, make_base_folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    embedded_uri(home)
    monkeypatch.setenv("LORAPLEX_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return home


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
    assert run("chat", "endless", "--url", served.url) == 0
    out = capsys.readouterr().out
    assert "(stopped)" in out
    assert "Instructions set." in out


def test_chat_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chat", "--url", "http://127.0.0.1:1") == 1
    assert "loraplex serve" in capsys.readouterr().err


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
    with pytest.raises(StreamError, match="no chat chunk"):
        reader.read("data: {")


# -- doctor -------------------------------------------------------------------------------------


def test_doctor_says_what_is_missing_and_is_content(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--port", "1") in (0, 1)  # 1 where somebody else's kernels are installed
    out = capsys.readouterr().out
    for word in ("Python", "torch", "cores", "memory", "disk", "home", "registry"):
        assert word in out
    assert "loraplex demo" in out


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
    for name in ("serve_app.commands.demo", "serve_app.demo.prepare", "engine.gguf"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run("demo") == 1
    assert "pip install 'loraplex[demo]'" in capsys.readouterr().err
    assert run("--help") == 0
    assert "doctor" in capsys.readouterr().out
