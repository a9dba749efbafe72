"""`loraplex warm` on a machine without a GPU: refusals, and kernels compiled for a named device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from kernels.backend import HAS_TRITON
from serve_app.cli import main as cli
from tests.registry_helpers import empty_home
from tests.serve_folders import make_base_folder

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU"),
    pytest.mark.skipif(not HAS_TRITON, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Triton on its next version's defaults
]
ROOT = Path(__file__).parent.parent
HOPPER = ("--device", "sm_90")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return empty_home(tmp_path / "home", monkeypatch)


@pytest.fixture
def base(home: Path, tmp_path: Path) -> None:
    folder = make_base_folder(tmp_path / "base")
    assert run("register", "base", str(folder), "--name", "tiny") == 0


def run(*words: str) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    code = ended.value.code
    return code if isinstance(code, int) else 0


def serve_file(folder: Path, **engine: object) -> str:
    args = {"models": [{"name": "tiny", "engine": engine}]}
    application = {"name": "api", "import_path": "serve_app.app:build", "args": args}
    content = {"http_options": {"host": "127.0.0.1"}, "applications": [application]}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_file_that_is_missing_or_wrong_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("warm", str(tmp_path / "none.yaml")) == 1
    assert "none.yaml cannot be read" in capsys.readouterr().err
    assert run("warm", serve_file(tmp_path, kernel_cache="/tmp")) == 1
    assert "kernel_cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "h200"), "--device is 'h200'"),
        (("--device", "sm_75"), "write sm_80 or later"),
    ],
)
def test_a_wrong_device_is_refused(
    tmp_path: Path,
    options: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("warm", serve_file(tmp_path), *options) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        ({"device": "cpu"}, HOPPER, "engine.device is cpu"),
        ({"backend": "reference"}, HOPPER, "engine.backend is reference"),
        ({}, (), "this machine has no GPU"),
    ],
)
def test_a_base_without_kernels_has_nothing_to_compile(
    tmp_path: Path,
    engine: dict[str, object],
    options: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("warm", serve_file(tmp_path, **engine), *options) == 0
    found = capsys.readouterr().out
    assert found.startswith("tiny: nothing to compile, ")
    assert words in found


def test_a_base_that_needs_a_gpu_wants_one_here_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("warm", serve_file(tmp_path, device="cuda")) == 1
    assert "no GPU is here; --device names the GPU to compile for" in capsys.readouterr().err


def test_a_base_that_is_not_registered_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("warm", serve_file(tmp_path), *HOPPER) == 1
    assert "tiny" in capsys.readouterr().err


@pytest.mark.usefixtures("base")
def test_a_cache_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "kernels")
    file = serve_file(tmp_path, kernel_cache_dir=folder, adapter_pool_bytes="1MiB")
    assert run("warm", file, *HOPPER) == 1
    assert f"the kernel cache {folder} cannot be written" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("base")
def test_the_cache_is_filled_for_a_device_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kernels"
    file = serve_file(tmp_path, kernel_cache_dir=str(folder))
    capsys.readouterr()
    assert run("warm", file, *HOPPER) == 0
    first = capsys.readouterr().out
    assert first.startswith("tiny: ")
    assert " 0 were there" in first
    assert len(list(folder.rglob("*.cubin"))) > 20
    # In a process of its own, as a server's: Triton keeps the keys of kernels that this process has
    # computed, here amid whatever other tests did to it.
    again = subprocess.run(
        [sys.executable, "-m", "serve_app", "warm", file, *HOPPER],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    assert " 0 compiled" in again.stdout
