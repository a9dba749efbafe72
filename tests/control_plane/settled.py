"""The promises that hold again after all faults have ended: the served bases and adapters are those
of the registry, with the content that it names."""

from __future__ import annotations

from registry.catalog import Catalog
from registry.client import Registry
from registry.entities import AdapterVersion, content_digest
from registry.errors import RegistryError
from registry.manifest import MAX_BASE_BYTES, scan_folder
from registry.names import is_legal_name
from serve_app.control.manager import Manager
from serve_app.platform_view import PlatformView
from tests.control_plane.processes import use_client
from tests.control_plane.store import PREFIX, TrueModel, Truth
from tests.control_plane.world import MIN_REQUESTS, World


def unsettled(world: World) -> list[str]:
    made = world.managers.current
    assert made is not None
    if made._view is None or made._watcher.error is not None:
        return [f"the manager has no view: {made._watcher.error}"]
    truth = world.truth()
    problems = _differences(world, made)
    problems += _of_bases(world, made, truth)
    for ingress in world.ingresses.values():
        view = ingress.gateway.view
        if view is None or view.revision != made._view.revision:
            problems.append(f"{ingress.name} has an old view")
    if problems:
        return problems
    for name, model in sorted(truth.items()):
        problems += _of_adapter(world, name, model)
    problems += _of_canaries(world, made, truth)
    return problems + _of_pins(world, made)


def _view(world: World) -> PlatformView:
    made = world.managers.current
    assert made is not None
    assert made._view is not None
    return made._view


def _differences(world: World, made: Manager) -> list[str]:
    """Returns the differences between the served catalog and one that a new process would read."""
    catalog = _fresh(world)
    assert made._view is not None
    served = made._view.catalog
    found = []
    for kind in ("bases", "adapters", "rejected", "settings"):
        mine, theirs = set(getattr(served, kind)), set(getattr(catalog, kind))
        if mine != theirs:
            words = [_short(one) for one in sorted(map(str, mine ^ theirs))[:2]]
            found.append(f"{kind} differ from the registry's: {' / '.join(words)}")
    return found


def _fresh(world: World) -> Catalog:
    marker = world.database.marker()
    if world.fresh is None or marker != world.fresh[0]:
        registry = Registry(world.database.uri)
        use_client(registry, world.database.client, world.loop)
        world.fresh = marker, registry.snapshot()
    return world.fresh[1]


def _short(text: str) -> str:
    return text if len(text) < 300 else text[:300] + "..."


def _of_bases(world: World, made: Manager, truth: Truth) -> list[str]:
    found = []
    assert made._view is not None
    wanted = world.wishes.wanted(truth)
    lines = {line.application: line for line in made._fleet.lines}
    served: set[str] = set()
    for name, version in wanted.items():
        digest = truth[name].versions[version].tags[PREFIX + "digest"]
        apps = [app for app in world.serve.apps if world.wishes.parts(app)[1] == digest[:12]]
        state = [base for base in made._view.bases if base.base.digest == digest]
        if not state:
            found.append(f"base {name}@{version} is wished for and not served")
        elif state[0].state not in ("running", "asleep"):
            found.append(f"base {name}@{version} is {state[0].state}: {state[0].message}")
        elif state[0].state == "running" and not any(map(world.serve.runs, apps)):
            found.append(f"base {name}@{version} is said to run")
        served |= set(apps)
    for app in world.serve.apps.keys() - served:
        name = world.wishes.parts(app)[0]
        is_kept = world.wishes.reference(name, truth) and world.wishes.model(name, truth) is None
        if not is_kept:
            found.append(f"{app} runs on, and no one wishes for it: {lines.get(app)}")
    return found


def _of_adapter(world: World, name: str, model: TrueModel) -> list[str]:
    """Checks the version that the name means, and its files against its digest."""
    if not is_legal_name(name):
        return []
    found = []
    for version in (*_view(world).catalog.adapters, *_view(world).catalog.bases):
        if version.name != name or (name, version.version) in world.journal.tampered:
            continue
        digest = world.database.digest_at(model.versions[version.version].source)
        if digest is not None and digest != version.digest:
            found.append(f"{name}@{version.version} is served as what it is not")
        if isinstance(version, AdapterVersion):
            found += files_of(world, version)
    return found + _of_meaning(world, name, model)


