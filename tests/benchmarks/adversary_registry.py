"""The attacks of `adversary` from the hands of a writer of one registered model: tags, versions and
a base whose chat template never ends. After each, an alias of a good adapter has to move as ever.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from registry.listing import PREFIX, SETTINGS
from serve_app.cli.commands.store import open_registry
from serve_app.cli.registration import register_base
from tests.benchmarks.adversary_attacks import QUICK_S, Attack, Damage, Target
from tests.benchmarks.adversary_client import Reply, chat, get, post, send

ALIAS_S = 30.0  # until a moved alias is followed; polled every half second, on a busy machine
RECONCILE_AGE_S = 30.0
STARTED_WITHIN_S = 120.0
MAX_BROKEN = 3  # then it is known: each takes half a minute to find out
HOSTILE_BASE = "hostile-template"
ADMIN_TOKEN = "of the benchmark"
_ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{{ '%999999999d' % 1 }}{{ messages }}"
)
_FATAL = (
    ("serve", '{"engine":{"kv_cache_bytes":"' + "9" * 400 + '"}}'),
    ("serve", '{"router":{"policy":"unittest.__main__:x"}}'),
    ("serve", '{"router":{"policy":"antigravity:x","options":{"a":1}}}'),
    ("serve", '{"max_queued_requests":0}'),
    ("serve", "[" * 50_000),
    ("serve", '{"alias":"v1"}'),
    ("canary_weight", "1e400"),
    ("canary_weight", "nan"),
    ("shadow_weight", "\u0663"),
    ("canary_rolled_back", '{"version":1e999}'),
    ("pin", "\x00"),
    ("runtime", "loaded\udc80".encode("utf-8", "replace").decode()),
)
_VERSION_TAGS = ("rank", "digest", "base", "base_digest", "kind", "targets", "num_parameters")


def _client(target: Target) -> MlflowClient:
    uri = f"sqlite:///{target.home}/mlflow.db"
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


async def hostile_tags(target: Target) -> Damage:
    """Values made to end a parser, on every tag that is read, then random ones."""
    damage, client = Damage(), _client(target)
    victim, good = target.adapters[0], target.adapters[1]
    await asyncio.to_thread(_second_version, client, good)
    tags = [*_FATAL, *_random_tags(target.count(600))]
    for number, (key, value) in enumerate(tags):
        await asyncio.to_thread(_write, client, victim, key, value)
        if len(damage.broken) >= MAX_BROKEN:
            break
        if number < len(_FATAL) or number % 100 == 0:
            await _alias_moves(target, client, good, damage, f"{key}={value[:40]!r}")
    await asyncio.to_thread(_clean, client, victim)
    await _alias_moves(target, client, good, damage, "all tags removed")
    for path in ("/health", "/ready"):
        reply = await send(target.port, get(path))
        damage.require(reply.status == 200, f"{path} is 200 afterwards")
    damage.figures["tags_written"] = len(tags)
    damage.require(await _reconcile_age(target) < RECONCILE_AGE_S, "reconciling goes on")
    return damage


def _random_tags(number: int) -> list[tuple[str, str]]:
    draw = random.Random(5)
    makers: tuple[Callable[[], str], ...] = (
        lambda: "9" * draw.randint(1, 4000),
        lambda: json.dumps({draw.choice(("engine", "router", "models")): draw.random()}),
        lambda: json.dumps([None] * draw.randint(0, 500)),
        lambda: draw.choice(("", " ", "true", "-1", "1e999", "NaN", "Infinity", "0x10", "null")),
        lambda: "".join(draw.choices("\u202e\u0660\x01'\";-{}[]:,\\", k=draw.randint(1, 60))),
    )
    return [(draw.choice(SETTINGS), draw.choice(makers)()) for _ in range(number)]


def _write(client: MlflowClient, name: str, key: str, value: str) -> None:
    """Writes a tag. A value that the registry itself refuses is no attack."""
    try:
        client.set_registered_model_tag(name, PREFIX + key, value)
    except MlflowException:
        return


def _clean(client: MlflowClient, name: str) -> None:
    for key in client.get_registered_model(name).tags:
        if key.removeprefix(PREFIX) in SETTINGS:
            client.delete_registered_model_tag(name, key)


def _second_version(client: MlflowClient, name: str) -> None:
    if len(client.search_model_versions(f"name='{name}'")) < 2:
        first = client.get_model_version(name, "1")
        tags = {key: value for key, value in first.tags.items() if key.startswith(PREFIX)}
        client.create_model_version(name, first.source, tags=tags)
    client.set_registered_model_alias(name, "champion", "1")


async def _alias_moves(
    target: Target, client: MlflowClient, name: str, damage: Damage, after: str
) -> None:
    """The alias goes to the other version and answers follow."""
    current = client.get_model_version_by_alias(name, "champion").version
    other = "2" if str(current) == "1" else "1"
    client.set_registered_model_alias(name, "champion", other)
    began_s = time.monotonic()
    request = post("/v1/chat/completions", chat(f"{target.base}:{name}", "hello", 1))
    while True:
        reply = await send(target.port, request)
        damage.count([reply])
        seconds = time.monotonic() - began_s
        if reply.headers.get("x-loraplex-version") == f"{name}@{other}":
            longest = damage.figures.get("alias_followed_after_s", 0.0)
            assert isinstance(longest, float)
            damage.figures["alias_followed_after_s"] = max(longest, round(seconds, 2))
            return
        if seconds > ALIAS_S:
            damage.require(False, f"an alias is followed within {ALIAS_S:g} s after {after}")
            return
        await asyncio.sleep(0.1)


async def _reconcile_age(target: Target) -> float:
    reply = await send(target.port, get("/metrics"))
    for line in reply.body.decode(errors="replace").splitlines():
        if line.startswith("loraplex_reconcile_age_seconds"):
            return float(line.rsplit(" ", 1)[1])
    return float("inf")


async def hostile_versions(target: Target) -> Damage:
    """Versions with lies in their tags, and a name that no model may have."""
    damage, client = Damage(), _client(target)
    good, draw = target.adapters[1], random.Random(9)
    await asyncio.to_thread(_second_version, client, good)
    name = "pirate (old)"
    source = client.get_model_version(good, "1").source
    client.create_registered_model(name, tags={PREFIX + "kind": "adapter"})
    for _ in range(target.count(40)):
        tags = {PREFIX + key: draw.choice(("", "9" * 400, "\x01", "a" * 64, "base", "1e17"))
                for key in _VERSION_TAGS}  # fmt: skip
        await asyncio.to_thread(client.create_model_version, name, source, tags=tags)
    await _alias_moves(target, client, good, damage, "versions that lie")
    client.delete_registered_model(name)
    reply = await send(target.port, get("/v1/models"))
    damage.require(reply.status == 200, "/v1/models is 200")
    damage.require(name.encode() not in reply.body, "an illegal name is not listed")
    return damage


async def hostile_template(target: Target) -> Damage:
    """A base is added whose chat template would run for hours and print a gigabyte."""
    damage = Damage()
    await asyncio.to_thread(_register_hostile_base, target)
    order = post(
        "/admin/bases",
        {"name": HOSTILE_BASE, "engine": {"device": "cpu", "max_model_len": 64}},
        authorization=f"Bearer {ADMIN_TOKEN}",
    )
    added = await send(target.port, order)
    damage.outcomes[f"added {added.status}"] += 1
    request = post("/v1/chat/completions", chat(HOSTILE_BASE, "hi", 1))
    await _first_answer(target, request)  # it waits for the base to start
    reply = await send(target.port, request)
    damage.count([reply])
    damage.figures["answered_after_s"] = round(reply.seconds, 2)
    damage.require(400 <= reply.status < 600, "a chat with that base is refused")
    damage.require(reply.seconds < QUICK_S, f"it is refused within {QUICK_S:g} s")
    remove = get(f"/admin/bases/{HOSTILE_BASE}", authorization=f"Bearer {ADMIN_TOKEN}")
    await send(target.port, remove.replace(b"GET", b"DELETE", 1))
    return damage


async def _first_answer(target: Target, request: bytes) -> Reply:
    """The first reply that is not of a base that only starts."""
    deadline_s = time.monotonic() + STARTED_WITHIN_S
    while True:
        reply = await send(target.port, request, STARTED_WITHIN_S)
        is_starting = reply.status == 503 and reply.headers.get("x-should-retry") != "false"
        is_unknown = reply.status == 404
        if not (is_starting or is_unknown) or time.monotonic() > deadline_s:
            return reply
        await asyncio.sleep(0.3)


def _register_hostile_base(target: Target) -> None:
    registry = open_registry(None)
    if any(base.name == HOSTILE_BASE for base in registry.snapshot().bases):
        return
    source = target.home / "demo" / target.base
    source = source if source.is_dir() else target.home / "base"
    folder = target.home / HOSTILE_BASE
    shutil.copytree(source, folder, copy_function=_linked)
    config = folder / "tokenizer_config.json"
    words = json.loads(config.read_text()) | {"chat_template": _ENDLESS}
    for path in (config, folder / "chat_template.jinja"):
        path.unlink(missing_ok=True)
    config.write_text(json.dumps(words))
    register_base(registry, folder, HOSTILE_BASE, link=True)


def _linked(source: str, target: str) -> None:
    """Large files share their bytes."""
    Path(target).hardlink_to(source)


REGISTRY_ATTACKS: dict[str, Attack] = {
    "hostile_tags": hostile_tags,
    "hostile_versions": hostile_versions,
    "hostile_template": hostile_template,
}
