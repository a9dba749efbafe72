"""Events of the control plane: each rule is a kind of step, a coroutine over the world whose
arguments are plain values, so that a step can be printed, replayed and left out by itself.

A rule that does not apply, such as an alias of a deleted model, is refused by the product or by
MLflow, and that is its outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from mlflow.exceptions import MlflowException

from registry.errors import RegistryError
from serve_app.errors import EngineFailureError, NonFiniteError
from tests.control_plane.settled import files_of
from tests.control_plane.store import PREFIX, Truth
from tests.control_plane.world import Violation, World
from tests.registry_helpers import ADAPTER_FACTS, BASE_FACTS

Rule = Callable[..., Awaitable[str]]
RULES: dict[str, Rule] = {}
_META = ("kind", "digest", "base", "base_digest", "root", "manifest", "effect", "linked")


def collect(rules: dict[str, Rule]) -> Callable[[Rule], Rule]:
    """A decorator for the rules of a module."""

    def add(function: Rule) -> Rule:
        rules[function.__name__] = function
        return function

    return add


rule = collect(RULES)


@rule
async def wait(world: World, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return ""


@rule
async def requests(world: World, name: str, number: int, canary: str, at: int) -> str:
    """Sends requests through ingress `at`, or the last ingress. `canary`: the outcome of requests
    that the canary answers; the others succeed."""
    found: dict[str, int] = {}
    for ingress in list(world.ingresses.values())[: at + 1][-1:]:
        for i in range(number):
            answer = ingress.ask(name, f"{ingress.name} {i}")
            what = type(answer.error).__name__ if answer.error else f"version {answer.version}"
            found[what] = found.get(what, 0) + 1
            if answer.error is None:
                base = world.wishes.parts(answer.app_name)[1]
                world.journal.asked_s[base] = world.loop.time()
            if answer.arm is None:
                continue
            counts = world.managers.counts(ingress.gateway.ingress_id)
            watch = ingress.gateway.arms.begin(answer.arm)
            watch.first_token()
            key = answer.arm.adapter, answer.arm.digest
            if answer.arm.arm != "canary" or canary == "ok":
                watch.done(True, 1)
                world.journal.num_good[key] += counts
                continue
            world.journal.unsound.add(answer.arm.adapter)
            if canary == "empty":
                watch.done(False, 0)
            else:
                error = NonFiniteError() if canary == "non_finite" else EngineFailureError()
                watch.failed(error, 0)
            world.journal.num_bad[key] += counts
    check_files(world, name)
    return ", ".join(f"{count} {what}" for what, count in found.items())


def check_files(world: World, name: str) -> None:
    """Checks that an engine can fetch the files of each version in a view, whatever fails
    elsewhere."""
    made = world.managers.current
    if made is None or made._view is None or name not in world.truth():
        return
    model = world.truth()[name]
    for one in made._view.catalog.adapters:
        version = model.versions.get(one.version)
        is_there = one.name == name and version is not None and version.source == one.source
        if not is_there or (name, one.version) in world.journal.tampered:
            continue
        if world.database.digest_at(one.source) and (problems := files_of(world, one)):
            raise Violation(problems[0])


async def _mlflow(world: World, method: str, *arguments: object) -> str:
    """Changes the registry with MLflow's own client."""
    try:
        getattr(world.client, method)(*arguments)
    except MlflowException as error:
        return f"refused: {error.error_code}"
    return ""


@rule
async def set_alias(world: World, name: str, alias: str, version: int) -> str:
    world.journal.touch(name)
    return await _mlflow(world, "set_registered_model_alias", name, alias, str(version))


@rule
async def delete_alias(world: World, name: str, alias: str) -> str:
    world.journal.touch(name)
    return await _mlflow(world, "delete_registered_model_alias", name, alias)


@rule
async def tag(world: World, name: str, key: str, value: str) -> str:
    world.journal.touch(name)
    if key == "runtime":
        world.journal.registered.discard(name)
    if key in _META and name in world.truth():
        world.journal.tampered |= {(name, n) for n in world.truth()[name].versions}
    return await _mlflow(world, "set_registered_model_tag", name, PREFIX + key, value)


@rule
async def untag(world: World, name: str, key: str) -> str:
    world.journal.touch(name)
    return await _mlflow(world, "delete_registered_model_tag", name, PREFIX + key)


@rule
async def tag_version(world: World, name: str, version: int, key: str, value: str) -> str:
    world.journal.touch(name)
    world.journal.tampered.add((name, version))
    world.journal.registered.discard(name)
    return await _mlflow(world, "set_model_version_tag", name, str(version), PREFIX + key, value)


@rule
async def delete_version(world: World, name: str, version: int) -> str:
    world.journal.touch(name)
    world.journal.registered.discard(name)
    return await _mlflow(world, "delete_model_version", name, str(version))


@rule
async def delete_model(world: World, name: str) -> str:
    words = await _mlflow(world, "delete_registered_model", name)
    if not words:
        _forget(world, name)
    return words


@rule
async def rename(world: World, name: str, new: str) -> str:
    words = await _mlflow(world, "rename_registered_model", name, new)
    if not words and new != name:
        _forget(world, name)
        _forget(world, new)
    return words


def _forget(world: World, name: str) -> None:
    """Notes that the name belongs to another model from now on."""
    journal = world.journal
    journal.touch(name)
    journal.meanings.pop(name, None)
    journal.registered.discard(name)
    journal.tampered = {key for key in journal.tampered if key[0] != name}
    world.on_write()


@rule
async def log_plain(world: World, name: str, content: str, base: str) -> str:
    """Registers an adapter with MLflow's own calls."""
    world.journal.touch(name)
    try:
        if name not in world.truth():
            world.client.create_registered_model(name)
        source = world.database.plain_folder(content, base)
        made = world.client.create_model_version(name, source, await_creation_for=0)
        world.client.set_model_version_tag(name, made.version, PREFIX + "base", base)
    except MlflowException as error:
        return f"refused: {error.error_code}"
    return f"version {made.version}"


@rule
async def recreate(world: World, name: str, content: str, base: str) -> str:
    """Deletes and recreates a model between two reads: its versions begin at 1 again."""
    await delete_model(world, name)
    await asyncio.sleep(0.05)
    return await log_plain(world, name, content, base)


@rule
async def register(world: World, name: str, content: str, base: str, alias: str | None) -> str:
    """Runs `loraplex register adapter`."""
    before = world.truth()
    world.journal.touch(name)
    folder = world.database.made_folder("adapter", content, base)
    try:
        made = world.cli.register_adapter(folder, name, base=base, facts=ADAPTER_FACTS, alias=alias)
    except RegistryError as error:
        _check_nothing_half_done(name, before, world.truth(), str(error))
        return f"refused: {error}"[:200]
    world.journal.registered.add(name)
    return f"version {made.version}"


@rule
async def register_base(world: World, name: str, content: str, alias: str | None) -> str:
    before = world.truth()
    folder = world.database.made_folder("base", content)
    try:
        made = world.cli.register_base(folder, name, facts=BASE_FACTS, alias=alias)
    except RegistryError as error:
        _check_nothing_half_done(name, before, world.truth(), str(error))
        return f"refused: {error}"[:200]
    return f"version {made.version}"


def _check_nothing_half_done(name: str, before: Truth, after: Truth, error: str) -> None:
    """Moves an alias while the answer is lost: it may have moved, but it must not be gone."""
    if name not in before:
        return
    lost = before[name].aliases.keys() - (after[name].aliases.keys() if name in after else set())
    if lost:
        raise Violation(f"a registration that failed took {name}'s {sorted(lost)} away: {error}")
