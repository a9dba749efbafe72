"""The figures of the product's structure, counted in a small product of this test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.structure import figures, files_of, table

SOURCES = {
    "serve_app/__init__.py": "",
    "serve_app/app.py": "from serve_app.api import ingress\n",
    "serve_app/api/ingress.py": """\"\"\"The ingress.\"\"\"

from serve_app.control.manager import Manager
from serve_app.control import manager


class Ingress:
    def start(self):
        \"\"\"Of the others: nobody says what.\"\"\"  # one
        return Manager(), Manager()
""",
    "serve_app/control/manager.py": """class Manager:
    @classmethod
    def create(cls):
        return cls()


class Fleet: ...


FLEET = Fleet()
""",
    "kernels/add.py": "@triton.jit(debug=True)\ndef add():\n" + "    1\n" * 119,
    "engine/core.py": "def step():\n" + "    1\n" * 60,
    "tests/helper.py": "ONE = 1\n",
}


@pytest.fixture
def product(tmp_path: Path) -> Path:
    for name, source in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def commit(product: Path) -> None:
    subprocess.run(["git", "add", "."], cwd=product, check=True)
    author = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *author, "commit", "-qm", "All"], cwd=product, check=True)


def test_the_figures_of_a_small_product(product: Path) -> None:
    assert figures(files_of(None, product)) == {
        "product: lines (files)": "203 (6)",
        "serve_app/: lines (files)": "21 (4)",
        "engine/: lines (files)": "61 (1)",
        "kernels/: lines (files)": "121 (1)",
        "serve_app: folders": "2",
        "serve_app: files on its top floor": "1",
        "serve_app: arrows between folders": "1",
        "... and files on the top floor": "2",
        "... a circle among them": "no",
        "classes": "3",
        "classes constructed at exactly one place": "1",
        "docstrings": "2",
        "fragments among them": "1",
        "words of docstrings and comments": "9",
        "... per 1,000: one, ones": "111.1",
        "... per 1,000: what": "111.1",
        "... per 1,000: nobody, nothing": "111.1",
        "... per 1,000: tell, hear, say": "111.1",
        "functions": "3",
        "... above 60 lines": "1",
        "... the longest": "61 (step)",
        "kernels": "1",
        "... above 120 lines": "0",
        "... the longest kernel": "120 (add)",
    }


def test_a_circle_of_folders_is_seen(product: Path) -> None:
    (product / "serve_app/control/fleet.py").write_text("import serve_app.api.ingress\n")
    assert figures(files_of(None, product))["... a circle among them"] == "yes"


def test_a_revision_lacks_what_came_after_it(product: Path) -> None:
    commit(product)
    (product / "registry").mkdir()
    (product / "registry/client.py").write_text("PORT = 1\n")
    columns = {"HEAD": files_of("HEAD", product), "working tree": files_of(None, product)}
    lines = table({name: figures(files) for name, files in columns.items()}).splitlines()
    assert lines[0].split() == ["HEAD", "working", "tree"]
    assert "product: lines (files)                    203 (6)    204 (7)" in lines
    assert "registry/: lines (files)                  -          1 (1)" in lines
