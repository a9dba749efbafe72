"""The console in Chromium over a whole server: pages, colours, widths, keyboard, accessibility."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.console_rig import (
    NARROW,
    WIDE,
    has_count,
    is_too_wide,
    open_browser,
    open_page,
    size,
    violations,
)
from tests.serve_rig import (
    RIG_ADAPTER,
    RIG_BASE,
    RIG_TOKEN,
    Rig,
    deploy,
    rig_args,
    wait_ready,
)

pytestmark = pytest.mark.serve

PAGES = ("overview", "adapters", "playground", "canaries", "keys", "registry")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def rig(browser: Any, serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    rig = deploy(serve_port, rig_args(200, RIG_BASE), tmp_path_factory.mktemp("console"))
    wait_ready(rig)
    for _ in range(3):
        body: dict[str, Any] = {"model": RIG_ADAPTER, "prompt": "hello", "max_tokens": 8}
        assert httpx.post(f"{rig.url}/v1/completions", json=body).status_code == 200
    return rig


@pytest.fixture
def page(browser: Any, rig: Rig) -> Iterator[Any]:
    with open_page(browser, base_url=rig.url) as opened:
        yield opened


def log_in(page: Any) -> None:
    page.goto("/console")
    page.get_by_label("Key").fill(RIG_TOKEN)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("button", name="Log out").wait_for()


@pytest.mark.parametrize("pixels", [WIDE, NARROW])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible_and_fits(page: Any, scheme: str, pixels: tuple[int, int]) -> None:
    page.set_viewport_size(size(pixels))
    page.emulate_media(color_scheme=scheme)
    page.goto("/console")
    page.get_by_role("heading", name="Log in").wait_for()
    assert not violations(page)
    log_in(page)
    for name in PAGES:
        page.goto(f"/console#/{name}")
        page.locator(f'nav a[aria-current="page"][href="#/{name}"]').wait_for()
        page.locator("main h1").wait_for()
        has_count(page.get_by_text("Loading…"), 0)
        assert (name, violations(page)) == (name, [])
        assert (name, is_too_wide(page)) == (name, False)


def test_pages_without_adapters_speak_of_no_name_that_nobody_typed(page: Any) -> None:
    def emptied(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"adapters": []})

    log_in(page)
    page.route(re.compile("/admin/(adapters|registry)"), emptied)
    page.goto("/console#/adapters")
    page.get_by_role("cell", name="No running base has such an adapter.").wait_for()
    page.goto("/console#/registry")
    page.get_by_role("cell", name="There is no such adapter.").wait_for()


def test_overview_draws_charts_of_the_series(page: Any) -> None:
    log_in(page)
    page.locator(".chart canvas").first.wait_for()
    has_count(page.locator(".chart canvas"), 5)
    row = page.get_by_role("region", name="Bases").get_by_role("row", name=f"{RIG_BASE}@1")
    row.filter(has_text=re.compile("running")).wait_for()


def test_an_adapter_is_pinned_and_evicted_by_keyboard_alone(page: Any, rig: Rig) -> None:
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


def test_registry_lists_versions_and_the_session_ends_with_the_logout(page: Any) -> None:
    log_in(page)
    page.goto("/console#/registry")
    page.get_by_role("rowheader", name=RIG_ADAPTER).wait_for()
    assert not page.evaluate("document.cookie")
    page.get_by_role("button", name="Log out").click()
    page.get_by_role("heading", name="Log in").wait_for()
    has_count(page.get_by_role("link", name="Registry"), 0)


def answer_with(page: Any, path: str, body: object) -> None:
    """Gives a page another answer of the server than the rig has."""
    page.route(f"**{path}", lambda route: route.fulfill(json=body))


def test_without_keys_the_page_of_keys_says_how_to_switch_them_on(page: Any) -> None:
    log_in(page)
    page.goto("/console#/keys")
    page.get_by_text("Keys are off").wait_for()
    assert "tenancy.enabled: true" in page.get_by_role("main").inner_text()
    has_count(page.get_by_role("main").get_by_role("button"), 0)


def test_a_page_says_that_the_server_is_silent_and_recovers(page: Any) -> None:
    page.clock.install()
    log_in(page)
    page.goto("/console#/registry")
    page.get_by_role("rowheader", name=RIG_ADAPTER).wait_for()
    page.route("**/admin/registry", lambda route: None)  # it is never answered
    page.clock.fast_forward(10_000)
    page.clock.fast_forward(30_000)
    page.get_by_role("alert").filter(has_text="does not answer").wait_for()
    page.get_by_role("rowheader", name=RIG_ADAPTER).wait_for()
    page.unroute("**/admin/registry")
    page.clock.fast_forward(10_000)
    page.get_by_role("alert").wait_for(state="detached")


def test_a_console_that_is_opened_too_early_goes_on_by_itself(page: Any) -> None:
    page.clock.install()
    page.route("**/console/session", lambda route: route.abort())
    page.goto("/console")
    page.get_by_role("alert").filter(has_text="does not answer").wait_for()
    page.unroute("**/console/session")
    page.clock.fast_forward(10_000)
    page.get_by_role("heading", name="Log in").wait_for()
    has_count(page.get_by_role("alert"), 0)


def test_cards_show_no_figures_of_the_past(page: Any) -> None:
    times = [int(time.time()) // 5 * 5 - 5 * before for before in range(180, 0, -1)]
    gone: list[float | None] = [3.0, *[None] * 179]
    names = ("requests", "errors", "refused", "prompt_tokens", "output_tokens")
    gauges = ("ttft_p50_s", "ttft_p95_s", "running", "waiting", "kv_usage")
    base = {"name": RIG_BASE} | dict.fromkeys([*(f"{one}_per_s" for one in names), *gauges], gone)
    answer_with(page, "/admin/series", {"interval_s": 5, "times_s": times, "bases": [base]})
    log_in(page)
    cards = page.locator(".card")
    cards.filter(has_text="Running").wait_for()
    assert not re.search(r"\d", " ".join(cards.locator(".figure").all_inner_texts()))


def test_a_filter_does_not_outlive_its_base(page: Any) -> None:
    def line(base: str) -> dict[str, object]:
        known = {"version": 1, "pin": False, "aliases": [], "is_default": True, "engines": []}
        return {"name": f"of-{base}", "digest": base, "base": base} | known

    page.clock.install()
    answer_with(page, "/admin/adapters", {"adapters": [line("stays"), line("goes")]})
    log_in(page)
    page.goto("/console#/adapters")
    page.get_by_label("Base").select_option("goes")
    page.get_by_role("rowheader", name="of-stays").wait_for(state="detached")
    answer_with(page, "/admin/adapters", {"adapters": [line("stays")]})
    page.clock.fast_forward(5_000)
    page.get_by_role("rowheader", name="of-stays").wait_for()
    assert page.get_by_label("Base").input_value() == ""


def test_an_answer_that_breaks_off_has_failed(page: Any) -> None:
    delta = {"choices": [{"delta": {"content": "half an ans"}}]}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            body=f"data: {json.dumps(delta)}\n\n", content_type="text/event-stream"
        ),
    )
    page.goto("/console#/playground")
    page.get_by_label("Prompt").fill("Say hello.")
    page.get_by_role("button", name="Send").click()
    left = page.get_by_role("region", name="Left answer")
    left.get_by_text("Failed.").wait_for()
    assert "half an ans" in left.inner_text()
    assert "broke off" in left.get_by_role("alert").inner_text()


def test_ctrl_enter_sends_no_setting_that_is_no_number(page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto("/console#/playground")
    page.get_by_label("Prompt").fill("Say hello.")
    page.get_by_role("button", name="Send").click(trial=True)
    page.get_by_label("Max tokens").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("-")
    page.keyboard.press("Control+Enter")
    has_count(page.locator("input:invalid"), 1)
    has_count(page.get_by_text("No answer yet."), 2)
    assert not [url for url in asked if url.endswith("/v1/chat/completions")]


def test_times_are_in_utc(browser: Any, rig: Rig) -> None:
    with open_page(browser, base_url=rig.url, timezone_id="Asia/Kolkata") as page:
        log_in(page)
        page.locator(".chart .u-over").first.hover()
        shown = page.locator(".chart .u-legend .u-value").filter(has_text="UTC").first.inner_text()
    minute = int(shown.split(":")[1])
    # The zone of this browser is half an hour away.
    now = time.gmtime().tm_min
    assert min((now - minute) % 60, (minute - now) % 60) <= 16
