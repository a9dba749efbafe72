"""Canaries and shadows as clients and operators see them: Serve, HTTP, the paced engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from registry.catalog import Catalog
from registry.entities import Setting
from serve_app.canary.split import place
from serve_app.cli import main as cli
from serve_app.config import ADMIN_TOKEN, CanaryArgs
from tests.fakes_engine import FAULT
from tests.fakes_registry import FolderRegistry
from tests.serve_rig import RIG_BASE, RIG_TOKEN, Rig, deploy, held, metric, rig_args, wait_ready
from tests.waiting import eventually

pytestmark = pytest.mark.serve

MAX_SHADOWS = 2
NAMES = ("sticky", "errs", "silent", "nan", "shadowed", "tried")  # one per test: they share a rig
USERS = [f"user-{number}" for number in range(24)]


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("registry")
    registry = FolderRegistry(folder)
    base = registry.add_base(RIG_BASE)
    aliases = {"sticky": "canary", "shadowed": "shadow"}
    adapters = [
        version
        for name in NAMES
        for version in (
            registry.add_adapter(name, base, aliases=("champion",)),
            registry.add_adapter(
                name, base, 2, aliases=(aliases[name],) if name in aliases else ()
            ),
        )
    ]
    faults = {"errs": "error", "silent": "empty", "nan": "non_finite"}
    for one in adapters:
        if one.version == 2 and one.name in faults:
            (folder / one.digest / FAULT).write_text(faults[one.name])
    settings = (
        Setting("sticky", "canary_weight", "0.5"),
        Setting("shadowed", "shadow_weight", "1"),
    )
    args = rig_args(200, RIG_BASE)
    args = args.model_copy(
        update={
            "canary": CanaryArgs(min_requests=10, max_latency_ratio=1000),
            "ingress": args.ingress.model_copy(update={"max_shadow_requests": MAX_SHADOWS}),
        }
    )
    running = deploy(serve_port, args, folder, Catalog((base,), tuple(adapters), settings=settings))
    wait_ready(running)
    return running


@pytest.fixture
def client(rig: Rig) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rig.url, timeout=120) as connection:
        yield connection


@pytest.fixture
def admin(rig: Rig) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {RIG_TOKEN}"}
    with httpx.Client(base_url=f"{rig.url}/admin", headers=headers, timeout=120) as connection:
        yield connection


def ask(client: httpx.Client, model: str, user: str | None = None, **fields: object) -> str:
    """`arm version`, of an answer that is as it should be."""
    body = {"model": model, "prompt": "abc", "max_tokens": 4, "user": user} | fields
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return told(answer)


def told(answer: httpx.Response) -> str:
    return f"{answer.headers.get('x-loraplex-arm')} {answer.headers['x-loraplex-version']}"


def setting(rig: Rig, name: str, key: str) -> str | None:
    return rig.registry.snapshot().setting(name, key)


def test_a_user_always_meets_the_same_version(client: httpx.Client) -> None:
    seen = {user: {ask(client, "sticky", user) for _ in range(3)} for user in USERS}
    wanted = {
        user: {"canary sticky@2" if place("sticky", user) < 0.5 else "stable sticky@1"}
        for user in USERS
    }
    assert seen == wanted
    assert len({arm for arms in seen.values() for arm in arms}) == 2
    for field in ("safety_identifier", "prompt_cache_key"):
        assert {user: {ask(client, "sticky", **{field: user})} for user in USERS[:4]} == {
            user: wanted[user] for user in USERS[:4]
        }
    for user in USERS[:4]:
        messages = [{"role": "user", "content": "hi"}]
        chat = {"model": f"{RIG_BASE}:sticky", "messages": messages, "stream": True}
        answer = client.post(
            "/v1/chat/completions",
            json=chat | {"max_tokens": 2},
            headers={"x-session-id": user},
        )
        assert {told(answer)} == wanted[user]
        assert answer.text.endswith("[DONE]\n\n")


def test_who_names_a_version_gets_it_and_is_in_no_arm(client: httpx.Client) -> None:
    assert {ask(client, "sticky@1", user) for user in USERS[:6]} == {"None sticky@1"}
    assert {ask(client, "sticky@canary", user) for user in USERS[:6]} == {"None sticky@2"}
    assert ask(client, RIG_BASE) == f"None {RIG_BASE}@1"


def test_both_arms_have_their_own_numbers(client: httpx.Client) -> None:
    def counts() -> Counter[str]:
        return Counter(
            {
                arm: int(
                    metric(
                        client,
                        "loraplex_arm_requests_total",
                        adapter="sticky",
                        arm=arm,
                        outcome="ok",
                    )
                )
                for arm in ("stable", "canary")
            }
        )

    before = counts()
    asked = Counter(ask(client, "sticky").split()[0] for _ in range(20))
    eventually(lambda: counts() - before == asked)
    name = "loraplex_arm_time_to_first_token_seconds_count"
    eventually(lambda: metric(client, name, adapter="sticky") == counts().total())
    assert metric(client, "loraplex_arm_output_tokens_total", adapter="sticky") >= 80


@pytest.mark.parametrize(
    ("name", "words"),
    [("errs", "errors in"), ("silent", "empty outputs in"), ("nan", "not finite")],
)
def test_a_bad_canary_is_rolled_back(
    rig: Rig, client: httpx.Client, admin: httpx.Client, name: str, words: str
) -> None:
    started = admin.post(f"/canaries/{name}", json={"version": 2, "weight": 0.5})
    assert started.status_code == 200, started.text
    drawn = random.Random(3)
    answers: Counter[str] = Counter()

    def send() -> httpx.Response:
        body = {"model": name, "prompt": "abc", "max_tokens": 2, "user": str(drawn.random())}
        return client.post("/v1/completions", json=body)

    def is_rolled_back() -> bool:
        answers[told(send())] += 1
        return setting(rig, name, "canary_rolled_back") is not None

    eventually(is_rolled_back)
    assert answers[f"canary {name}@2"] >= (1 if name == "nan" else 10)
    assert setting(rig, name, "canary_weight") == "0"
    assert words in (setting(rig, name, "canary_rolled_back") or "")

    def all_meet_the_stable_version() -> bool:
        found = [send() for _ in range(20)]
        return all(one.status_code == 200 and told(one).endswith(f"{name}@1") for one in found)

    eventually(all_meet_the_stable_version)  # the ingress may have the verdict after the registry
    eventually(lambda: metric(client, "loraplex_canary_rollbacks_total", adapter=name) == 1)

    def shown() -> str:
        canaries = admin.get("/canaries").json()["canaries"]
        (status,) = (one for one in canaries if one["name"] == name)
        return status["rolled_back"] or ""

    eventually(lambda: words in shown())


def test_a_shadow_is_never_seen_and_never_too_many(rig: Rig, client: httpx.Client) -> None:
    def shadows(outcome: str) -> float:
        return metric(
            client, "loraplex_arm_requests_total", adapter="shadowed", arm="shadow", outcome=outcome
        )

    assert ask(client, "shadowed") == "stable shadowed@1"
    eventually(lambda: shadows("ok") == 1)
    with ThreadPoolExecutor(12) as pool:
        with held(rig):
            asked = [pool.submit(ask, client, "shadowed", max_tokens=100) for _ in range(12)]
            wanted = 12 + MAX_SHADOWS
            eventually(lambda: metric(client, "vllm:num_requests_running") == wanted)
            dropped = "loraplex_shadows_dropped_total"
            eventually(lambda: metric(client, dropped) == 12 - MAX_SHADOWS)
            assert metric(client, "loraplex_shadows") == MAX_SHADOWS
        assert {one.result() for one in asked} == {"stable shadowed@1"}
    eventually(lambda: metric(client, "loraplex_shadows") == 0)
    eventually(lambda: shadows("ok") == 1 + MAX_SHADOWS)
    eventually(lambda: metric(client, "vllm:num_requests_running") == 0)
    eventually(lambda: metric(client, "loraplex_open_engine_requests") == 0)


def test_a_shadow_ends_without_its_client_and_its_failure_is_nobodys(
    rig: Rig, client: httpx.Client
) -> None:
    """The client leaves in the middle; the engine is idle a moment later."""
    body = {"model": "shadowed", "prompt": "abc", "max_tokens": 300, "stream": True}
    with held(rig), client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # httpx closes the connection when nothing holds the iterator
        next(lines)
        eventually(lambda: metric(client, "loraplex_shadows") == 1)
    eventually(lambda: metric(client, "loraplex_shadows") == 0)
    eventually(lambda: metric(client, "vllm:num_requests_running") == 0)
    known = rig.registry.snapshot()
    gone = rig.registry.add_adapter("shadowed", known.bases[0], 3, has_files=False)
    moved = [
        replace(one, aliases=()) if (one.name, one.version) == ("shadowed", 2) else one
        for one in known.adapters
    ]
    missing = replace(gone, aliases=("shadow",))
    rig.registry.write(replace(known, adapters=(*moved, missing)))

    def has_failed() -> bool:
        assert ask(client, "shadowed") == "stable shadowed@1"
        labels = {"adapter": "shadowed", "arm": "shadow", "version": "3", "outcome": "error"}
        return metric(client, "loraplex_arm_requests_total", **labels) > 0

    eventually(has_failed)
    eventually(lambda: metric(client, "loraplex_open_engine_requests") == 0)


def test_an_operator_starts_watches_and_promotes(
    rig: Rig,
    client: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(ADMIN_TOKEN, RIG_TOKEN)
    monkeypatch.setenv("COLUMNS", "200")

    def canary(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(("canary", *words, "--url", rig.url))
        assert not ended.value.code, capsys.readouterr().err
        return capsys.readouterr().out

    started = canary("start", "tried", "--version", "2", "--weight", "0.3")
    assert "canary  2        0.3" in started
    eventually(lambda: not ask(client, "tried").startswith("None"))
    seen = Counter(ask(client, "tried", user) for user in USERS)
    assert seen["canary tried@2"] == sum(place("tried", user) < 0.3 for user in USERS)
    shown = canary("status", "tried")
    assert "too few requests yet" in shown or "good" in shown
    promoted = canary("promote", "tried", "--version", "2").splitlines()
    assert promoted == [
        "tried  the canary is promoted: tried means version 2, by the alias champion",
        f"Another trial: loraplex canary start tried --version N --weight 0.1 --url {rig.url}",
    ]
    eventually(lambda: {ask(client, "tried", user) for user in USERS} == {"None tried@2"})
    aliases = {
        one.version: one.aliases for one in rig.registry.snapshot().adapters if one.name == "tried"
    }
    assert aliases == {1: (), 2: ("champion",)}
    assert "has no canary" in canary("status", "tried")
    canary("start", "tried", "--version", "1", "--shadow", "0.5")
    aborted = canary("abort", "tried").splitlines()
    assert aborted[0] == "tried  the trial has ended: tried means version 2, by the alias champion"
    with pytest.raises(SystemExit):
        cli.main(("canary", "promote", "tried", "--url", rig.url))
    assert capsys.readouterr().err == (
        "error: The server answered 404: adapter 'tried' has no alias 'canary': nothing to "
        "promote; `loraplex canary start tried --version N --weight 0.1` begins a trial\n"
    )


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"version": 2, "weight": 1.5}, 400, "weight"),
        ({"version": 2}, 400, "weight: required"),
        ({"version": 9, "weight": 0.5}, 400, "version: 9"),
        ({"version": 2, "alias": "x", "weight": 0.5}, 400, "alias"),
        ({"version": "2", "weight": 0.5}, 400, "version"),
        ({"version": 2, "weight": 0.5, "wait": 1}, 400, "wait"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_field(
    admin: httpx.Client, body: dict[str, object], status: int, words: str
) -> None:
    answer = admin.post("/canaries/tried", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_orders_need_the_token_and_a_canary(client: httpx.Client, admin: httpx.Client) -> None:
    assert client.get("/admin/canaries").status_code == 401
    assert admin.post("/canaries/nobody/promote").status_code == 404
    assert admin.post("/canaries/errs@1/abort").status_code == 400
    other = admin.post("/canaries/sticky/promote", json={"version": 9})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "version")
