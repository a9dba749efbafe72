"""The console without a browser: its files, the cookie of a login, and the figures of its pages."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from serve_app.admin_api import SeriesAnswer
from serve_app.api.ingress import build_asgi
from serve_app.config import ADMIN_TOKEN
from serve_app.console.pages import load_assets
from serve_app.control.series import INTERVAL_S, NUM_POINTS, Series, quantile
from serve_app.messages import BaseFigures, EngineFigures
from serve_app.metrics.histograms import SECONDS
from tests.ingress_app import make_app, make_state
from tests.test_tenancy_http import TOKEN, World

OWN = {"x-loraplex-console": "1"}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    async with world.http:
        yield world


async def log_in(http: httpx.AsyncClient, key: str) -> httpx.Response:
    return await http.post("/console/login", json={"key": key}, headers=OWN)


async def test_page_and_assets_come_with_a_strict_policy(world: World) -> None:
    page = await world.http.get("/console")
    assert page.status_code == 200
    assert page.headers["cache-control"] == "no-cache"
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) == 4
    for answer in (page, *[await world.http.get("/" + link) for link in links]):
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert "<script>" not in page.text
    assert "style=" not in page.text
    script = await world.http.get("/" + links[-1])
    assert script.headers["content-type"].startswith("text/javascript")
    assert "immutable" in script.headers["cache-control"]
    known = await world.http.get("/console", headers={"if-none-match": page.headers["etag"]})
    assert known.status_code == 304
    assert not known.content


async def test_a_slash_at_the_end_of_the_address_leads_to_the_page(world: World) -> None:
    answer = await world.http.get("/console/")
    assert (answer.status_code, answer.headers["location"]) == (308, "../console")
    assert (await world.http.get("/console/", follow_redirects=True)).status_code == 200


async def test_assets_of_another_release_are_not_found(world: World) -> None:
    digest = load_assets().digest
    for path in ("0" * 16 + "/app.js", f"{digest}/../pages.py", f"{digest}/vendor/htm.LICENSE", ""):
        answer = await world.http.get(f"/console/assets/{path}")
        assert answer.status_code == 404
        assert "immutable" not in answer.headers.get("cache-control", "")


def test_every_import_of_a_module_names_an_asset() -> None:
    files = load_assets().files
    for path, content in files.items():
        if path.endswith(".js") and not path.startswith("vendor/"):
            for name in re.findall(r'from "(\.[^"]+)"', content.decode()):
                found = (Path("/") / Path(path).parent / name).resolve().relative_to("/")
                assert str(found) in files, (path, name)
            assert "dangerouslySetInnerHTML" not in content.decode()
            assert "innerHTML" not in content.decode()


async def test_a_login_gives_the_rights_of_its_key(world: World) -> None:
    key = await world.key(tenant="blue", scopes=("infer", "admin:read"))
    nobody = (await world.http.get("/console/session", headers=OWN)).json()
    assert nobody == {
        "scopes": [],
        "tenant": "",
        "key_id": "",
        "needs_login": True,
        "tenancy_enabled": True,
    }
    text = key["authorization"].removeprefix("Bearer ")
    answer = await log_in(world.http, text)
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert text not in cookie
    assert answer.headers["cache-control"] == "no-store"
    session = (await world.http.get("/console/session", headers=OWN)).json()
    assert (session["scopes"], session["tenant"]) == (["admin:read", "infer"], "blue")
    assert (await world.http.get("/admin/registry", headers=OWN)).status_code == 200
    refused = await world.http.post("/admin/adapters/sql/pin", headers=OWN)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope")
    await world.http.post("/console/logout", headers=OWN)
    assert (await world.http.get("/admin/registry", headers=OWN)).status_code == 401


async def test_behind_tls_the_cookie_is_bound_to_its_host(world: World) -> None:
    headers = OWN | {"x-forwarded-proto": "https"}
    answer = await world.http.post("/console/login", json={"key": TOKEN}, headers=headers)
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("__Host-loraplex-console=")
    assert "; Secure" in cookie
    plain = cookie.removeprefix("__Host-").split(";")[0]
    for name, status in ((plain, 401), (f"__Host-{plain}", 200)):
        fresh = httpx.AsyncClient(transport=world.http._transport, base_url="http://testserver")
        answer = await fresh.get("/admin/registry", headers=headers | {"cookie": name})
        assert answer.status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {},
        OWN | {"sec-fetch-site": "cross-site"},
        OWN | {"sec-fetch-site": "same-site"},
        OWN | {"sec-fetch-site": "none"},
        OWN | {"origin": "http://evil.example"},
        OWN | {"origin": "http://testserver:9000"},
        OWN | {"origin": "null"},
    ],
)
async def test_no_request_of_another_page_can_use_the_cookie(
    world: World, headers: dict[str, str]
) -> None:
    assert (await log_in(world.http, TOKEN)).status_code == 200
    assert (await world.http.get("/admin/registry", headers=OWN)).status_code == 200
    for method, path in (
        ("GET", "/admin/registry"),
        ("POST", "/admin/drain"),
        ("POST", "/v1/chat/completions"),
        ("DELETE", "/admin/canaries/pirate"),
    ):
        answer = await world.http.request(method, path, headers=headers)
        assert (path, answer.status_code) == (path, 401)
    for path in ("/console/login", "/console/logout"):
        answer = await world.http.post(path, json={"key": TOKEN}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site")
        assert "set-cookie" not in answer.headers


async def test_a_page_of_this_origin_may_use_the_cookie(world: World) -> None:
    assert (await log_in(world.http, TOKEN)).status_code == 200
    for more in ({"sec-fetch-site": "same-origin"}, {"origin": "http://testserver"}):
        answer = await world.http.get("/admin/registry", headers=OWN | more)
        assert answer.status_code == 200


async def test_requests_of_the_console_are_counted_by_their_route(world: World) -> None:
    assert (await log_in(world.http, TOKEN)).status_code == 200
    assert (await world.http.get("/admin/registry", headers=OWN)).status_code == 200
    text = world.state.metrics.text(0).decode()
    assert (
        'loraplex_http_answers_total{ingress="i0",route="/admin/registry",status="200"} 1' in text
    )
    assert 'route="unknown"' not in text


async def test_a_bearer_is_stronger_than_the_cookie(world: World) -> None:
    key = await world.key(scopes=("infer",))
    assert (await log_in(world.http, TOKEN)).status_code == 200
    answer = await world.http.get("/admin/registry", headers=OWN | key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")
    plain = {"x-api-key": key["authorization"].removeprefix("Bearer ")}
    assert (await world.http.get("/admin/registry", headers=OWN | plain)).status_code == 403


@pytest.mark.parametrize("value", ["", "%%%", "a", base64.b64encode(b"a\r\nx: y").decode()])
async def test_a_malformed_cookie_is_no_key(world: World, value: str) -> None:
    headers = OWN | {"cookie": f"loraplex-console={value}"}
    answer = await world.http.get("/admin/registry", headers=headers)
    assert answer.status_code == 401


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"key": 1}', 400),
        (b'{"key": ""}', 400),
        (b'{"key": "a\\nb"}', 400),
        (b'{"key": "' + b"k" * 3001 + b'"}', 400),
        (b'{"key": "wrong"}', 401),
        (b'{"key": "' + b"k" * 20_000 + b'"}', 413),
    ],
)
async def test_a_wrong_login_sets_no_cookie(
    world: World, body: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    await world.key()
    headers = OWN | {"content-type": "application/json"}
    answer = await world.http.post("/console/login", content=body, headers=headers)
    assert answer.status_code == status
    assert "set-cookie" not in answer.headers
    assert "wrong" not in caplog.text


async def test_without_keys_the_admin_token_opens_the_administration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ADMIN_TOKEN, "right one")
    transport = httpx.ASGITransport(build_asgi(make_state()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as http:
        session = (await http.get("/console/session", headers=OWN)).json()
        assert (session["scopes"], session["needs_login"]) == (["infer"], True)
        assert (await log_in(http, "wrong")).status_code == 401
        assert (await log_in(http, "right one")).status_code == 200
        session = (await http.get("/console/session", headers=OWN)).json()
        assert ("admin" in session["scopes"], session["needs_login"]) == (True, False)
        assert (await http.get("/admin/status", headers=OWN)).status_code == 200
        assert (await http.get("/admin/status")).status_code == 401


async def test_without_keys_and_token_nobody_has_to_log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_TOKEN, raising=False)
    transport = httpx.ASGITransport(make_app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as http:
        session = (await http.get("/console/session", headers=OWN)).json()
        assert (session["scopes"], session["needs_login"]) == (["infer"], False)


async def test_registry_shows_the_catalog_that_is_served(world: World) -> None:
    admin = {"authorization": f"Bearer {TOKEN}"}
    answer = (await world.http.get("/admin/registry", headers=admin)).json()
    assert [(one["name"], one["is_default"]) for one in answer["bases"]] == [("base", True)]
    found = [(one["name"], one["version"], one["is_default"]) for one in answer["adapters"]]
    assert found == [("pirate", 1, False), ("pirate", 3, True), ("sql", 1, True)]


def figures(num_requests: int, *engines: EngineFigures, num_queued: int = 0) -> BaseFigures:
    counts = [0] * (len(SECONDS) + 1)
    counts[SECONDS.index(0.1)] = num_requests
    return BaseFigures(
        "base",
        num_requests,
        output_tokens=10 * num_requests,
        first_token=tuple(counts),
        num_queued=num_queued,
        engines=engines,
    )


def newest(answer: SeriesAnswer, name: str) -> float | None:
    found: float | None = getattr(answer.bases[0], name)[-1]
    return found


def test_series_sums_the_increases_of_all_ingresses() -> None:
    series = Series()
    engine = EngineFigures("e0", 3, 1, 0.5)
    for second in range(INTERVAL_S):
        for ingress in ("one", "two"):
            now_s = 1000.0 + second
            report = figures(100 + 2 * second, engine, num_queued=2)
            series.add(ingress, (report,), now_s)
    answer = series.answer(1000.0 + INTERVAL_S)
    assert answer.times_s[-1] == 1000
    assert len(answer.times_s) == NUM_POINTS
    # Four increases of two at each ingress; the hundred before the first report do not count.
    assert newest(answer, "requests_per_s") == 16 / INTERVAL_S
    assert newest(answer, "output_tokens_per_s") == 160 / INTERVAL_S
    # Both ingresses see the same engine; each has a queue of its own.
    assert (newest(answer, "running"), newest(answer, "waiting")) == (3, 5)
    assert newest(answer, "kv_usage") == 0.5
    assert 0.08 < (newest(answer, "ttft_p50_s") or 0) <= 0.1


def test_series_has_gaps_forgets_and_stays_bounded() -> None:
    series = Series()
    for second in range(0, 3 * INTERVAL_S * NUM_POINTS, 2):
        series.add(f"i{second}", (figures(second),), 1000.0 + second)
    base = series._bases["base"]
    assert len(base.points) == NUM_POINTS
    assert max(len(series._last), len(base.backlogs)) <= 8
    assert newest(series.answer(1000.0 + 4 * INTERVAL_S * NUM_POINTS), "requests_per_s") is None
    series.add("other", (), 1000.0 + 5 * INTERVAL_S * NUM_POINTS)
    assert not series.answer(0.0).bases


def test_quantile_is_linear_within_a_bucket() -> None:
    counts = [0] * (len(SECONDS) + 1)
    assert quantile(counts, 0.5) is None
    counts[SECONDS.index(0.5)] = 4
    assert quantile(counts, 0.5) == pytest.approx(0.375)
    counts[-1] = 100
    assert quantile(counts, 0.95) == SECONDS[-1]
