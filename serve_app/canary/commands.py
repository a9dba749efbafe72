"""What an operator may order of a canary, written to the registry. Blocking; each order can be
given again after a failure in its middle. Refusals name the field and its value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import InvalidRequestError
from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import InvalidNameError, NotFoundError
from registry.names import check_name
from serve_app.canary.split import CANARY, SHADOW, parse_weight
from serve_app.errors import shown
from serve_app.platform_view import RegistryReader

CANARY_WEIGHT = "canary_weight"
SHADOW_WEIGHT = "shadow_weight"
ROLLED_BACK = "canary_rolled_back"


@dataclass(frozen=True, slots=True)
class Orders:
    registry: RegistryReader
    catalog: Catalog  # taken a moment ago
    # (name, digest) -> why that version was rolled back; the registry may not have taken it yet.
    vetoes: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def start(
        self,
        name: str,
        version: int | str | None,
        weight: float | None,
        shadow_weight: float | None,
    ) -> AdapterVersion | None:
        """The canary on trial from now on, if any. The weight last: it is what sends requests."""
        if weight is None and shadow_weight is None:
            raise InvalidRequestError("weight: required, or shadow.", "weight")
        _check_share("weight", weight)
        _check_share("shadow", shadow_weight)
        found = self._wanted(name, version, CANARY if weight is not None else SHADOW)
        if found.digest == self._stable(name).digest:
            raise InvalidRequestError(
                f"version: {found.version} is what {name!r} means already.", "version"
            )
        if shadow_weight is not None:
            self._try(found, SHADOW, SHADOW_WEIGHT, shadow_weight)
        if weight is not None:
            self._try(found, CANARY, CANARY_WEIGHT, weight)
            self._clear(name, ROLLED_BACK)
        return found if weight is not None else None

    def promote(self, name: str, version: int | None) -> None:
        """The name means the canary's version from now on, and is not split any more. `version`:
        the canary that the operator means; None: any."""
        self._stable(name)
        found = self._aliased(name, CANARY)
        if found is None:
            raise NotFoundError(f"adapter {name!r} has no alias {CANARY!r}: nothing to promote")
        if version is not None and version != found.version:
            raise InvalidRequestError(
                f"version: expected {version}, but the canary of {name!r} is {found.version}.",
                "version",
            )
        reason = self.vetoes.get((name, found.digest))
        if reason is None:
            reason = _reason(self.catalog.setting(name, ROLLED_BACK), found.version)
        if reason is not None:
            raise InvalidRequestError(
                f"version: {found.version} was rolled back ({reason}); start it anew first.",
                "version",
            )
        default = self.catalog.default_aliases.of(found)
        self.registry.set_alias(name, default, found.version)
        self._clear(name, CANARY_WEIGHT, ROLLED_BACK)
        self.registry.set_alias(name, CANARY, None)
        if SHADOW in found.aliases:
            self._clear(name, SHADOW_WEIGHT)
            self.registry.set_alias(name, SHADOW, None)

    def abort(self, name: str) -> None:
        """No canary and no shadow any more. Why it was rolled back stays to be read."""
        self._stable(name)
        wished = [alias for alias in (CANARY, SHADOW) if self._aliased(name, alias) is not None]
        weights = [
            key
            for key in (CANARY_WEIGHT, SHADOW_WEIGHT)
            if self.catalog.setting(name, key) is not None
        ]
        if not wished and not weights:
            raise NotFoundError(f"adapter {name!r} has no canary and no shadow: nothing to abort")
        self._clear(name, *weights)
        for alias in wished:
            self.registry.set_alias(name, alias, None)

    def _try(self, version: AdapterVersion, alias: str, key: str, weight: float) -> None:
        """An alias never moves under a weight that was given for another version: a failure in
        the middle, or a look at the registry then, finds the weight 0."""
        name, registry = version.name, self.registry
        if alias not in version.aliases:
            if self.catalog.setting(name, key) is not None:
                registry.set_setting(name, key, "0")
            registry.set_alias(name, alias, version.version)
        registry.set_setting(name, key, f"{weight:g}")

    def _clear(self, name: str, *keys: str) -> None:
        for key in keys:
            if self.catalog.setting(name, key) is not None:
                self.registry.set_setting(name, key, None)

    def _stable(self, name: str) -> AdapterVersion:
        """Says best what is wrong with a name."""
        adapter = self.catalog.resolve(check_name(name)).adapter
        if adapter is None:
            raise InvalidRequestError(f"adapter: {name!r} is a base model.", "adapter")
        return adapter

    def _wanted(self, name: str, version: int | str | None, alias: str) -> AdapterVersion:
        self._stable(name)
        if version is None:
            found = self._aliased(name, alias)
            if found is None:
                raise InvalidRequestError(
                    f"version: required, adapter {name!r} has no alias {alias!r}.", "version"
                )
            return found
        field = "version" if isinstance(version, int) else "alias"
        try:
            found = self.catalog.resolve(f"{name}@{version}").adapter
        except (NotFoundError, InvalidNameError) as error:
            raise InvalidRequestError(f"{field}: {shown(version)}: {error}.", field) from None
        assert found is not None
        return found

    def _aliased(self, name: str, alias: str) -> AdapterVersion | None:
        for adapter in self.catalog.adapters:
            if adapter.name == name and alias in adapter.aliases:
                return adapter
        return None


def _check_share(field: str, share: float | None) -> None:
    if share is not None and parse_weight(str(share)) is None:
        raise InvalidRequestError(f"{field}: must lie in [0, 1], got {share}.", field)


def _reason(rolled_back: str | None, version: int) -> str | None:
    """Why this version was rolled back, if it was; None for text that is not ours."""
    try:
        record = json.loads(rolled_back or "null")
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("version") != version:
        return None
    return str(record.get("reason"))
