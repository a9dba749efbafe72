"""The documents: generated pages are current; folders, files and links that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from serve_app.config import PlatformArgs
from serve_app.metrics.families import HELP
from tests.docs.keys import descriptions
from tests.docs.pages import FOLDER, PAGES

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(FOLDER.glob("*.md"))]
ROOMS = ("", "serve_app/", "engine/", "lora/", "kernels/", "registry/")


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run: make docs"


def models(model: type[BaseModel]) -> list[type[BaseModel]]:
    found = [model]
    for field in model.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found += models(part)
    return found


def test_every_key_that_holds_a_value_is_described() -> None:
    wrong = [
        f"{model.__name__}.{name}"
        for model in models(PlatformArgs)[1:]
        for name, field in model.model_fields.items()
        if name not in descriptions(model) and not isinstance(field.default, BaseModel)
    ]
    assert not wrong


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_folder_and_file_that_is_named_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    named = re.findall(r"`([\w/]+(?:/|\.py|\.md))`", text)
    for route in re.findall(r"## The route of a request\n\n```\n(.*?)```", text, flags=re.DOTALL):
        assert len(re.findall(r"[\w/]+\.py", route)) > 20
        named += re.findall(r"[\w/]+\.py", route)
    assert named
    assert not [one for one in named if "NAME" not in one and not is_there(one)]


def is_there(name: str) -> bool:
    """Returns whether a path exists below the repository or a room. A route names a file without
    its folder after another file of that folder."""
    paths = [ROOT / f"{room}{name}" for room in ROOMS]
    if "/" not in name:
        paths += [path for room in ROOMS[1:] for path in (ROOT / room).rglob(name)]
    return any(path.exists() for path in paths)


def test_every_folder_of_serve_app_is_in_the_architecture() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folders = [p.name for p in (ROOT / "serve_app").iterdir() if (p / "__init__.py").exists()]
    assert not [name for name in folders if f"`serve_app/{name}/`" not in text]


def test_every_code_of_an_error_is_in_the_reference() -> None:
    found = {
        code
        for path in (ROOT / "serve_app").rglob("*.py")
        for code in re.findall(r'code="([a-z_]+)"', path.read_text())
    }
    page = (ROOT / "docs" / "http_api.md").read_text()
    assert len(found) > 15
    assert [code for code in sorted(found) if f"`{code}`" not in page] == []


def test_the_page_of_the_metrics_has_every_family() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [n for n in HELP if f"| `{n}` |" not in page and f"| `{n}_total` |" not in page] == []


def test_the_page_of_the_configuration_has_every_environment_variable() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    used = {
        name
        for folder in ("serve_app", "registry", "engine", "lora", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"LORAPLEX_[A-Z_]+[A-Z]", path.read_text())
    }
    assert {name for name in used if f"| `{name}` |" not in page} == set()
