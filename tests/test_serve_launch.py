"""The launcher's failures and its end: what is said, and that nothing is left running."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Literal

import httpx
import pytest

from registry.catalog import Catalog
from registry.client import Registry
from registry.entities import BaseVersion
from serve_app import app
from serve_app.cli import launch
from serve_app.cli import main as cli
from serve_app.cli.commands import serve
from serve_app.cli.commands.client import ModelLine
from serve_app.cli.commands.serve import _print_examples, drain
from serve_app.cli.serve_child import start_ray
from serve_app.config import EngineArgs, IngressArgs, ModelArgs, PlatformArgs, RegistryArgs
from serve_app.control.cached_registry import stored_catalog_file
from serve_app.serve_file import ServeFile, ServeFileError, read_serve_file
from tests.ports import free_port
from tests.registry_helpers import BASE_FACTS, base_folder, embedded_uri, register_base
from tests.waiting import eventually

FILE = """
proxy_location: HeadOnly
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - name: api
    route_prefix: /
    import_path: serve_app.app:build
    args:
      models: [{{name: tiny}}]
"""
PROGRAM = "from serve_app.cli.main import main; main()"
START_S = 300


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORAPLEX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    register_base(Registry(embedded_uri(tmp_path / "home")), tmp_path / "content")
    return tmp_path / "home"


def write_file(folder: Path, port: int, old: str = "", new: str = "") -> Path:
    path = folder / "serve.yaml"
    path.write_text(FILE.format(port=port).replace(old, new) if old else FILE.format(port=port))
    return path


# -- the file -------------------------------------------------------------------------------------


def test_good_file_says_where_it_listens(tmp_path: Path) -> None:
    assert read_serve_file(write_file(tmp_path, 8123)).url == "http://127.0.0.1:8123"
    gateway = "args: {ingress: {trusted_gateway: envoy}, models: [{name: tiny}]}"
    path = write_file(tmp_path, 8123, "127.0.0.1", "0.0.0.0")
    text = path.read_text().replace("args:\n      models: [{name: tiny}]", gateway)
    path.write_text(text)
    everywhere = read_serve_file(path)
    assert (everywhere.host, everywhere.url) == ("0.0.0.0", "http://127.0.0.1:8123")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", '"::1"'])
def test_a_loopback_address_needs_no_gateway(tmp_path: Path, host: str) -> None:
    read_serve_file(write_file(tmp_path, 8123, "127.0.0.1", host))


@pytest.mark.parametrize("host", ["0.0.0.0", '"::"', "192.0.2.7", "server.example"])
def test_a_host_for_other_machines_is_refused_without_a_gateway(tmp_path: Path, host: str) -> None:
    with pytest.raises(ServeFileError, match=r"http_options\.host.*ingress\.trusted_gateway"):
        read_serve_file(write_file(tmp_path, 8123, "127.0.0.1", host))


def test_a_file_that_names_no_host_is_refused_without_a_gateway(tmp_path: Path) -> None:
    """Serve's own default is every interface."""
    with pytest.raises(ServeFileError, match=r"http_options\.host is '0\.0\.0\.0'"):
        read_serve_file(write_file(tmp_path, 8123, "host: 127.0.0.1, ", ""))


