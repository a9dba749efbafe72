"""A server and a browser for the console's tests: keys on, an adapter with a canary, the paced
engine; headless Chromium.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from registry.catalog import Catalog
from registry.entities import Setting
from serve_app.config import PriceArgs, TenancyArgs
from tests.fakes_registry import FolderRegistry
from tests.serve_rig import RIG_BASE, RIG_TOKEN, Rig, deploy, rig_args, wait_ready

SPLIT, PLAIN = "pirate", "poet"  # adapters; the first has a canary
WIDE, NARROW = (1280, 900), (360, 740)  # pixels
# axe-core 4.14.1, MPL-2.0: the published file.
AXE = Path(__file__).parent / "axe" / "axe.min.js"
_WAIT_MS = 60_000


def deploy_with_keys(port: int, folder: Path, rate: float = 50.0) -> Rig:
    """Returns when all is ready. `rate`: tokens a second of each answer."""
    registry = FolderRegistry(folder)
    base = registry.add_base(RIG_BASE)
    adapters = (
        registry.add_adapter(SPLIT, base, aliases=("champion",)),
        registry.add_adapter(SPLIT, base, 2, aliases=("canary",)),
        registry.add_adapter(PLAIN, base),
    )
    catalog = Catalog((base,), adapters, settings=(Setting(SPLIT, "canary_weight", "0.5"),))
    tenancy = TenancyArgs(
        enabled=True,
        database_url=f"sqlite:///{folder / 'loraplex.db'}",
        prices={"*": PriceArgs(prompt=1.0, output=2.0)},
    )
    args = rig_args(rate, RIG_BASE).model_copy(update={"tenancy": tenancy})
    rig = deploy(port, args, folder, catalog)
    wait_ready(rig)
    return rig


@contextmanager
def open_browser() -> Iterator[Any]:
    """Yields Chromium; skips the test where it or playwright is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def has_count(found: Any, count: int) -> None:
    """Waits until the locator `found` has `count` elements; fails if it keeps another number."""
    from playwright.sync_api import expect

    expect(found).to_have_count(count, timeout=_WAIT_MS)


@contextmanager
def open_page(browser: Any, **context: Any) -> Iterator[Any]:
    """Yields a page without cookies. Fails if a script fails or breaks the security policy."""
    given = browser.new_context(**{"viewport": size(WIDE), **context})
    given.set_default_timeout(_WAIT_MS)
    page = given.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda message: (
            faults.append(message.text) if "Content Security Policy" in message.text else None
        ),
    )
    yield page
    given.close()
    assert not faults


def size(pixels: tuple[int, int]) -> dict[str, int]:
    return {"width": pixels[0], "height": pixels[1]}


def log_in(page: Any, rig: Rig, key: str = RIG_TOKEN) -> None:
    page.goto(f"{rig.url}/console#/login")
    page.get_by_label("Key").fill(key)
    page.get_by_role("main").get_by_role("button", name="Log in").click()
    page.get_by_role("button", name="Log out").wait_for()


def go(page: Any, title: str) -> None:
    """Follows the link of the navigation."""
    page.get_by_role("navigation").get_by_role("link", name=title).click()
    page.get_by_role("heading", level=1, name=title).wait_for()


def violations(page: Any) -> list[str]:
    """Returns what axe-core finds: the rule and the elements of each."""
    # Not add_script_tag: the console's policy forbids inline scripts.
    page.evaluate(AXE.read_text())
    found = page.evaluate("async () => (await axe.run()).violations")
    return [f"{one['id']}: {[node['html'] for node in one['nodes']]}" for one in found]


def is_too_wide(page: Any) -> bool:
    """Returns True if the page scrolls sideways."""
    root = "document.documentElement"
    found: bool = page.evaluate(f"{root}.scrollWidth > {root}.clientWidth")
    return found
