"""The servers of `serve`: ours, and vLLM's own with the same base, tokenizer and adapters.

Both serve `random-base` and `random-base:NAME` on a port of loopback, so that the same clients
measure them. An adapter is known to both from the start and loaded at its first request: ours finds
it in the registry, vLLM in a folder (its filesystem resolver).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from serve_app.cli import launch
from serve_app.config import ADMIN_TOKEN
from tests.benchmarks.adapter_files import write_adapters
from tests.benchmarks.cases import AdapterSpec
from tests.benchmarks.children import VLLM_ENVIRONMENT
from tests.benchmarks.engine_start import take_note
from tests.benchmarks.serve_base import BASE, RANK, prepare_home, write_config, write_tokenizer
from tests.benchmarks.shapes import SHAPES, ModelShape
from tests.ports import free_port

READY_S = 300.0
_LOADS_ADAPTERS = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_PLUGINS": "lora_filesystem_resolver",
}
_STOP_S = 30.0
_TIMED_APP = "tests.benchmarks.timed_app:build"
_VLLM_LOG = "vllm.log"
_VLLM_WEIGHTS = re.compile(r"Model loading took .*? ([\d.]+) seconds")


class Ours:
    name = "ours"

    def __init__(self, args: argparse.Namespace, home: Path) -> None:
        self._args, self._home = args, home
        self._num_adapters = 0

    def prepare(self, num_adapters: int) -> list[str]:
        """Registers the base and its adapters. Returns the adapters' names."""
        args = self._args
        self._num_adapters = num_adapters
        return prepare_home(
            self._home,
            SHAPES[args.shape],
            num_adapters,
            has_weights=args.weights == "file",
            device=args.device,
        )

    @contextmanager
    def serving(self, environment: dict[str, str], *, is_timed: bool = False) -> Iterator[int]:
        """Runs the server and yields its port. `is_timed`: its engine notes what its start took."""
        args, home, port = self._args, self._home, free_port()
        engine: dict[str, object] = {"max_num_batched_tokens": args.batched_tokens}
        if args.weights == "dummy":
            engine["load_format"] = "dummy"
        config = write_config(
            home,
            port,
            ingresses=args.ingresses,
            engine=engine,
            pages=self._num_adapters,
            import_path=_TIMED_APP if is_timed else "serve_app.app:build",
        )
        url = f"http://127.0.0.1:{port}"
        with serving(config, home / "serve.log", url, environment, args.haproxy):
            yield port

    def start_parts(self) -> dict[str, float | None]:
        """Returns the seconds of the engine's start, when the server is ready: its weights, and
        the rest of it."""
        note = take_note(self._home)
        return {
            "weights_s": round(note["weights_s"], 2),
            "engine_rest_s": round(note["open_s"] - note["weights_s"], 2),
        }


class Vllm:
    name = "vllm"

    def __init__(self, args: argparse.Namespace, home: Path) -> None:
        self._args, self._home = args, home

    def prepare(self, num_adapters: int) -> list[str]:
        """Writes the base's files and the adapters. Returns the adapters' names."""
        args = self._args
        return prepare_vllm(self._home, SHAPES[args.shape], num_adapters, args.device)

    @contextmanager
    def serving(self, environment: dict[str, str], *, is_timed: bool = False) -> Iterator[int]:
        """Runs the server and yields its port. Its log always has the time of its weights."""
        args, port = self._args, free_port()
        command = vllm_command(self._home, port, args.vllm_slots, args.vllm_tokens)
        with serving_vllm(command, self._home, port, args.vllm, environment):
            yield port

    def start_parts(self) -> dict[str, float | None]:
        return {"weights_s": vllm_weights_s(self._home / _VLLM_LOG)}


