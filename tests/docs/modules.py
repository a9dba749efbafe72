"""`docs/modules.md`: the first sentence of each module's docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.markdown import GENERATED, table

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("serve_app", "engine", "lora", "kernels", "registry")
INTRODUCTION = """
# Modules

One line for each file, from its docstring. [ARCHITECTURE.md](../ARCHITECTURE.md) has the whole.
"""


def modules_page() -> str:
    folders = [folder for room in ROOMS for folder in (ROOT / room, *_folders(ROOT / room))]
    return "".join([GENERATED, INTRODUCTION, *map(_section, folders)])


def _folders(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and any(path.glob("*.py")):
            yield path
            yield from _folders(path)


def _section(folder: Path) -> str:
    own = folder / "__init__.py"
    words = first_sentence(own) if own.exists() else ""
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    rows = [(f"`{path.name}`", first_sentence(path)) for path in files]
    title = f"\n## `{folder.relative_to(ROOT)}/`\n\n" + (f"{words}\n\n" if words else "")
    return title + (table(("file", ""), rows) if rows else "")


def first_sentence(path: Path) -> str:
    """Returns the first sentence of a module's docstring, within its first paragraph."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph, maxsplit=1)[0]
