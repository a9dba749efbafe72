"""Rules for operators' orders to the manager: bases, adapters, canaries."""

from __future__ import annotations

import asyncio

from ray.serve.exceptions import RayServeException

from registry.errors import NotFoundError, RegistryError
from serve_app.canary.split import parse_weight
from serve_app.control.base_plan import parse_setting
from serve_app.messages import AdapterChange, BaseChange, CanaryChange
from serve_app.ray_calls import Refusal
from tests.control_plane.rules import Rule, collect
from tests.control_plane.store import PREFIX, Truth
from tests.control_plane.wishes import SERVE, base_versions
from tests.control_plane.world import Violation, World

ORDERS: dict[str, Rule] = {}
rule = collect(ORDERS)
# The longest wait for an answer: a load reads the registry twice, and a read may last 40 s.
_ORDER_S = 120.0


async def order(world: World, method: str, *arguments: object) -> tuple[str, object]:
    """Sends an operator's order to the manager."""
    try:
        async with asyncio.timeout(_ORDER_S):
            answer = await getattr(world.managers, method).remote(*arguments)
    except TimeoutError:
        raise Violation(f"{method}{arguments} got no answer for {_ORDER_S:g} s") from None
    except (RegistryError, RayServeException) as error:
        return f"failed: {error}"[:200], error
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise Violation(f"{method} is answered with a fault of ours: {words}") from error
    if isinstance(answer, Refusal):
        return f"refused: {answer.error}"[:200], answer.error
    return "", answer


@rule
async def base(world: World, kind: str, name: str, setting: str) -> str:
    truth = world.truth()
    try:
        parse_setting(name, setting)  # as the HTTP route does first
    except ValueError as error:
        return f"refused: {error}"[:200]
    if kind == "sleep":
        world.journal.rested.add(name)
    words, error = await order(world, "change_base", BaseChange(kind, name, setting))  # type: ignore[arg-type]
    is_known = bool(base_versions(name, truth))
    has_wish = name in truth and SERVE in truth[name].tags
    is_there = (kind == "add" and is_known) or (kind == "remove" and has_wish)
    if is_there and not world.faults.is_unlistable and isinstance(error, NotFoundError):
        raise Violation(f"bases {kind} {name}: {words}, and the registry has it")
    return words


@rule
async def adapter(world: World, kind: str, name: str, content: str, base: str) -> str:
    if kind in ("load", "unload"):
        world.journal.touch(name)
        world.journal.registered.discard(name)
    folder = str(world.database.made_folder("adapter", content, base))
    change = AdapterChange(kind, name, folder, base, may_replace=True)  # type: ignore[arg-type]
    return (await order(world, "change_adapter", change))[0]


@rule
async def start_canary(
    world: World, name: str, version: int | None, weight: float | None, shadow: float | None
) -> str:
    world.journal.touch(name)
    was = _canary(world.truth(), name)
    seen: list[tuple[int, float]] = []
    world.watch = lambda truth: seen.append(_canary(truth, name))
    try:
        change = CanaryChange("start", name, version, weight, shadow)
        words, _ = await order(world, "change_canary", change)
    finally:
        world.watch = None
    for number, share in seen:
        is_new = number not in (0, was[0])
        if weight is not None and is_new and share not in (0.0, weight):
            raise Violation(f"canary {name}@{number} was started with {weight:g}, got {share:g}")
    return words


def _canary(truth: Truth, name: str) -> tuple[int, float]:
    """Returns version and weight; 0: none."""
    if name not in truth:
        return 0, 0.0
    weight = parse_weight(truth[name].tags.get(PREFIX + "canary_weight"))
    return truth[name].aliases.get("canary", 0), weight or 0.0


@rule
async def promote(world: World, name: str) -> str:
    made = world.managers.current
    number, _ = _canary(world.truth(), name)
    known = world.truth().get(name)
    digest = (
        ""
        if known is None or not number
        else known.versions[number].tags.get(PREFIX + "digest", "")
    )
    is_vetoed = made is not None and (name, digest) in made._canaries._vetoes
    words, error = await order(world, "change_canary", CanaryChange("promote", name))
    if is_vetoed and not isinstance(error, Exception):
        raise Violation(f"{name}@{number} was rolled back, and promoted all the same")
    world.journal.touch(name)
    if not isinstance(error, Exception) and number and made is not None:
        try:
            now = made._read_now().resolve(name).adapter
        except RegistryError:  # away again
            return words
        if now is None or now.version != number:
            raise Violation(f"{name}@{number} was promoted, and the name means {now}")
    return words


@rule
async def abort(world: World, name: str) -> str:
    world.journal.touch(name)
    return (await order(world, "change_canary", CanaryChange("abort", name)))[0]
