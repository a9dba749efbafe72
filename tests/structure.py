"""`python -m tests.structure [REVISION ...]`: figures of the product's own structure, a column for
each git revision; without revisions, those of the working tree."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.test_prose import docstrings, is_fragment

ROOT = Path(__file__).parent.parent
FOLDERS = ("serve_app", "engine", "lora", "kernels", "registry")
MAX_LINES, MAX_KERNEL_LINES = 60, 120  # of a function
WORDS = {
    "one, ones": r"ones?",
    "what": r"what",
    "nobody, nothing": r"nobody|nothing",
    "tell, hear, say": r"tell|tells|told|telling|hear|hears|heard|hearing|say|says|said|saying",
}


@dataclass(frozen=True)
class File:
    path: str
    source: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.source.count("\n")


@dataclass(frozen=True)
class Function:
    name: str
    lines: int
    is_kernel: bool

    @property
    def is_long(self) -> bool:
        return self.lines > (MAX_KERNEL_LINES if self.is_kernel else MAX_LINES)


def files_of(revision: str | None, root: Path = ROOT) -> list[File]:
    """The product's Python files at a revision; None: in the working tree."""
    texts = _committed(revision, root) if revision else _present(root)
    return [
        File(path, text, ast.parse(text))
        for path, text in texts
        if path.endswith(".py") and path.split("/")[0] in FOLDERS
    ]


def _present(root: Path) -> Iterator[tuple[str, str]]:
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard").decode()
    for name in listed.splitlines():
        if (path := root / name).suffix == ".py" and path.is_file():
            yield name, path.read_text()


def _committed(revision: str, root: Path) -> Iterator[tuple[str, str]]:
    archive = io.BytesIO(_git(root, "archive", "--end-of-options", revision))
    with tarfile.open(fileobj=archive) as tar:
        for member in tar:
            if member.name.endswith(".py") and (file := tar.extractfile(member)):
                yield member.name, file.read().decode()


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, check=True, stdout=subprocess.PIPE).stdout


def figures(files: list[File]) -> dict[str, str]:
    """The table's rows for one state of the product."""
    lines: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for file in files:
        lines[file.path.split("/")[0]] += file.lines
        counts[file.path.split("/")[0]] += 1
    rows = {
        f"{folder}/: lines (files)": f"{lines[folder]:,} ({counts[folder]})"
        for folder in FOLDERS
        if counts[folder]
    }
    total = {"product: lines (files)": f"{lines.total():,} ({counts.total()})"}
    return total | rows | _layout(files) | _classes(files) | _prose(files) | _functions(files)


def _layout(files: list[File]) -> dict[str, str]:
    """Folders of serve_app, and the imports between them: the files on its top floor stand for
    themselves."""
    inside = [
        file
        for file in files
        if file.path.startswith("serve_app/") and file.path != "serve_app/__init__.py"
    ]
    units = {_unit(file.path) for file in inside}
    folders = {_unit(file.path) for file in inside if file.path.count("/") > 1}
    arrows: dict[str, set[str]] = defaultdict(set)
    for file in inside:
        names = [name.split(".") for name in _imports(file)]
        targets = {parts[1] for parts in names if parts[0] == "serve_app" and len(parts) > 1}
        arrows[_unit(file.path)] |= targets & units - {_unit(file.path)}
    inner = sum(len(arrows[folder] & folders) for folder in folders)
    return {
        "serve_app: folders": f"{len(folders)}",
        "serve_app: files on its top floor": f"{len(units - folders)}",
        "serve_app: arrows between folders": f"{inner}",
        "... and files on the top floor": f"{sum(map(len, arrows.values()))}",
        "... a circle among them": "yes" if _in_circles(arrows) else "no",
    }


def _unit(path: str) -> str:
    """The folder or file directly below the top folder."""
    return path.split("/")[1].removesuffix(".py")


def _imports(file: File) -> Iterator[str]:
    """Imported names with their modules: `from serve_app import tasks` is `serve_app.tasks`."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _in_circles(arrows: dict[str, set[str]]) -> set[str]:
    """The units that remain when those that import no remaining unit are taken away in turn."""
    left = set(arrows)
    while ready := {unit for unit in left if not arrows[unit] & left}:
        left -= ready
    return left


def _classes(files: list[File]) -> dict[str, str]:
    """Calls of a class's name, and of `cls` in its own body, are counted, in the product only.
    Classes of the same name share their calls."""
    calls: Counter[str] = Counter()
    classes = []
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                classes.append(node.name)
                calls[node.name] += sum(_called(inner) == "cls" for inner in ast.walk(node))
            calls[_called(node)] += 1
    once = sum(calls[name] == 1 for name in classes)
    return {
        "classes": f"{len(classes)}",
        "classes constructed at exactly one place": f"{once}",
    }


def _called(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return node.func.id
        if isinstance(node.func, ast.Attribute):
            return node.func.attr
    return ""


def _prose(files: list[File]) -> dict[str, str]:
    written = [words for file in files for _, words in docstrings(file.tree)]
    comments = [comment for file in files for comment in _comments(file.source)]
    text = "\n".join(written + comments)
    total = len(re.findall(r"[A-Za-z][\w'-]*", text))
    rows = {
        "docstrings": f"{len(written):,}",
        "fragments among them": f"{sum(map(is_fragment, written))}",
        "words of docstrings and comments": f"{total:,}",
    }
    for name, pattern in WORDS.items():
        found = len(re.findall(rf"\b(?:{pattern})\b", text, re.IGNORECASE))
        rows[f"... per 1,000: {name}"] = f"{1000 * found / max(total, 1):.1f}"
    return rows


def _comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def _functions(files: list[File]) -> dict[str, str]:
    found = [
        Function(node.name, (node.end_lineno or 0) - node.lineno + 1, _is_kernel(node))
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    kernels = [function for function in found if function.is_kernel]
    others = [function for function in found if not function.is_kernel]
    return {
        "functions": f"{len(others):,}",
        f"... above {MAX_LINES} lines": f"{sum(function.is_long for function in others)}",
        "... the longest": _longest(others),
        "kernels": f"{len(kernels)}",
        f"... above {MAX_KERNEL_LINES} lines": f"{sum(function.is_long for function in kernels)}",
        "... the longest kernel": _longest(kernels),
    }


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list]
    return bool({"triton.jit", "gluon.jit"} & set(names))


def _longest(functions: list[Function]) -> str:
    longest = max(functions, key=lambda function: function.lines, default=None)
    return f"{longest.lines} ({longest.name})" if longest else "-"


def table(columns: dict[str, dict[str, str]]) -> str:
    names = list(dict.fromkeys(name for rows in columns.values() for name in rows))
    lines = [["", *columns]]
    lines += [[name, *(rows.get(name, "-") for rows in columns.values())] for name in names]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


if __name__ == "__main__":
    revisions: list[str | None] = [*sys.argv[1:]] or [None]
    print(table({name or "working tree": figures(files_of(name)) for name in revisions}))
