"""An operator's changes of a canary, written to the registry. Blocking; each change can be repeated
after a failure in its middle. Refusals name the field and its value.
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
from serve_app.canary.status import start_command
from serve_app.errors import shown
from serve_app.messages import CanaryChange
from serve_app.platform_view import RegistryReader

CANARY_WEIGHT = "canary_weight"
SHADOW_WEIGHT = "shadow_weight"
ROLLED_BACK = "canary_rolled_back"


@dataclass(frozen=True, slots=True)
class CanaryCommand:
    change: CanaryChange
    registry: RegistryReader
    catalog: Catalog  # read a moment ago
    # (name, digest) -> reason of a rollback that the registry may not have yet
    vetoes: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def run(self) -> AdapterVersion | None:
        """Returns the canary that is on trial from now on, None if the change starts no canary."""
        match self.change.kind:
            case "start":
                return self._start()
            case "promote":
                self._promote()
            case "abort":
                self._abort()
        return None

    def _start(self) -> AdapterVersion | None:
        """Writes aliases and weights; the canary's weight last, as it starts the traffic."""
        name, weight, shadow_weight = self.change.name, self.change.weight, self.change.shadow
        if weight is None and shadow_weight is None:
            raise InvalidRequestError("weight: required, or shadow.", "weight")
        _check_share("weight", weight)
        _check_share("shadow", shadow_weight)
        found = self._chosen(CANARY if weight is not None else SHADOW)
        stable = self._stable()
        if found.digest == stable.digest:
            words = f"version: {name!r} resolves to {stable.version} already"
            if found.version != stable.version:
                words += f", and {found.version} has the same files"
            raise InvalidRequestError(f"{words}.", "version")
        _check_served(found)
        if shadow_weight is not None:
            self._set_arm(found, SHADOW, SHADOW_WEIGHT, shadow_weight)
        if weight is not None:
            self._set_arm(found, CANARY, CANARY_WEIGHT, weight)
            self._clear(ROLLED_BACK)
        return found if weight is not None else None

    def _promote(self) -> None:
        """Makes the name resolve to the canary's version, and ends the split. `change.version`: the
        canary that the operator expects; None: any."""
        name, expected = self.change.name, self.change.version
        self._stable()
        found = self._with_alias(CANARY)
        if found is None:
            raise NotFoundError(
                f"adapter {name!r} has no alias {CANARY!r}: nothing to promote; {_begin(name)}"
            )
        if expected is not None and expected != found.version:
            raise InvalidRequestError(
                f"version: expected {expected}, but the canary of {name!r} is {found.version}.",
                "version",
            )
        rolled_back = self.catalog.setting(name, ROLLED_BACK)
        reason = self.vetoes.get((name, found.digest))
        reason = reason or _rollback_reason(rolled_back, found.version)
        if reason is not None:
            raise InvalidRequestError(
                f"version: {found.version} was rolled back ({reason}); start it again first.",
                "version",
            )
        _check_served(found)
        default = self.catalog.default_aliases.of(found)
        self.registry.set_alias(name, default, found.version)
        self._clear(CANARY_WEIGHT, ROLLED_BACK)
        self.registry.set_alias(name, CANARY, None)
        if SHADOW in found.aliases:
            self._clear(SHADOW_WEIGHT)
            self.registry.set_alias(name, SHADOW, None)

    def _abort(self) -> None:
        """Ends canary and shadow. The reason of a rollback remains readable."""
        name = self.change.name
        self._stable()
        aliases = [alias for alias in (CANARY, SHADOW) if self._with_alias(alias) is not None]
        weights = [
            key
            for key in (CANARY_WEIGHT, SHADOW_WEIGHT)
            if self.catalog.setting(name, key) is not None
        ]
        if not aliases and not weights:
            raise NotFoundError(
                f"adapter {name!r} has no alias {CANARY!r} and no alias {SHADOW!r}: nothing to "
                f"abort; {_begin(name)}"
            )
        self._clear(*weights)
        for alias in aliases:
            self.registry.set_alias(name, alias, None)

    def _set_arm(self, version: AdapterVersion, alias: str, key: str, weight: float) -> None:
        """Moves the alias only while the weight is 0, so that no version ever has the weight of
        another version, even after a failure in the middle."""
        name, registry = version.name, self.registry
        if alias not in version.aliases:
            if self.catalog.setting(name, key) is not None:
                registry.set_setting(name, key, "0")
            registry.set_alias(name, alias, version.version)
        registry.set_setting(name, key, f"{weight:g}")

    def _clear(self, *keys: str) -> None:
        name = self.change.name
        for key in keys:
            if self.catalog.setting(name, key) is not None:
                self.registry.set_setting(name, key, None)

    def _stable(self) -> AdapterVersion:
        """Returns the version that the name resolves to. Its errors explain a bad name."""
        name = self.change.name
        adapter = self.catalog.resolve(check_name(name)).adapter
        if adapter is None:
            raise InvalidRequestError(f"adapter: {name!r} is a base model.", "adapter")
        return adapter

    def _chosen(self, alias: str) -> AdapterVersion:
        """Returns the version to start: of the change, or else the version that has `alias`."""
        name, version = self.change.name, self.change.version
        self._stable()
        if version is None:
            found = self._with_alias(alias)
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

    def _with_alias(self, alias: str) -> AdapterVersion | None:
        for adapter in self.catalog.adapters:
            if adapter.name == self.change.name and alias in adapter.aliases:
                return adapter
        return None


def _begin(name: str) -> str:
    return f"`{start_command(name)}` begins a trial"


def _check_share(field: str, share: float | None) -> None:
    if share is not None and parse_weight(str(share)) is None:
        raise InvalidRequestError(f"{field}: must lie in [0, 1], got {share}.", field)


def _check_served(version: AdapterVersion) -> None:
    """Raises InvalidRequestError for a version that a check has refused since it was registered:
    the name would stay at the version before until a restart, and be refused after that."""
    if version.refused:
        raise InvalidRequestError(
            f"version: {version.version} cannot be served: {version.refused}.", "version"
        )


def _rollback_reason(rolled_back: str | None, version: int) -> str | None:
    """Returns the reason why this version was rolled back; None if it was not, or if the setting
    cannot be parsed."""
    try:
        record = json.loads(rolled_back or "null")
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("version") != version:
        return None
    return str(record.get("reason"))
