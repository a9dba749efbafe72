"""The console's playground, canaries, keys and usage in Chromium, on Serve with keys on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.console_rig import (
    NARROW,
    PLAIN,
    SPLIT,
    WIDE,
    deploy_with_keys,
    go,
    has_count,
    is_too_wide,
    log_in,
    open_browser,
    open_page,
    size,
    violations,
)
from tests.serve_rig import RIG_BASE, RIG_TOKEN, Rig
from tests.waiting import eventually

pytestmark = pytest.mark.serve

PROMPT = "Say hello."
SIDES = ("Left", "Right")
ADMIN = {"authorization": f"Bearer {RIG_TOKEN}"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def rig(browser: Any, serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return deploy_with_keys(serve_port, tmp_path_factory.mktemp("console"))


@pytest.fixture
def page(browser: Any, rig: Rig) -> Iterator[Any]:
    with open_page(browser, permissions=["clipboard-read", "clipboard-write"]) as opened:
        log_in(opened, rig)
        yield opened


def answer(page: Any, side: str) -> Any:
    return page.get_by_role("region", name=f"{side} answer")


def text_of(page: Any, side: str) -> str:
    """Returns the text of an answer with token probabilities."""
    text: str = answer(page, side).get_by_role("listbox").text_content()
    return text


def ask(page: Any, num_tokens: int, prompt: str = PROMPT) -> None:
    page.get_by_label("Max tokens").fill(str(num_tokens))
    page.get_by_label("Prompt").fill(prompt)
    page.locator("datalist option").first.wait_for(state="attached")  # then both models are there
    page.get_by_role("button", name="Send").click(trial=True)
    page.keyboard.press("Control+Enter")


def make_key(rig: Rig, **fields: object) -> str:
    """Returns a key that the server accepts already."""
    made = httpx.post(f"{rig.url}/key/generate", json=fields, headers=ADMIN)
    assert made.status_code == 200, made.text
    key: str = made.json()["key"]
    eventually(lambda: status_with(rig, key) == 200)
    return key


def status_with(rig: Rig, key: str) -> int:
    return httpx.get(f"{rig.url}/v1/models", headers={"x-api-key": key}).status_code


def test_an_answer_is_streamed_in_both_columns(page: Any) -> None:
    go(page, "Playground")
    page.get_by_label("System text").fill("Be short.")
    ask(page, 40)
    for side in SIDES:
        answer(page, side).get_by_text("Done.").wait_for()
    # The paced engine repeats the prompt.
    prompt = f"<system>Be short.\n<user>{PROMPT}\n<assistant>"
    assert [text_of(page, side) for side in SIDES] == [prompt[:40]] * 2
    page.get_by_text("The answers are the same.").wait_for()
    left, right = answer(page, "Left"), answer(page, "Right")
    assert f"{RIG_BASE}@1" in left.inner_text()
    assert f"{SPLIT}@" in right.inner_text()
    assert "expected_ttft" in right.inner_text()  # the explanation that the admin token receives
    left.get_by_role("listbox").focus()
    page.keyboard.press("ArrowRight")
    left.get_by_text("Token 2, s: 36.8 %").wait_for()


def test_stop_ends_both_answers_and_keeps_what_came(page: Any) -> None:
    go(page, "Playground")
    ask(page, 3000)
    for side in SIDES:
        answer(page, side).get_by_text("Streaming").wait_for()
        answer(page, side).get_by_role("option").nth(3).wait_for()
    page.get_by_role("button", name="Stop").click()
    for side in SIDES:
        answer(page, side).get_by_text("Stopped.").wait_for()
        assert text_of(page, side).startswith("<use")
    assert page.get_by_role("button", name="Send").is_enabled()


def test_an_error_is_in_the_column_that_has_it(page: Any) -> None:
    go(page, "Playground")
    page.locator("datalist option").first.wait_for(state="attached")
    page.get_by_label("Right model").fill(f"{RIG_BASE}@1:nobody@3")
    page.get_by_label("Token probabilities").uncheck()
    ask(page, 8)
    answer(page, "Left").get_by_text("Done.").wait_for()
    answer(page, "Right").get_by_text("Failed.").wait_for()
    assert "nobody" in answer(page, "Right").get_by_role("alert").inner_text()
    has_count(answer(page, "Left").get_by_role("alert"), 0)
    assert "<user>" in answer(page, "Left").inner_text()


def test_a_key_is_offered_what_it_may_call(browser: Any, rig: Rig) -> None:
    key = make_key(rig, models=[f"{RIG_BASE}:{PLAIN}"])
    with open_page(browser) as page:
        log_in(page, rig, key)
        go(page, "Playground")
        page.locator("datalist option").first.wait_for(state="attached")
        offered = page.locator("datalist option").evaluate_all("all => all.map((x) => x.value)")
        assert offered == [f"{RIG_BASE}:{PLAIN}"]
        assert page.get_by_label("Left model").input_value() == ""  # the base is not for this key
        ask(page, 4)
        answer(page, "Right").get_by_text("Done.").wait_for()
        answer(page, "Left").get_by_text("No answer yet.").wait_for()


def test_a_key_that_only_asks_models_reaches_no_other_page(browser: Any, rig: Rig) -> None:
    key = make_key(rig, key_alias="asks")
    with open_page(browser) as page:
        log_in(page, rig, key)
        links = page.get_by_role("navigation").get_by_role("link")
        assert links.all_inner_texts() == ["Playground", "Usage"]
        statuses: list[tuple[str, int]] = []
        page.on("response", lambda one: statuses.append((one.url, one.status)))
        for title in ("overview", "adapters", "canaries", "keys", "registry"):
            page.goto(f"{rig.url}/console#/{title}")
            page.get_by_text("This key lacks the scope admin:read.").wait_for()
        assert not [url for url, _ in statuses if "/admin/" in url or "/key/" in url]
        # Nor by hand, with the header of the console and the cookie of the login.
        script = """(path) => fetch(path, {headers: {"x-loraplex-console": "1"}})
          .then((answer) => answer.status)"""
        paths = ("/admin/series", "/admin/adapters", "/admin/canaries", "/admin/registry")
        for path in (*paths, "/admin/usage", "/key/list"):
            assert (path, page.evaluate(script, path)) == (path, 403)


def test_a_key_sees_its_own_use_alone(browser: Any, rig: Rig) -> None:
    own, other = make_key(rig, team_id="own"), make_key(rig, team_id="other")
    for key, model in ((own, PLAIN), (other, SPLIT)):
        body = {"model": model, "prompt": "abc", "max_tokens": 5}
        headers = {"x-api-key": key}
        sent = httpx.post(f"{rig.url}/v1/completions", json=body, headers=headers)
        assert sent.status_code == 200

    def tenants() -> set[str]:
        found = httpx.get(f"{rig.url}/admin/usage?by=tenant", headers=ADMIN).json()["usage"]
        return {line["tenant"] for line in found}

    eventually(lambda: {"own", "other"} <= tenants())
    with open_page(browser) as page:
        log_in(page, rig, own)
        go(page, "Usage")
        page.get_by_role("rowheader", name=f"{PLAIN}@1").wait_for()
        has_count(page.get_by_role("rowheader"), 1)
        with page.expect_download() as download:
            page.get_by_role("button", name="Download CSV").click()
        assert SPLIT not in Path(download.value.path()).read_text()
        assert (violations(page), is_too_wide(page)) == ([], False)


def test_a_key_is_created_used_and_revoked(page: Any, rig: Rig) -> None:
    go(page, "Keys and usage")
    page.get_by_role("button", name="Create a key").click()
    page.get_by_label("Alias").fill("ci")
    page.get_by_label("Tenant").fill("team-a")
    page.get_by_label("Expires after").fill("soon")
    page.get_by_label("Requests per minute").fill("600")
    page.get_by_role("button", name="Create", exact=True).click()
    assert "duration" in page.get_by_role("dialog").get_by_role("alert").inner_text()
    page.get_by_label("Expires after").fill("90d")
    page.get_by_role("button", name="Create", exact=True).click()
    page.get_by_role("button", name="Copy").click()
    page.get_by_text("Copied.").wait_for()
    key = page.evaluate("navigator.clipboard.readText()")
    assert key == page.get_by_label("Key", exact=True).input_value()
    page.get_by_role("button", name="Close").click()
    row = page.get_by_role("row").filter(has_text="team-a")
    row.get_by_text("600 requests/min").wait_for()
    assert key not in page.content()
    eventually(lambda: status_with(rig, key) == 200)
    body = {"model": RIG_BASE, "prompt": "abc", "max_tokens": 2}

    def uses_key() -> bool:
        used = httpx.post(f"{rig.url}/v1/completions", json=body, headers={"x-api-key": key})
        # A request waits half a second for the first lease of a limited key, then it is refused.
        assert used.status_code in (200, 429), used.text
        return used.status_code == 200

    eventually(uses_key)

    row.get_by_role("button", name="Rotate ci").click()
    page.get_by_label("The former secret counts for").fill("")
    page.get_by_role("button", name="Rotate", exact=True).click()
    second = page.get_by_label("Key", exact=True).input_value()
    assert second != key
    page.get_by_role("button", name="Close").click()
    eventually(lambda: (status_with(rig, key), status_with(rig, second)) == (401, 200))

    row.get_by_role("button", name="Edit ci").click()
    page.get_by_label("Requests per minute").fill("")
    page.get_by_label("Models").fill(f"{RIG_BASE}\n{RIG_BASE}:*")
    page.get_by_role("button", name="Save").click()
    row.get_by_text(f"{RIG_BASE}, {RIG_BASE}:*").wait_for()
    assert "requests/min" not in row.inner_text()

    row.get_by_role("button", name="Revoke ci").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    row.wait_for(state="detached")
    eventually(lambda: status_with(rig, second) == 401)


def test_a_key_that_ends_says_so_on_the_open_page(browser: Any, rig: Rig) -> None:
    key = make_key(rig, key_alias="ends", scopes=["infer", "admin:read"])
    with open_page(browser) as page:
        log_in(page, rig, key)
        go(page, "Canaries")
        page.get_by_role("region", name=f"Canary of {SPLIT}").wait_for()
        gone = {"key_aliases": ["ends"]}
        assert httpx.post(f"{rig.url}/key/delete", json=gone, headers=ADMIN).status_code == 200
        page.get_by_role("heading", name="Log in").wait_for()
        assert "key" in page.get_by_role("alert").inner_text()
        has_count(page.get_by_role("link", name="Canaries"), 0)


def test_the_new_secret_of_the_own_key_stays_until_it_is_read(browser: Any, rig: Rig) -> None:
    key = make_key(rig, key_alias="mine", scopes=["infer", "admin:read", "admin"])
    with open_page(browser) as page:
        log_in(page, rig, key)
        go(page, "Keys and usage")
        page.get_by_role("button", name="Rotate mine").click()
        page.get_by_label("The former secret counts for").fill("")

        def hold(route: Any) -> None:
            eventually(lambda: status_with(rig, key) == 401)
            route.continue_()

        page.route("**/key/list*", hold)
        page.get_by_role("dialog").get_by_role("button", name="Rotate").click()
        page.get_by_role("button", name="Copy").wait_for()
        eventually(lambda: status_with(rig, key) == 401)
        page.wait_for_load_state("networkidle")
        second = page.get_by_label("Key", exact=True).input_value()
        eventually(lambda: status_with(rig, second) == 200)
        page.get_by_role("button", name="Close").click()
        page.get_by_role("heading", name="Log in").wait_for()
        page.get_by_label("Key").fill(second)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Rotate mine").wait_for()


def test_a_page_of_keys_that_empties_gives_way_to_the_one_before(page: Any, rig: Rig) -> None:
    for alias in ("last but one", "last of all"):
        make_key(rig, key_alias=alias)
    # A key a page: the server is asked for the same with another size.
    page.route(
        "**/key/list*",
        lambda route: route.continue_(url=route.request.url.replace("size=100", "size=1")),
    )
    go(page, "Keys and usage")
    shown = page.get_by_text(re.compile(r"^Page \d+ of"))
    number, total = map(int, re.findall(r"\d+", shown.inner_text())[:2])
    for following in range(number + 1, total + 1):
        page.get_by_role("button", name="Next page").click()
        page.get_by_text(f"Page {following} of").wait_for()
    page.get_by_role("button", name="Revoke last of all").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    page.get_by_role("button", name="Revoke last of all").wait_for(state="detached")
    page.get_by_role("button", name="Revoke").first.wait_for()


def record_use(rig: Rig) -> None:
    """Returns when a request for PLAIN is in the usage."""
    body = {"model": PLAIN, "prompt": "abc", "max_tokens": 5}
    assert httpx.post(f"{rig.url}/v1/completions", json=body, headers=ADMIN).status_code == 200

    def recorded() -> list[str]:
        found = httpx.get(f"{rig.url}/admin/usage?by=model", headers=ADMIN).json()["usage"]
        return [line["model"] for line in found]

    eventually(lambda: f"{PLAIN}@1" in recorded())


def test_usage_is_shown_and_downloaded(page: Any, rig: Rig) -> None:
    record_use(rig)
    go(page, "Keys and usage")
    usage = page.get_by_role("region", name="Usage", exact=True)
    usage.get_by_role("rowheader", name=f"{PLAIN}@1").wait_for()
    has_count(usage.get_by_role("img").locator("canvas"), 1)
    usage.get_by_label("By", exact=True).select_option("tenant")
    usage.get_by_role("columnheader", name="Tenant").wait_for()
    usage.get_by_label("By", exact=True).select_option("model")
    with page.expect_download() as download:
        usage.get_by_role("button", name="Download CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith("model,day,requests,prompt_tokens,cached_tokens,output_tokens")
    row = next(line.split(",") for line in lines if line.startswith(f"{PLAIN}@1,"))
    assert int(row[2]) >= 1
    assert int(row[5]) >= 5


def test_usage_keeps_its_heading_while_another_grouping_fails(page: Any) -> None:
    go(page, "Keys and usage")
    usage = page.get_by_role("region", name="Usage", exact=True)
    usage.get_by_role("columnheader", name="Adapter").wait_for()
    refused = {"error": {"message": "The database is away.", "code": "unavailable"}}
    page.route("**/admin/usage*tenant*", lambda route: route.fulfill(status=503, json=refused))
    usage.get_by_label("By", exact=True).select_option("tenant")
    usage.get_by_text("The database is away.").wait_for()
    usage.get_by_role("columnheader", name="Adapter").wait_for()
    has_count(usage.get_by_role("columnheader", name="Tenant"), 0)


def test_years_that_are_being_typed_are_not_asked_for(page: Any) -> None:
    go(page, "Keys and usage")
    usage = page.get_by_role("region", name="Usage", exact=True)
    usage.get_by_role("table").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    until = usage.get_by_label("To", exact=True)
    year = int(until.input_value()[:4]) + 1
    wanted = f"from={year - 1}-01-01&to={year + 1}-01-01"
    with page.expect_response(lambda found: found.url.endswith(wanted)):
        until.press_sequentially(f"1231{year}")
        usage.get_by_label("From", exact=True).press_sequentially(f"0101{year - 1}")
    assert until.input_value() == f"{year}-12-31"
    usage.get_by_role("table").wait_for()
    assert asked[-1].endswith(wanted)
    assert all(re.search(r"from=2\d{3}-\d\d-\d\d&to=2\d{3}-\d\d-\d\d$", url) for url in asked)
    until.evaluate(  # a year of five digits: a field without a limit takes it
        """(field) => {
          field.value = "20266-11-23";
          field.dispatchEvent(new Event("input", {bubbles: true}));
        }"""
    )
    usage.get_by_role("table").wait_for()


def test_keys_are_made_with_the_keyboard_alone(page: Any) -> None:
    go(page, "Keys and usage")
    for title in ("List of keys", "Usage by adapter"):  # what comes later can move the focus
        page.get_by_role("table", name=title).wait_for()
    create = page.get_by_role("button", name="Create a key")
    is_focused = "(element) => element === document.activeElement"
    for _ in range(20):
        page.keyboard.press("Tab")
        if create.evaluate(is_focused):
            break
    assert create.evaluate(is_focused)
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    alias = page.get_by_label("Alias")
    alias.focus()
    page.keyboard.type("typed")
    assert alias.input_value() == "typed"
    page.keyboard.press("Enter")
    copy = page.get_by_role("button", name="Copy")
    copy.or_(page.get_by_role("alert")).first.wait_for()
    has_count(page.get_by_role("alert"), 0)
    has_count(copy, 1)
    page.keyboard.press("Escape")
    page.get_by_role("row").filter(has_text="typed").wait_for()
    has_count(page.get_by_role("dialog"), 0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("pixels", [WIDE, NARROW])
def test_the_pages_are_accessible(
    browser: Any, rig: Rig, scheme: str, pixels: tuple[int, int]
) -> None:
    with open_page(browser, color_scheme=scheme, viewport=size(pixels)) as page:
        log_in(page, rig)
        go(page, "Playground")
        ask(page, 12)
        for side in SIDES:
            answer(page, side).get_by_text("Done.").wait_for()
        answer(page, "Left").get_by_role("listbox").focus()
        found = [violations(page), is_too_wide(page)]
        go(page, "Canaries")
        page.get_by_role("button", name="Abort").click()
        page.get_by_role("dialog").wait_for()
        found += [violations(page), is_too_wide(page)]
        page.get_by_role("button", name="Cancel").click()
        go(page, "Keys and usage")
        page.get_by_role("region", name="Usage", exact=True).get_by_role("table").wait_for()
        found += [violations(page), is_too_wide(page)]
        page.get_by_role("button", name="Create a key").click()
        page.get_by_role("dialog").wait_for()
        found += [violations(page), is_too_wide(page)]
    assert found == [[], False] * 4


@pytest.mark.parametrize("pixels", [WIDE, NARROW])
def test_the_longest_names_stay_within_the_page(
    browser: Any, rig: Rig, pixels: tuple[int, int]
) -> None:
    record_use(rig)
    longest = "L" * 96

    def renamed(route: Any) -> None:
        answer = route.fetch()
        body = json.loads(answer.text().replace(PLAIN, longest))
        if "rejected" in body:
            reason = f"{longest}! is not a legal name"
            body["rejected"] = [{"name": f"{longest}!", "version": 1, "reason": reason}]
        route.fulfill(response=answer, json=body)

    with open_page(browser, viewport=size(pixels)) as page:
        page.route(re.compile("/admin/(adapters|registry|usage)"), renamed)
        log_in(page, rig)
        go(page, "Adapters")
        page.get_by_role("button", name=f"Evict {longest}@1").click()
        dialog = page.get_by_role("dialog")
        dialog.wait_for()
        found = {"dialog": dialog.evaluate("one => one.scrollWidth > one.clientWidth")}
        page.get_by_role("button", name="Cancel").click()
        go(page, "Keys and usage")
        page.get_by_role("rowheader", name=f"{longest}@1").wait_for()
        found["usage"] = is_too_wide(page)
        go(page, "Registry")
        page.get_by_text("is not a legal name").wait_for()
        found["registry"] = is_too_wide(page)
    assert found == {"dialog": False, "usage": False, "registry": False}


def test_a_canary_is_promoted(page: Any, rig: Rig) -> None:
    go(page, "Canaries")
    canary = page.get_by_role("region", name=f"Canary of {SPLIT}")
    weight = canary.get_by_label("Weight of the canary")
    weight.fill("25")
    canary.get_by_role("button", name="Set weight").click()
    eventually(lambda: rig.registry.snapshot().setting(SPLIT, "canary_weight") == "0.25")
    canary.get_by_role("cell", name="25 %").wait_for()
    weight.fill("33.3")
    canary.get_by_role("button", name="Set weight").click()
    eventually(lambda: rig.registry.snapshot().setting(SPLIT, "canary_weight") == "0.333")
    canary.get_by_role("button", name="Promote version 2").click()
    dialog = page.get_by_role("dialog", name=f"Promote {SPLIT}@2?")
    dialog.get_by_role("button", name="Promote").click()
    dialog.wait_for(state="detached")
    names = {
        one.version: one.aliases for one in rig.registry.snapshot().adapters if one.name == SPLIT
    }
    assert "champion" in names[2]
    assert "champion" not in names[1]
    canary.get_by_role("button", name="Promote version 2").wait_for(state="detached")
