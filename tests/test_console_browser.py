"""The console in Chromium over a whole server: pages, colours, widths, keyboard, accessibility."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serve_rig import (
    RIG_ADAPTER,
    RIG_BASE,
    RIG_TOKEN,
    Rig,
    deploy,
    rig_args,
    wait_ready,
)

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]
AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text()
PAGES = ("overview", "adapters", "playground", "canaries", "keys", "registry")


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    rig = deploy(serve_port, rig_args(200, RIG_BASE), tmp_path_factory.mktemp("console"))
    wait_ready(rig)
    for _ in range(3):
        body: dict[str, Any] = {"model": RIG_ADAPTER, "prompt": "hello", "max_tokens": 8}
        assert httpx.post(f"{rig.url}/v1/completions", json=body).status_code == 200
    return rig


@pytest.fixture(scope="module")
def browser(rig: Rig) -> Iterator[Browser]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, rig: Rig) -> Iterator[Page]:
    with browser.new_context(base_url=rig.url) as context:
        page = context.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            lambda line: faults.append(line.text) if "Content Security" in line.text else None,
        )
        yield page
        assert not faults


def log_in(page: Page) -> None:
    page.goto("/console")
    page.get_by_label("Key").fill(RIG_TOKEN)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("button", name="Log out").wait_for()


def violations(page: Page) -> list[str]:
    page.evaluate(AXE)
    found = page.evaluate("axe.run()")
    return [
        f"{one['id']}: {[node['html'] for node in one['nodes']]}" for one in found["violations"]
    ]


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible_and_fits(page: Page, scheme: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto("/console")
    page.get_by_role("heading", name="Log in").wait_for()
    assert not violations(page)
    log_in(page)
    for name in PAGES:
        page.goto(f"/console#/{name}")
        page.locator(f'nav a[aria-current="page"][href="#/{name}"]').wait_for()
        page.locator("main h1").wait_for()
        page.wait_for_load_state("networkidle")
        assert (name, violations(page)) == (name, [])
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert (name, page.evaluate(overflow)) == (name, 0)


def test_overview_draws_charts_of_the_series(page: Page) -> None:
    log_in(page)
    page.locator(".chart canvas").first.wait_for()
    assert page.locator(".chart canvas").count() == 5
    row = page.get_by_role("region", name="Bases").get_by_role("row", name=f"{RIG_BASE}@1")
    assert "running" in row.inner_text()


def test_an_adapter_is_pinned_and_evicted_by_keyboard_alone(page: Page, rig: Rig) -> None:
    page.goto("/console#/adapters")
    page.get_by_label("Key").focus()
    page.keyboard.type(RIG_TOKEN)
    page.keyboard.press("Enter")
    page.get_by_role("rowheader", name=RIG_ADAPTER).wait_for()

    def tab_to(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            script = "document.activeElement.ariaLabel || document.activeElement.textContent"
            if page.evaluate(script).startswith(name):
                return
        raise AssertionError(f"the keyboard does not reach {name}")

    tab_to(f"Pin {RIG_ADAPTER}")
    page.keyboard.press("Enter")
    page.get_by_role("button", name=f"Unpin {RIG_ADAPTER}").wait_for()
    page.keyboard.press("Space")
    page.get_by_role("button", name=f"Pin {RIG_ADAPTER}", exact=True).wait_for()
    tab_to(f"Evict {RIG_ADAPTER}")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert "Evict" in page.evaluate("document.activeElement.ariaLabel")


def test_registry_lists_versions_and_the_session_ends_with_the_logout(page: Page) -> None:
    log_in(page)
    page.goto("/console#/registry")
    page.get_by_role("rowheader", name=RIG_ADAPTER).wait_for()
    assert not page.evaluate("document.cookie")
    page.get_by_role("button", name="Log out").click()
    page.get_by_role("heading", name="Log in").wait_for()
    assert page.get_by_role("link", name="Registry").count() == 0