def files_of(world: World, version: AdapterVersion) -> list[str]:
    if (version.name, version.digest, version.source) in world.fetched:
        return []
    try:
        folder = world.engine.fetch(version)
    except RegistryError as error:
        return [f"{version.name}@{version.version} is listed and has no files: {error}"]
    try:
        manifest = scan_folder(folder, "adapter_config.json", MAX_BASE_BYTES)
        if content_digest(manifest) != version.digest:
            return [f"{version.name}@{version.version}: wrong files"]
    finally:
        world.engine.release(folder)
    world.fetched.add((version.name, version.digest, version.source))
    return []


def _of_meaning(world: World, name: str, model: TrueModel) -> list[str]:
    """Checks that the name means its champion, or, if that cannot be served, its previous meaning
    or none."""
    catalog = _view(world).catalog
    ours = [one for one in catalog.adapters if one.name == name]
    if name in world.journal.registered and not ours:
        return [f"{name} was registered, and is not there"]
    if not ours or any(one.name == name for one in catalog.bases):
        return []
    try:
        adapter = catalog.resolve(name).adapter
    except RegistryError:
        return []
    assert adapter is not None
    # An alias counts if it is the default of that version's base.
    champions = [
        one.version for one in ours if world.wishes.default_alias(one.base_name) in one.aliases
    ]
    if len(champions) == 1 and adapter.version != champions[0]:
        return [f"{name} means {adapter.version}, and its champion is {champions[0]}"]
    meanings = world.journal.meanings.get(name, set())
    if not champions and adapter.version not in meanings:
        return [f"{name} means {adapter.version}, which it never meant; {model.aliases}"]
    found = []
    for ingress in world.ingresses.values():
        answer = ingress.ask(name)
        if answer.arm is None and answer.error is None and answer.version != adapter.version:
            found.append(f"{ingress.name} takes {name} for {answer.version}, not {adapter}")
    return found


def _of_canaries(world: World, made: Manager, truth: Truth) -> list[str]:
    found = []
    for (name, digest), reason in world.journal.rolled_back.items():
        model = truth.get(name)
        number = None if model is None else model.aliases.get("canary")
        if model is None or number is None or number not in model.versions:
            continue
        if model.versions[number].tags.get(PREFIX + "digest") != digest:
            continue
        if model.tags.get(PREFIX + "canary_weight") not in (None, "0"):
            found.append(f"the roll-back of {name}@{number} is not written: {reason}")
    for (name, digest), num in world.journal.num_bad.items():
        good = world.journal.num_good
        num_stable = sum(n for key, n in good.items() if key[0] == name and key[1] != digest)
        is_bad = num >= max(4 * MIN_REQUESTS, good[name, digest])
        if (
            is_bad
            and num_stable >= 2 * MIN_REQUESTS
            and (name, digest) not in world.journal.rolled_back
        ):
            split = made._canaries._traffic.splits.get(name)
            version = None if split is None else split.canary.version
            if version is not None and version.digest == digest and split.canary.share > 0:  # type: ignore[union-attr]
                found.append(f"{name}@{version.version} failed {num} times and stays a canary")
    return found


def _of_pins(world: World, made: Manager) -> list[str]:
    """Checks that engines pin the defaults of pinned names and retire no version that a name
    means."""
    assert made._view is not None
    catalog = made._view.catalog
    meant = {one.digest for one in catalog.adapters if one.aliases}
    found = []
    for base in made._view.bases:
        plan = world.managers.engines.plans.get(base.app_name)
        if not base.is_running or plan is None:
            continue
        wanted = {
            one.digest
            for one in catalog.adapters
            if catalog.setting(one.name, "pin") == "true"
            and one.base_digest == base.base.digest
            and not one.refused
            and _means(made, one)
        }
        if {pin.digest for pin in plan.pins} != wanted:
            found.append(f"{base.app_name} has other pins than the registry's")
        if meant & {digest for digest, _ in plan.retired}:
            found.append(f"{base.app_name} shall let go of an adapter that has an alias")
    return found


def _means(made: Manager, one: AdapterVersion) -> bool:
    assert made._view is not None
    try:
        return made._view.catalog.resolve(one.name).adapter == one
    except RegistryError:
        return False
