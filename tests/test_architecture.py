"""The rooms and who may import whom, read from the source."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("serve_app", "engine", "lora", "kernels", "registry")
ALLOWED_ROOMS = {
    "serve_app": {"engine", "registry"},
    "engine": {"lora", "kernels"},
    "lora": {"kernels"},
    "kernels": set(),
    "registry": set(),
}
# Which rooms may import a foreign library; libraries that are not listed are free.
OWNERS = {
    "ray": {"serve_app"},
    "fastapi": {"serve_app"},
    "starlette": {"serve_app"},
    "pydantic": {"serve_app"},
    "yaml": {"serve_app"},
    "typer": {"serve_app"},
    "rich": {"serve_app"},
    "tokenizers": {"serve_app"},
    "llguidance": {"engine"},
    "alembic": {"serve_app"},
    "jinja2": {"serve_app"},
    "mlflow": {"registry"},
    "triton": {"kernels"},
    "safetensors": {"engine", "lora"},
    "transformers": {"engine"},
    "peft": {"engine"},
    "torch": {"engine", "lora", "kernels"},
}
# Which folders and single files of serve_app the modules of each may import. Files at the top of
# serve_app stand for themselves; the package's own __init__ imports nothing.
ALLOWED_FOLDERS: dict[str, set[str]] = {
    # leaves
    "admin_api": set(),
    "errors": set(),
    "field_problems": set(),
    "home": set(),
    "logs": set(),
    "network": set(),
    "cache_salt": {"home"},
    "disconnects": {"tasks"},
    "tally": set(),
    "text": {"field_problems"},
    "messages": {"tally"},
    "metrics": set(),
    "ray_network": {"network"},
    "tasks": {"metrics"},
    "ray_calls": {"errors", "tasks"},
    # from the wire to the engine
    "openai": {"errors", "field_problems", "text"},
    "dialects": {"errors", "openai"},
    "text_workers": {"dialects", "errors", "messages", "openai", "text"},
    "stream": {"messages", "network", "tasks"},
    "routing": {"messages", "metrics", "ray_calls", "stream", "tasks"},
    # configuration: the options of a routing policy are checked by its constructor
    "config": {"field_problems", "home", "routing", "text"},
    "serve_file": {"config", "network", "routing"},
    "platform_view": {"config"},
    "http": {"config", "errors", "field_problems", "network"},
    "tenancy": {"admin_api", "config", "errors", "home", "http", "metrics", "ray_calls", "tasks"},
    "console": {"errors"},
    "autoscaling": {"config", "messages"},
    "admission": {
        *("cache_salt", "config", "disconnects", "errors", "messages", "metrics", "routing"),
        "tenancy",
    },
    "canary": {"config", "errors", "messages", "metrics", "platform_view", "tally", "tasks"},
    # canary: the one mapping from an error to an outcome
    "observe": {"canary", "config", "errors", "metrics", "routing", "tenancy"},
    "dispatch": {
        "observe",
        *("admission", "canary", "config", "disconnects", "errors", "messages", "metrics"),
        *("openai", "platform_view", "ray_calls", "routing", "stream", "tally", "tasks", "text"),
        "text_workers",
    },
    "replica": {
        *("autoscaling", "config", "errors", "logs", "messages", "metrics", "platform_view"),
        *("ray_calls", "ray_network", "stream", "tasks", "text"),
    },
    "control": {
        *("admin_api", "tenancy"),
        *("autoscaling", "cache_salt", "canary", "config", "errors", "logs", "messages"),
        *("metrics", "platform_view", "ray_calls", "ray_network", "replica", "routing", "tasks"),
    },
    "api": {
        *("admin_api", "admission", "observe"),
        *("autoscaling", "canary", "config", "console", "control", "dialects", "disconnects"),
        *("dispatch", "errors", "http", "logs", "messages", "metrics", "openai", "platform_view"),
        *("ray_calls", "ray_network", "routing", "tasks", "tenancy", "text_workers"),
    },
    # what starts the processes
    "app": {"api", "config", "control", "observe", "platform_view", "serve_file"},
    "cli": {
        "admin_api",
        "canary",
        "platform_view",
        "config",
        "control",
        "errors",  # the answers that HAProxy gives by itself
        "field_problems",
        "home",
        "logs",
        "ray_network",
        "serve_file",
        "text",
    },
    "__main__": {"cli"},
}
NO_TORCH = ("types", "errors", "config", "blocks", "scheduler", "core", "service")
FORBIDDEN_EVERYWHERE = {"pickle", "joblib", "dill"}
MAX_FILE_LINES = 400


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import in a file, those inside functions too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module.split(".")[0]


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of our own modules: `from serve_app import tasks` names
    `serve_app.tasks`."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            joined = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if is_module(name) else node.module for name in joined]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] in ROOMS)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def sources(room: str) -> list[Path]:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, f"room {room} has no source"
    return files


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_the_rooms_below_it(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources(room)
        for line, name in imports(path)
        if name in ROOMS and name != room and name not in ALLOWED_ROOMS[room]
    ]
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_foreign_library_stays_with_its_owner(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources(room)
        for line, name in imports(path)
        if room not in OWNERS.get(name, {room}) or name in FORBIDDEN_EVERYWHERE
    ]
    assert not wrong


@pytest.mark.parametrize("module", NO_TORCH)
def test_engine_policy_imports_no_torch(module: str) -> None:
    names = {name for _, name in imports(ROOT / "engine" / f"{module}.py")}
    assert "torch" not in names


def test_transformers_and_peft_are_read_only_by_tools_that_serving_never_imports() -> None:
    users = {
        path.name: found
        for path in sources("engine")
        if (found := {"transformers", "peft"} & {name for _, name in imports(path)})
    }
    assert users == {"gguf.py": {"transformers"}, "peft_reference.py": {"transformers", "peft"}}


def test_environment_is_read_only_in_configuration_and_launcher() -> None:
    """Launching a child needs its environment; everything else takes settings as arguments."""
    allowed = {
        "serve_app/config/environment.py",
        "serve_app/home.py",  # LORAPLEX_HOME
        "serve_app/cli/commands/serve.py",
        "kernels/exchange_environment.py",  # switches of NCCL and torch that have no other place
        "registry/__init__.py",  # before mlflow is imported: no telemetry, no progress bars
        "registry/mlflow_errors.py",  # timeouts that MLflow reads from nowhere else
    }
    wrong = []
    for room in ROOMS:
        for path in sources(room):
            name = str(path.relative_to(ROOT))
            reads = any(
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
                and node.attr in {"environ", "getenv", "putenv"}
                for node in nodes(path)
            )
            if reads and name not in allowed:
                wrong.append(name)
    assert not wrong


def test_background_tasks_begin_in_one_module() -> None:
    """There each task is held, and its failure logged and counted. A task group does so itself."""
    makers = {"create_task", "ensure_future"}
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in ROOMS
        for path in sources(room)
        for node in nodes(path)
        if isinstance(node, ast.Attribute | ast.Name)
        and (node.attr if isinstance(node, ast.Attribute) else node.id) in makers
        and ast.unparse(node) != "group.create_task"
        and path != ROOT / "serve_app" / "tasks.py"
    ]
    assert not wrong


def test_no_source_file_is_too_long_to_read() -> None:
    lengths = {
        str(p.relative_to(ROOT)): len(p.read_text().splitlines())
        for room in ROOMS
        for p in sources(room)
    }
    assert not {name: n for name, n in lengths.items() if n > MAX_FILE_LINES}


def test_folders_of_serve_app_import_only_the_folders_below_them() -> None:
    wrong = []
    used: dict[str, set[str]] = {name: set() for name in ALLOWED_FOLDERS}
    for path in sources("serve_app"):
        parts = path.relative_to(ROOT / "serve_app").with_suffix("").parts
        if parts == ("__init__",):
            continue
        for line, name in imported_modules(path):
            folder = name.split(".")[1] if name.startswith("serve_app.") else parts[0]
            if folder == parts[0]:
                continue
            used[parts[0]].add(folder)
            if folder not in ALLOWED_FOLDERS[parts[0]]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert not wrong
    unused = {name: allowed - used[name] for name, allowed in ALLOWED_FOLDERS.items()}
    assert not {name: rest for name, rest in unused.items() if rest}, "doors that nobody uses"


def test_the_allowed_imports_of_folders_have_no_cycle() -> None:
    done: list[str] = []
    while len(done) < len(ALLOWED_FOLDERS):
        ready = [n for n, below in ALLOWED_FOLDERS.items() if n not in done and below <= set(done)]
        assert ready, f"a cycle among {sorted(set(ALLOWED_FOLDERS) - set(done))}"
        done += ready


def test_rooms_have_no_import_cycles() -> None:
    """File-level cycles inside a room, found by walking imports of our own modules."""
    graph: dict[str, set[str]] = {}
    for room in ROOMS:
        for path in sources(room):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            graph[module.removesuffix(".__init__")] = {name for _, name in imported_modules(path)}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module in done:
            return
        for target in graph.get(module, ()):
            visit(target, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())
    assert len(graph) > 20
    assert sys.version_info >= (3, 11)
