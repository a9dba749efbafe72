"""A snapshot of the registry: resolves model strings without a network call.

Pure: independent of MLflow and of files. It is sent whole (pickle, msgspec) to the processes that
resolve names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Generic, TypeVar

from registry.entities import (
    AdapterVersion,
    BaseVersion,
    DanglingAlias,
    HeldMeaning,
    ModelEntry,
    Rejected,
    Setting,
    WeightedVersion,
)
from registry.errors import InvalidNameError, NotFoundError, RefusedVersionError
from registry.names import (
    Reference,
    join_weighted,
    parse_model,
    parse_reference,
    split_adapters,
)

DEFAULT_ALIAS = "champion"

V = TypeVar("V", BaseVersion, AdapterVersion)


@dataclass(frozen=True, slots=True)
class Resolution:
    base: BaseVersion
    adapters: tuple[WeightedVersion, ...] = ()

    @property
    def adapter(self) -> AdapterVersion | None:
        """The first: its text side, metrics and account."""
        return self.adapters[0].version if self.adapters else None

    @property
    def versions(self) -> str:
        """The adapters with their versions and weights, `a@1+0.5*b@2`; of the base alone its
        own."""
        if self.adapter is None:
            return f"{self.base.name}@{self.base.version}"
        return join_weighted(
            (f"{one.version.name}@{one.version.version}", one.weight) for one in self.adapters
        )


@dataclass(frozen=True, slots=True)
class DefaultAliases:
    """The alias that a name without suffix resolves to; without it, the highest version counts."""

    everywhere: str = DEFAULT_ALIAS
    of_adapters: tuple[tuple[str, str], ...] = ()  # (base's name, alias), for adapters of that base

    def of(self, version: BaseVersion | AdapterVersion) -> str:
        if isinstance(version, BaseVersion):
            return self.everywhere
        return self.of_base(version.base_name)

    def of_base(self, name: str) -> str:
        return dict(self.of_adapters).get(name, self.everywhere)


Group = tuple[str, str]  # a name, and a base to select its versions by; empty: all versions


class _Index(Generic[V]):
    """The bases or the adapters: by name, then by version or alias."""

    def __init__(self, versions: Iterable[V], catalog: Catalog) -> None:
        self.by_version: dict[str, dict[int, V]] = {}
        self.by_alias: dict[str, dict[str, V]] = {}
        # The version that `base:name` resolves to; for `name` alone, under an empty base.
        self.of_group: dict[Group, V | DanglingAlias] = {}
        for version in versions:
            self.by_version.setdefault(version.name, {})[version.version] = version
            aliases = self.by_alias.setdefault(version.name, {})
            aliases.update(dict.fromkeys(version.aliases, version))
        dangling = {(one.name, one.alias): one for one in catalog.dangling}
        held = {(one.name, one.base_name): one.version for one in catalog.held}
        for name, numbered in self.by_version.items():
            found = self._meanings(name, numbered, catalog, dangling)
            for base_name, meaning in found.items():
                last = numbered.get(held.get((name, base_name), 0))
                is_bad = isinstance(meaning, DanglingAlias) or _is_refused(meaning)
                self.of_group[name, base_name] = last if last and is_bad else meaning

    def _meanings(
        self,
        name: str,
        numbered: dict[int, V],
        catalog: Catalog,
        dangling: Mapping[tuple[str, str], DanglingAlias],
    ) -> dict[str, V | DanglingAlias]:
        """Returns the resolution of a name by base, before held versions apply. An alias takes
        precedence over the highest version; among the aliases of several bases, that of the base
        with the highest version. If the alias is on a version that cannot be served, no other
        version replaces it."""
        meanings: dict[str, V | DanglingAlias] = {}
        groups: dict[str, list[V]] = {}
        for _, version in sorted(numbered.items(), reverse=True):
            groups.setdefault(_base_name(version), []).append(version)
        aliased: list[V | DanglingAlias] = []
        blocked: list[V | DanglingAlias] = []
        for base_name, members in groups.items():
            alias = catalog.default_aliases.of(members[0])
            found: V | DanglingAlias | None = None
            named = self.by_alias[name].get(alias)
            if named is None:
                found = dangling.get((name, alias))
            elif _base_name(named) == base_name:
                found = named
            if isinstance(found, DanglingAlias):
                blocked.append(found)
            elif found is not None:
                aliased.append(found)
            meanings[base_name] = _highest(members) if found is None else found
        meanings[""] = next(iter(aliased + blocked), None) or _highest(numbered.values())
        return meanings

    def find(self, reference: Reference) -> V:
        found: V | None
        if reference.version is not None:
            found = self.by_version[reference.name].get(reference.version)
        elif reference.alias is not None:
            found = self.by_alias[reference.name].get(reference.alias)
        else:
            found = _served(self.of_group[reference.name, ""])
        if found is None:
            raise NotFoundError(f"{reference.name!r} has no version or alias {reference}")
        return found

    def find_for(self, reference: Reference, base_name: str) -> V:
        """Resolves a name without a suffix among its versions for that base, if there are any."""
        if reference.version is None and reference.alias is None:
            group = self.of_group.get((reference.name, base_name))
            if group is not None:
                return _served(group)
        return self.find(reference)

    def defaults(self) -> dict[str, V]:
        """Returns the default versions by name, without names whose version cannot be served."""
        return {
            name: found
            for (name, base_name), found in self.of_group.items()
            if not base_name and not isinstance(found, DanglingAlias)
        }


@dataclass(frozen=True)  # no slots: the indices below are cached in the instance's dict
class Catalog:
    bases: tuple[BaseVersion, ...] = ()
    adapters: tuple[AdapterVersion, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    settings: tuple[Setting, ...] = ()
    default_aliases: DefaultAliases = DefaultAliases()  # the server's, not the registry's
    dangling: tuple[DanglingAlias, ...] = ()
    held: tuple[HeldMeaning, ...] = ()  # the server's, not the registry's

    def __getstate__(self) -> dict[str, object]:
        """Leaves the cached indices out."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def setting(self, name: str, key: str) -> str | None:
        """Returns a setting of the registered model `name`; `key` is in `listing.SETTINGS`."""
        return self.setting_values.get((name, key))

    def resolve(self, model: str) -> Resolution:
        """Resolves `base`, `base:adapter` or `adapter`, each with `@alias` or `@version`."""
        first, second = parse_model(self.registered(model))
        if second is not None:
            return self._resolve_pair(first, second)
        if first.name in self._bases.by_version:
            return Resolution(self._bases.find(first))
        self._check_refused(first)
        if first.name in self._adapters.by_version:
            adapter = self._adapters.find(first)
            return Resolution(self._base_of(adapter), (WeightedVersion(adapter),))
        raise NotFoundError(f"no base model or adapter is named {first.name!r}")

    def resolve_each(self, model: str) -> tuple[tuple[Resolution, float], ...]:
        """Resolves a model as `resolve` does, or several adapters with their weights, each to the
        version that its name alone resolves to. The adapters need not fit together."""
        (first, weight), *more = split_adapters(self.registered(model))
        found = self.resolve(first)
        each = [(found, weight)]
        for name, weight in more:
            model = name if ":" in name else f"{found.base.name}:{name}"
            each.append((self.resolve(model), weight))
        return tuple(each)

    def resolve_request(self, model: str) -> Resolution:
        """Resolves the adapters of a request together. Raises InvalidNameError if they are not
        different adapters of one base."""
        each = self.resolve_each(model)
        base, weighted = each[0][0].base, list[WeightedVersion]()
        if each[0][0].adapter is None and (len(each) > 1 or each[0][1] != 1):
            raise InvalidNameError(f"{base.name!r} in {model[:200]!r} is a base, not an adapter")
        for found, weight in each:
            adapter = found.adapter
            if adapter is None:
                return found
            if found.base.digest != base.digest:
                raise InvalidNameError(
                    f"{model[:200]!r} names adapters of different bases: {adapter.name!r} was made "
                    f"for version {found.base.version} of {found.base.name!r}, the first for "
                    f"version {base.version}"
                )
            if any(adapter.digest == one.version.digest for one in weighted):
                raise InvalidNameError(
                    f"{adapter.name!r} has the same files as another adapter in {model[:200]!r}"
                )
            if adapter.invocation and len(each) > 1:
                raise InvalidNameError(
                    f"{adapter.name!r} in {model[:200]!r} has alora_invocation_tokens: such an "
                    "adapter cannot be together with others"
                )
            weighted.append(WeightedVersion(adapter, weight))
        return Resolution(base, tuple(weighted))

    def registered(self, model: str) -> str:
        """Returns the model string with a base's ORGANISATION/NAME replaced by its registered
        name."""
        if "/" not in model:
            return model
        end = min((i for i in map(model.find, ":@") if i >= 0), default=len(model))
        name = self._by_model_id.get(model[:end])
        if name is None:
            raise NotFoundError(f"no base model is named {model[:100]!r}")
        return name + model[end:]

    def resolve_base(self, reference: str) -> BaseVersion:
        parsed = parse_reference(self.registered(reference))
        if parsed.name not in self._bases.by_version:
            raise NotFoundError(f"no base model is named {parsed.name!r}")
        return self._bases.find(parsed)

    def default_bases(self) -> dict[str, BaseVersion]:
        return self._bases.defaults()

    def default_base(self, name: str) -> BaseVersion | None:
        """Returns the version that a registered name without suffix, or an ORGANISATION/NAME,
        resolves to."""
        found = self._bases.of_group.get((self._by_model_id.get(name, name), ""))
        return None if isinstance(found, DanglingAlias) else found

    def meanings(self) -> dict[Group, AdapterVersion | BaseVersion | DanglingAlias]:
        """Returns the resolution of each name without a suffix, per base and among all versions."""
        return {**self._bases.of_group, **self._adapters.of_group}

    def entries(self) -> tuple[ModelEntry, ...]:
        """Returns the bases, by each of their names, and then the adapters, each with the version
        that its name resolves to."""
        bases = [
            ModelEntry(name, None, base.version, base.digest, base.created_s)
            for _, base in sorted(self._bases.defaults().items())
            for name in (base.name, *self._model_ids.get(base.name, ()))
        ]
        adapters = [
            ModelEntry(one.name, one.base_name, one.version, one.digest, one.created_s)
            for _, one in sorted(self._adapters.defaults().items())
        ]
        return (*bases, *adapters)

    @cached_property
    def revision(self) -> str:
        """The digest of the content: equal for equal catalogs of all processes."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def _resolve_pair(self, base: Reference, adapter: Reference) -> Resolution:
        if base.name not in self._bases.by_version:
            raise NotFoundError(f"no base model is named {base.name!r}")
        self._check_refused(adapter)
        if adapter.name not in self._adapters.by_version:
            raise NotFoundError(f"no adapter is named {adapter.name!r}")
        found = self._adapters.find_for(adapter, base.name)
        if found.base_name != base.name:
            raise NotFoundError(
                f"adapter {adapter} belongs to base {found.base_name!r}, not to {base.name!r}"
            )
        # Without a suffix, the adapter determines the version of its base.
        if base.version is None and base.alias is None:
            return Resolution(self._base_of(found), (WeightedVersion(found),))
        named = self._bases.find(base)
        if named.digest != found.base_digest:
            raise NotFoundError(
                f"adapter {adapter} was made for another version of {base.name!r} than {base}"
            )
        return Resolution(named, (WeightedVersion(found),))

    def _check_refused(self, adapter: Reference) -> None:
        """Raises RefusedVersionError if the files of what is named are refused, and the name has no
        other version that may be meant."""
        known, version = self._adapters.by_version.get(adapter.name, {}), adapter.version
        if adapter.alias is not None:
            at = (adapter.name, adapter.alias)
            version = next((o.version for o in self.dangling if (o.name, o.alias) == at), None)
        if version in known or (known and version is None):
            return
        for one in sorted(self.rejected, key=attrgetter("version"), reverse=True):
            is_named = one.name == adapter.name and version in (None, one.version)
            if is_named and one.is_public:
                raise RefusedVersionError(
                    f"The adapter {one.name!r} version {one.version} cannot be served: {one.reason}"
                )

    def _base_of(self, adapter: AdapterVersion) -> BaseVersion:
        base = self._bases_by_digest.get((adapter.base_name, adapter.base_digest))
        if base is None:
            raise NotFoundError(
                f"the version of base {adapter.base_name!r} that adapter {adapter.name!r} "
                "was made for is no longer registered"
            )
        return base

    @cached_property
    def by_content(self) -> dict[tuple[str, int, str], BaseVersion | AdapterVersion]:
        """All versions by name, number and digest."""
        every: tuple[BaseVersion | AdapterVersion, ...] = (*self.bases, *self.adapters)
        return {(one.name, one.version, one.digest): one for one in every}

    @cached_property
    def setting_values(self) -> dict[tuple[str, str], str]:
        return {(one.name, one.key): one.value for one in self.settings}

    @cached_property
    def _by_model_id(self) -> dict[str, str]:
        """ORGANISATION/NAME of any version -> registered name. Every writer of the registry may
        give a version any id: the oldest version with the id decides, so that a new base cannot
        take over the id of another base; among equally old versions, the first name by the
        alphabet."""
        bases = sorted(self.bases, key=lambda base: (base.created_s, base.name), reverse=True)
        return {base.model_id: base.name for base in bases if base.model_id}

    @cached_property
    def _model_ids(self) -> dict[str, list[str]]:
        ids: dict[str, list[str]] = {}
        for model_id, name in sorted(self._by_model_id.items()):
            ids.setdefault(name, []).append(model_id)
        return ids

    @cached_property
    def _bases(self) -> _Index[BaseVersion]:
        return _Index(self.bases, self)

    @cached_property
    def _adapters(self) -> _Index[AdapterVersion]:
        return _Index(self.adapters, self)

    @cached_property
    def _bases_by_digest(self) -> dict[tuple[str, str], BaseVersion]:
        """Versions by name and digest: among equal digests the default version, then the
        highest."""
        ascending = sorted(self.bases, key=attrgetter("version"))
        found = {(base.name, base.digest): base for base in ascending}
        for base in self._bases.defaults().values():
            found[base.name, base.digest] = base
        return found


def _base_name(version: BaseVersion | AdapterVersion) -> str:
    return version.base_name if isinstance(version, AdapterVersion) else ""


def _highest(versions: Iterable[V]) -> V:
    """Returns the highest version that can be served, or the highest if none can."""
    return max(versions, key=lambda one: (not _is_refused(one), one.version))


def _served(found: V | DanglingAlias) -> V:
    if isinstance(found, DanglingAlias):
        raise NotFoundError(f"{found.public_words}; name a version, or move the alias")
    return found


def _is_refused(version: BaseVersion | AdapterVersion | None) -> bool:
    return isinstance(version, AdapterVersion) and bool(version.refused)


def visible(
    adapters: Iterable[AdapterVersion], settings: Iterable[Setting]
) -> tuple[AdapterVersion, ...]:
    """Hides adapters that were unloaded through /v1/unload_lora_adapter."""
    hidden = {one.name for one in settings if (one.key, one.value) == ("runtime", "unloaded")}
    return tuple(adapter for adapter in adapters if adapter.name not in hidden)
