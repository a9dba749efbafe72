"""An operator's orders about a base: add, remove, sleep, wake.

The first two are written into the registry, where every manager reads them; the others take effect
once. A base that the configuration file names cannot be added or removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from registry.catalog import Catalog
from registry.errors import NotFoundError
from serve_app.config import ModelArgs
from serve_app.control.base_plan import SERVE, file_names, parse_setting, resolved
from serve_app.control.fleet import Fleet
from serve_app.errors import ConflictError
from serve_app.messages import BaseChange
from serve_app.platform_view import BaseLine, RegistryReader

_FOLLOW_S = 10.0


async def change_base(
    change: BaseChange,
    models: Sequence[ModelArgs],
    catalog: Catalog,
    registry: RegistryReader,
    fleet: Fleet,
) -> None:
    """Carries out an order. Raises NotFoundError, ConflictError or a RegistryError."""
    if change.kind in ("add", "remove"):
        await _write(change, models, catalog, registry)
        return
    now_s = asyncio.get_running_loop().time()
    lines = _lines(change.name, fleet)
    if change.kind == "wake":
        for line in lines:
            fleet.sleep.wake(line.digest, now_s)
        return
    for line in lines:
        if line.state not in ("running", "asleep"):
            raise ConflictError(
                f"{change.name!r} is {line.state}: only a running base can be put to sleep"
            )
        if num_open := fleet.sleep.num_open(line.digest, now_s):
            raise ConflictError(
                f"{change.name!r} has {num_open} open requests: it cannot be put to sleep now"
            )
    for line in lines:
        fleet.sleep.request_sleep(line.digest, now_s)


async def wait_until_planned(
    change: BaseChange, changed: asyncio.Condition, planned: Callable[[], Catalog | None]
) -> None:
    """Returns after a round of the manager that read the write of `add` or `remove`, so that the
    next list of the bases shows the outcome, or after `_FOLLOW_S`. `planned` returns the catalog of
    the last round; `changed` is notified when it is replaced."""
    wanted = change.setting if change.kind == "add" else None

    def is_planned() -> bool:
        catalog = planned()
        return catalog is not None and catalog.setting(change.name, SERVE) == wanted

    with suppress(TimeoutError):
        async with asyncio.timeout(_FOLLOW_S), changed:
            await changed.wait_for(is_planned)


def still_served_as(name: str, catalog: Catalog, lines: Sequence[BaseLine]) -> str | None:
    """Returns the name of another base that serves the files of a version of `name`, or None. It
    also answers requests for `name`."""
    digests = {base.digest for base in catalog.bases if base.name == name}
    others = (one for one in lines if one.name != name and one.state != "draining")
    return next((one.name for one in others if one.digest in digests), None)


async def _write(
    change: BaseChange,
    models: Sequence[ModelArgs],
    catalog: Catalog,
    registry: RegistryReader,
) -> None:
    name = change.name
    if name in file_names(resolved(models, catalog)):
        raise ConflictError(f"{name!r} is one of the configuration file's models: change it there")
    if change.kind == "remove":
        if catalog.setting(name, SERVE) is None:
            raise NotFoundError(f"no admin call added a base {name!r}")
        await asyncio.to_thread(registry.set_setting, name, SERVE, None)
        return
    parse_setting(name, change.setting)  # checked again here: no invalid setting may be written
    try:
        catalog.resolve_base(name)
    except NotFoundError as error:
        remedy = f"register it first: loraplex register base FOLDER --name {name}"
        raise NotFoundError(f"{error}; {remedy}") from None
    await asyncio.to_thread(registry.set_setting, name, SERVE, change.setting)


def _lines(name: str, fleet: Fleet) -> list[BaseLine]:
    """The lines of all its served versions, or of a single version if `name` is `name@version`."""
    lines = [
        line
        for line in fleet.lines
        if name in (line.name, f"{line.name}@{line.version}") and line.state != "draining"
    ]
    if not lines or not all(line.digest for line in lines):
        raise NotFoundError(f"no base {name!r} is served here")
    return lines