def test_an_application_on_a_host_for_other_machines_is_not_built_without_a_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "_http_host", lambda: "0.0.0.0")
    with pytest.raises(ValueError, match=r"http_options\.host.*ingress\.trusted_gateway"):
        app.build(PlatformArgs())
    app.build(PlatformArgs(ingress=IngressArgs(trusted_gateway="envoy")))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("name: tiny", "nmae: tiny", r"args\.models\.0\.nmae"),
        ("[{name: tiny}]", "[]", "no base model"),
        ("[{name: tiny}]", "[{name: tiny}, {name: tiny}]", "twice"),
        ("{name: tiny}", "{name: tiny, engine: {dtype: int3}}", r"engine\.dtype"),
        ("port: 8123", "port: many", r"http_options\.port"),
        ("port: 8123", "port: 70000", r"http_options\.port is 70000, and must be from 1 to 65535"),
        ("port: 8123", "port: -1", r"http_options\.port is -1"),
        ("serve_app.app:build", "other:build", "exactly one application.*has 0.*'other:build'"),
        ("[{name: tiny}]", "[", "not YAML"),
        ("http_options:", "http_option:", r"http_option is no key of Ray Serve's; known are appl"),
        ("port: 8123", "prot: 8123", r"http_options\.prot is no key of Ray Serve's"),
        ("route_prefix:", "route_prefx:", r"applications\.0\.route_prefx is no key of Ray Serve's"),
        (
            "args:",
            "args: {models: [{name: big}]}\n    args:",
            r"the key args stands there twice.*line",
        ),
        ("{name: tiny}", "{name: tiny, name: big}", "the key name stands there twice"),
        ("{name: tiny}", "{name: tiny, max_queued_requests: 0}", "max_queued_requests"),
        (
            "{name: tiny}",
            "{name: tiny, engine: {max_model_length: 9}}",
            r"args\.models\.0\.engine\.max_model_length: is not a known field, got 9; did you mean "
            r"max_model_len\?",
        ),
        ("args:", "args:\n      registy: {}", r"args\.registy: .*; did you mean registry\?"),
        (
            "args:",
            "args:\n      tenancy: {prices: {big: {outputs: 1}}}",
            r"args\.tenancy\.prices\.big\.outputs: .*; did you mean output\?",
        ),
        ("{name: tiny}", "{name: tiny, router: {policy: 'no:X'}}", "policy 'no:X' cannot be imp"),
        ("args:", "args:\n      registry: {artifact_schemes: [S3]}", "artifact_schemes"),
    ],
)
def test_bad_file_is_refused_with_place_and_reason(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    with pytest.raises(ServeFileError, match=reason):
        read_serve_file(write_file(tmp_path, 8123, old, new))


def test_merged_keys_may_be_replaced(tmp_path: Path) -> None:
    """A chain of merges, of which the deeper mapping is read later than the one that uses it."""
    chain = """logging_config: {<<: *loud, encoding: JSON}
applications:
  - name: other
    route_prefix: /other
    import_path: a:b
    logging_config: &quiet {log_level: WARNING, enable_access_log: false}
  - name: third
    route_prefix: /third
    import_path: a:b
    logging_config: &loud {<<: *quiet, log_level: DEBUG}
"""
    path = write_file(tmp_path, 8123)
    head, rest = path.read_text().split("applications:\n")
    top, apps = chain.split("applications:\n")
    path.write_text(f"{head}applications:\n{apps}{rest}{top}")
    assert read_serve_file(path).port == 8123
    path.write_text("a: " + "[" * 3000)
    with pytest.raises(ServeFileError, match="nested too deeply"):
        read_serve_file(path)


def test_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServeFileError, match="cannot be read"):
        read_serve_file(tmp_path / "nowhere.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ServeFileError, match="no mapping"):
        read_serve_file(tmp_path / "empty.yaml")


# -- refusals before anything starts --------------------------------------------------------------


def refused(path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", str(path)])
    assert ended.value.code == 1
    assert not (home / "logs").exists()
    return capsys.readouterr().err


def test_taken_port_is_said_before_starting(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port} on 127.0.0.1" in refused(write_file(tmp_path, port), home, capsys)


def test_second_server_of_a_home_names_the_first(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_file(tmp_path, free_port())
    with launch.only_one(home, "http://127.0.0.1:1"):
        error = refused(path, home, capsys)
    assert f"already runs with home {home}: process {os.getpid()} at http://127.0.0.1:1" in error


def test_bad_file_ends_the_command(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_file(tmp_path, 8123, "name: tiny", "nmae: tiny")
    assert refused(path, home, capsys).startswith(f"error: {path}: args.models.0.")


def test_a_base_that_is_not_registered_ends_the_command_with_what_to_do(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_file(tmp_path, free_port(), "name: tiny", "name: nobody@prod")
    error = refused(path, home, capsys)
    assert "args.models: no base model is named 'nobody'" in error
    assert "loraplex register base FOLDER --name nobody" in error


def test_ranks_that_cannot_share_the_base_end_the_command(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 72,
        "intermediate_size": 144,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 64,
    }
    folder = base_folder(tmp_path / "nine")
    (folder / "config.json").write_text(json.dumps(config))
    Registry(embedded_uri(home)).register_base(folder, "nine", facts=BASE_FACTS)
    engine = "name: nine, engine: {device: cpu, tensor_parallel_size: 2}"
    error = refused(write_file(tmp_path, free_port(), "name: tiny", engine), home, capsys)
    words = "tensor_parallel_size is 2, which does not divide num_attention_heads 9"
    assert f"args.models.0.engine: {words}" in error


@pytest.mark.parametrize(
    "field", ["kv_cache_bytes", "kv_host_bytes", "adapter_pool_bytes", "adapter_host_bytes"]
)
def test_memory_that_the_machine_lacks_ends_the_command_with_both_numbers(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    engine = f"name: tiny, engine: {{device: cpu, {field}: 9000GiB}}"
    error = refused(write_file(tmp_path, free_port(), "name: tiny", engine), home, capsys)
    assert f"args.models.0.engine: {field} is 9000.000 GiB, but this machine has" in error


@pytest.mark.parametrize(
    ("devices", "has_gpu", "program", "wanted"),
    [
        (["auto"], True, "/bin/haproxy", True),
        (["cpu", "cuda"], True, "/bin/haproxy", True),
        ([], True, "/bin/haproxy", True),  # bases may come later
        (["cpu"], True, "/bin/haproxy", False),
        (["auto"], False, "/bin/haproxy", False),
        (["auto"], True, None, False),
    ],
)
def test_haproxy_is_in_front_of_bases_on_a_gpu(
    devices: list[Literal["auto", "cpu", "cuda"]],
    has_gpu: bool,
    program: str | None,
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = [
        ModelArgs(name=f"base-{number}", engine=EngineArgs(device=device))
        for number, device in enumerate(devices)
    ]
    file = ServeFile(Path("serve.yaml"), "127.0.0.1", 8000, PlatformArgs(models=models))
    monkeypatch.setattr(serve, "_has_gpu", lambda: has_gpu)
    monkeypatch.setattr(launch, "find_haproxy", lambda: program)
    assert serve._wants_haproxy(file) == wanted
    assert ("HAProxy is not installed" in capsys.readouterr().out) == (program is None)


@pytest.mark.parametrize(
    ("models", "has_gpu", "wanted"),
    [
        ([{}], False, False),
        ([{"replicas": 2}], False, True),
        ([{"autoscaling": {"max_replicas": 2}}], False, True),
        ([{}, {"engine": {"device": "cpu"}}], False, True),
        ([{}, {"engine": {"device": "cpu"}}], True, False),
        ([{"replicas": 2}], True, False),
    ],
)
def test_engines_share_cores_if_several_of_them_are_on_cpus(
    models: list[dict[str, object]], has_gpu: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = [{"name": f"base-{number}", **model} for number, model in enumerate(models)]
    args = PlatformArgs.model_validate({"models": named})
    monkeypatch.setattr(serve, "_has_gpu", lambda: has_gpu)
    assert serve._shares_cores(ServeFile(Path("serve.yaml"), "127.0.0.1", 8000, args)) == wanted


def test_the_program_of_haproxy_comes_with_ray() -> None:
    found = launch.find_haproxy()
    assert found is not None
    assert os.access(found, os.X_OK)


def test_serve_looks_for_a_dead_proxy_each_second() -> None:
    """Three checks in vain have it replaced: at Serve's own period nothing answers for 30 s."""
    name = "PROXY_HEALTH_CHECK_PERIOD_S"
    command = f"from ray.serve._private import constants; print(constants.{name})"
    done = subprocess.run(
        [sys.executable, "-c", command],
        env=os.environ | launch.SERVE_SETTINGS,
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) == 1


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_printed_commands_send_a_key_where_requests_need_one(
    has_keys: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _print_examples("http://h:1", [ModelLine("tiny"), ModelLine("a", "tiny")], has_keys=has_keys)
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if line.startswith("curl")]
    key = '-H "Authorization: Bearer $LORAPLEX_API_KEY" ' if has_keys else ""
    start = f"http://h:1/v1/chat/completions -H 'content-type: application/json' {key}-d '{{"
    assert [command.split(" ", 2)[2].startswith(start) for command in commands] == [True] * 3
    assert ("export LORAPLEX_API_KEY=KEY" in lines) is has_keys
    hint = "# Requests need a key: loraplex keys create --url http://h:1"
    assert (hint in lines) is has_keys


def test_the_hint_at_keys_leaves_the_usual_address_out(capsys: pytest.CaptureFixture[str]) -> None:
    _print_examples("http://127.0.0.1:8000", [ModelLine("tiny")], has_keys=True)
    assert capsys.readouterr().out.startswith("# Requests need a key: loraplex keys create\n")


def test_a_registry_that_says_nothing_does_not_hold_up_the_check(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its port takes connections and sends nothing."""
    monkeypatch.setattr(serve, "_REGISTRY_WAIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        # Ranks are checked with the base's files, which the registry does not send either.
        models = (ModelArgs(name="tiny", engine=EngineArgs(tensor_parallel_size=2)),)
        args = PlatformArgs(models=models, registry=RegistryArgs(tracking_uri=uri))
        wanted = ServeFile(Path("serve.yaml"), "127.0.0.1", 8000, args)
        serve._check_bases(wanted)
        told = " ".join(capsys.readouterr().out.split())
        assert "the registry does not answer, the server waits for it: no catalog of it" in told
        stored = Catalog((BaseVersion("tiny", 1, "d" * 64, ""),))
        stored_catalog_file(home / "cache", uri).write(stored)
        serve._check_bases(wanted)
    assert "starts with the last catalog that was stored here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("errors", "num_starts"),
    [
        ((), 1),
        (("The current node timed out during startup. This could",), 2),
        (("The current node timed out during startup.",) * 2, 2),
        (("no such file",), 1),
    ],
)
def test_ray_gets_a_second_start_if_its_time_limit_was_too_short(
    errors: tuple[str, ...], num_starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[dict[str, object]] = []

    def init(address: str, **options: object) -> None:
        starts.append({"address": address, **options})
        if len(starts) <= len(errors):
            raise Exception(errors[len(starts) - 1])

    monkeypatch.setattr("ray.init", init)
    if len(errors) >= num_starts:
        with pytest.raises(Exception, match=errors[-1]):
            start_ray(num_cpus=1)
    else:
        start_ray(num_cpus=1)
    assert starts == [{"address": "local", "include_dashboard": False, "num_cpus": 1}] * num_starts


class _Refusing(BaseHTTPRequestHandler):
    """Answers /ready as an ingress does whose base was refused."""

    def do_GET(self) -> None:
        body = json.dumps({"status": "tiny: its keys", "refused": "tiny: its keys"}).encode()
        self.send_response(503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_a_base_that_its_engine_refuses_ends_the_command_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "serve.log").write_text("")
    with (
        HTTPServer(("127.0.0.1", 0), _Refusing) as server,
        subprocess.Popen(["sleep", "60"]) as process,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        wanted = read_serve_file(write_file(tmp_path, server.server_port))
        child = launch.Child(process, tmp_path / "serve.log", tmp_path)
        try:
            with pytest.raises(serve.Failure, match=r"serve\.yaml: args\.models: tiny: its keys\."):
                serve._run(wanted, child, "token", [], START_S)
        finally:
            process.kill()
            server.shutdown()


def test_failed_application_is_found_in_the_log() -> None:
    text = "controller 942 -- Deploying app 'api' failed with exception:\nTraceback"
    assert launch.failed_application(text) == "api"
    assert launch.failed_application("Deploying new app 'api'.") is None


# -- the child ------------------------------------------------------------------------------------


@dataclass
class Launched:
    process: subprocess.Popen[str]
    child: int  # `serve run`, also the id of its session
    temp_folder: Path


@contextmanager
def launched(path: Path) -> Iterator[Launched]:
    """`loraplex serve`, as soon as its Ray has a raylet."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "serve", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: bool(session_leaders(process.pid)))
        (child,) = session_leaders(process.pid)
        wait_until(lambda: any("raylet" in command(pid) for pid in session(child)))
        yield Launched(process, child, temp_folder(child))
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=START_S)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not is_true():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def session(child: int) -> tuple[int, ...]:
    return launch.session_processes(child)


def session_leaders(parent: int) -> list[int]:
    """Its children that lead a session: `serve run`, and no passing child of an import."""
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [pid for pid in map(int, text.split()) if pid in session(pid)]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def variables(child: int) -> list[str]:
    return Path(f"/proc/{child}/environ").read_text().split("\0")


def temp_folder(child: int) -> Path:
    tmpdir = next(v for v in variables(child) if v.startswith("RAY_TMPDIR="))
    return Path(tmpdir.partition("=")[2])


@pytest.mark.serve
def test_dying_server_is_reported_with_its_log_and_leaves_nothing(
    home: Path, tmp_path: Path
) -> None:
    def has_begun() -> bool:
        logs = (home / "logs").glob("serve-*.log")
        return any("Running config file" in path.read_text() for path in logs)

    with launched(write_file(tmp_path, free_port())) as started:
        eventually(has_begun, START_S)
        assert "RAY_COLOR_PREFIX=0" in variables(started.child)  # the log is a file
        os.kill(started.child, signal.SIGKILL)
        out, _ = started.process.communicate(timeout=START_S)
    assert started.process.returncode == 1
    assert "The server ended with exit code -9" in out
    assert "Running config file" in out  # of its log
    assert "Traceback" not in out
    assert session(started.child) == ()
    assert not started.temp_folder.exists()


@pytest.mark.serve
def test_sigterm_ends_everything_that_was_started(home: Path, tmp_path: Path) -> None:
    with launched(write_file(tmp_path, free_port())) as started:
        started.process.send_signal(signal.SIGTERM)
        out, _ = started.process.communicate(timeout=START_S)
    assert started.process.returncode == 0
    assert "nothing is left running" in out
    assert session(started.child) == ()
    assert not started.temp_folder.exists()
    assert {path.name for path in home.iterdir()} <= {
        "mlflow.db",
        "artifacts",
        "cache",
        "serve.lock",
        "admin_token",
        "logs",
    }


# -- the drain ------------------------------------------------------------------------------------


def drained(limit_s: float, *answers: object, is_impatient: bool = False) -> tuple[bool, int]:
    """Returns the result of `drain`, and how often it asked. `answers`: a status or an open count
    each, the last one again and again."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer token"
        asked.append(str(request.url))
        one = answers[min(len(asked), len(answers)) - 1]
        if isinstance(one, Exception):
            raise one
        status = 503 if one == "away" else 200
        return httpx.Response(status, json={"open_requests": one})

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        is_empty = drain(client, "http://server", "token", limit_s, lambda: is_impatient)
    assert set(asked) <= {"http://server/admin/drain"}
    return is_empty, len(asked)


def test_draining_ends_with_the_last_open_request() -> None:
    assert drained(60, None, "away", 2, 0) == (True, 4)


def test_draining_ends_at_its_limit_at_a_second_signal_and_without_a_server() -> None:
    assert drained(0.3, 1)[0] is False
    assert drained(60, 1, is_impatient=True) == (False, 0)
    assert drained(60, httpx.ConnectError("nobody listens")) == (False, 1)


@pytest.mark.parametrize("port", [-5, 65536])
def test_a_port_beyond_the_range_is_named(port: int) -> None:
    with pytest.raises(launch.LaunchError, match=f"port: must be from 0 to 65535, got {port}"):
        launch.check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_not_blamed_on_a_program() -> None:
    words = "port 0 on 203.0.113.1 cannot be used .*; change http_options.host or "
    with pytest.raises(launch.LaunchError, match=words):
        launch.check_port("203.0.113.1", 0)
