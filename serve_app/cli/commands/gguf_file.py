"""A GGUF file in the place of a base's folder, for `register base` and `doctor --base`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.checks.fit import Fit
from engine.errors import UnsupportedModelError
from registry.manifest import Progress
from serve_app.cli.commands.common import Failure
from serve_app.config import default_home
from serve_app.home import prepare


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


@contextmanager
def as_folder(path: Path, progress: Progress) -> Iterator[tuple[Path, dict[str, int]]]:
    """Yields the folder of a base and the number of tensors of each type of the GGUF file that it
    is made of; none for a folder that is given. The folder is made beside the store, so that its
    files can be linked, and is named as the file."""
    if not is_gguf(path):
        yield path, {}
        return
    with _tools(path):
        from engine.tools.gguf import convert_gguf
    home = prepare(default_home())
    with TemporaryDirectory(prefix=".gguf.", dir=home) as scratch:
        folder = Path(scratch) / path.stem
        with _errors_of(path):
            types = convert_gguf(
                path, folder, lambda stage: progress(stage, 0, path.stat().st_size)
            )
        yield folder, types


@contextmanager
def as_outline(path: Path) -> Iterator[tuple[Path, dict[str, int]]]:
    """Yields as `as_folder`, for `estimate_fit`: the folder has no bytes of weights."""
    if not is_gguf(path):
        yield path, {}
        return
    with _tools(path):
        from engine.tools.gguf import outline_gguf
    with TemporaryDirectory(prefix="loraplex.gguf.") as scratch:
        with _errors_of(path):
            types = outline_gguf(path, Path(scratch))
        yield Path(scratch), types


def made_of(types: Mapping[str, int], fit: Fit) -> Fit:
    """Returns the fit of a base that is made of a GGUF file, which its first line names; `types`:
    as `as_folder` yields them."""
    if not types:
        return fit
    words = ", ".join(f"{kind} ({count} tensors)" for kind, count in types.items())
    return replace(fit, stored_as=f"plain weights in bfloat16, converted from {words}")


@contextmanager
def _tools(path: Path) -> Iterator[None]:
    """Names the missing packages: the tools need those of the extra `demo`."""
    try:
        yield
    except ImportError as error:
        remedy = "pip install 'loraplex[demo]'"
        raise Failure(f"{path.name} needs the package {error.name}: {remedy}") from None


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except (UnsupportedModelError, ValueError, IndexError) as error:
        raise Failure(f"{path.name} cannot be read: {error}") from error