@contextmanager
def serving(
    config: Path, log: Path, url: str, extra: dict[str, str], haproxy: bool
) -> Iterator[launch.Child]:
    """Runs our server. `extra`: variables of its environment. Clients that this process starts
    inherit the admin token, without which they do not receive the reasons of an answer."""
    os.environ.setdefault(ADMIN_TOKEN, secrets.token_hex())
    child = launch.start(config, log, os.environ | extra, haproxy=haproxy)
    try:
        _wait_ready(
            f"{url}/ready",
            lambda: launch.log_text(child),
            lambda text: child.has_ended() or launch.failed_application(text) is not None,
        )
        yield child
    finally:
        launch.stop(child)


def prepare_vllm(home: Path, shape: ModelShape, num_adapters: int, device: str) -> list[str]:
    """Writes the base's configuration and tokenizer, and the adapters in folders of their own.
    Returns the adapters' names."""
    base = shape.write_config(home / "base")
    write_tokenizer(base, shape.vocab_size)
    settings = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    specs = [AdapterSpec(RANK, index) for index in range(num_adapters)]
    found = _folder_of_adapters(home)
    found.mkdir(exist_ok=True)
    for source in write_adapters(home / "adapters", shape, specs, device):
        folder = found / f"{BASE}:{source.name}"
        folder.mkdir()
        os.link(source / "adapter_model.safetensors", folder / "adapter_model.safetensors")
        config = json.loads((source / "adapter_config.json").read_text())
        # The resolver wants the name of the base as vLLM's command line has it.
        config["base_model_name_or_path"] = str(base)
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return [spec.digest for spec in specs]


def vllm_command(home: Path, port: int, slots: int, batched_tokens: int | None) -> list[str]:
    """Returns the command of vLLM's OpenAI server. `slots`: adapters on the device at a time.
    `batched_tokens`: None leaves vLLM's own budget of a step."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(home / "base"), "--served-model-name", BASE]
    command += ["--load-format", "dummy", "--dtype", "bfloat16"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning"]
    command += ["--max-model-len", "4096", "--max-num-seqs", "256"]
    command += ["--gpu-memory-utilization", "0.8"]
    command += ["--enable-lora", "--max-loras", str(slots), "--max-lora-rank", str(RANK)]
    command += ["--max-cpu-loras", "128"]
    if batched_tokens is not None:
        command += ["--max-num-batched-tokens", str(batched_tokens)]
    return command


@contextmanager
def serving_vllm(
    command: list[str], home: Path, port: int, site_packages: str, extra: Mapping[str, str]
) -> Iterator[Path]:
    """Runs vLLM's server with its packages alone on the path, in a working folder without a package
    called `kernels`, which a library of theirs looks for. Yields its log."""
    log = home / _VLLM_LOG
    resolver = {"VLLM_LORA_RESOLVER_CACHE_DIR": str(_folder_of_adapters(home))}
    environment = os.environ | VLLM_ENVIRONMENT | _LOADS_ADAPTERS | resolver | extra
    environment |= {"PYTHONPATH": site_packages}
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its engine is a process of its own: both are ended together
        )
    try:
        _wait_ready(
            f"http://127.0.0.1:{port}/health",
            lambda: log.read_text(errors="replace"),
            lambda _: server.poll() is not None,
        )
        yield log
    finally:
        _stop_session(server)


def vllm_weights_s(log: Path) -> float | None:
    """Returns the seconds of loading the weights, from vLLM's own log."""
    found = _VLLM_WEIGHTS.search(log.read_text(errors="replace"))
    return None if found is None else float(found[1])


def _folder_of_adapters(home: Path) -> Path:
    return home / "resolved"


def _wait_ready(url: str, log: Callable[[], str], has_failed: Callable[[str], bool]) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        text = log()
        if has_failed(text) or time.monotonic() > deadline_s:
            raise SystemExit(f"the server does not start:\n{text[-4000:]}")
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


def _stop_session(server: subprocess.Popen[bytes]) -> None:
    session = server.pid
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
    deadline_s = time.monotonic() + _STOP_S
    while launch.session_processes(session) and time.monotonic() < deadline_s:
        server.poll()  # reaps it
        time.sleep(0.1)
    for pid in launch.session_processes(session):
        os.kill(pid, signal.SIGKILL)
    server.wait()
