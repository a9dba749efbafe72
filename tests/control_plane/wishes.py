"""The bases that are to be served, read from the registry's tables, and the promise that no engine
of such a base is deleted without a reason."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from registry.names import is_legal_name
from serve_app.config import ModelArgs
from serve_app.control.base_plan import app_name, parse_setting
from tests.control_plane.store import PREFIX, Truth

SERVE = PREFIX + "serve"
DEFAULT_ALIAS = "champion"
MISSING_S = 60.0  # a base that vanished from the registry stays served at least this long
_APP = re.compile(r"base--(.+)--([0-9a-f]{12})-([0-9a-f]{8})")


@dataclass
class Wishes:
    models: tuple[ModelArgs, ...]  # the file's
    explained: dict[str, str] = field(default_factory=dict)  # by application: why it may go
    refused_since_s: dict[str, float] = field(default_factory=dict)
    restarted_s: float = 0.0  # when a manager died last
    last_good: dict[str, ModelArgs] = field(default_factory=dict)  # by base
    missing_since_s: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def parts(app: str) -> tuple[str, str]:
        """Returns the base's name and the beginning of its digest."""
        found = _APP.fullmatch(app)
        assert found is not None, app
        return found[1], found[2]

    def note(self, truth: Truth, apps: Iterable[str], now_s: float) -> None:
        """Called after each write: a reason that existed for a moment may have been read."""
        for app in apps:
            name, digest = self.parts(app)
            reference = self.reference(name, truth)
            if (model := self.model(name, truth)) is not None:
                self.last_good[name] = model
                self.refused_since_s.pop(app, None)
            elif reference is not None:
                self.refused_since_s.setdefault(app, now_s)
            if reference is None:
                self.explained[app] = "no one wishes for the base"
                continue
            version = wished_version(reference, truth)
            if version is None and digest in {
                truth[other].versions[number].tags[PREFIX + "digest"][:12]
                for other, number in self.wanted(truth).items()
            }:
                self.explained[app] = "the same files are served by another name"
            if version is None:
                self.missing_since_s.setdefault(app, now_s)
                continue
            self.missing_since_s.pop(app, None)
            tags = truth[name].versions[version].tags
            if not tags.get(PREFIX + "digest", "").startswith(digest):
                self.explained[app] = "another version is wished for"
            elif model is not None:
                wanted = app_name(name, tags[PREFIX + "digest"], model, "cpu")
                if wanted != app:
                    self.explained[app] = "other settings are wished for"

    def may_go(self, app: str, now_s: float) -> bool:
        since_s = self.missing_since_s.get(app)
        # A manager that starts while the setting is wrong does not know what was served before.
        if self.refused_since_s.get(app, now_s) < self.restarted_s:
            return True
        return app in self.explained or (since_s is not None and now_s - since_s >= MISSING_S - 3)

    def reference(self, name: str, truth: Truth) -> str | None:
        """The reference of this registered base if it is configured, even by an invalid setting."""
        for model in self.models:
            if model.name.partition("@")[0] == name:
                return model.name
        if name not in truth or SERVE not in truth[name].tags:
            return None
        return name

    def model(self, name: str, truth: Truth) -> ModelArgs | None:
        """Returns None if the base is not configured, or its setting is refused."""
        for model in self.models:
            if model.name.partition("@")[0] == name:
                return model
        if name not in truth or SERVE not in truth[name].tags:
            return None
        try:
            return parse_setting(name, truth[name].tags[SERVE])
        except ValueError:
            return None

    def idle_timeout_s(self, name: str, truth: Truth) -> float | None:
        """The time-out of the last valid setting: an invalid setting leaves the base as it was."""
        model = self.model(name, truth) or self.last_good.get(name)
        return None if model is None else model.idle_timeout_s

    def meant(self, name: str, truth: Truth) -> set[int]:
        """Versions of an adapter that its name may mean: those with their base's default alias,
        or, where there is none, any."""
        model = truth[name]
        aliased = {
            number
            for alias, number in model.aliases.items()
            if number in model.versions
            and alias == self.default_alias(model.versions[number].tags.get(PREFIX + "base", ""))
        }
        return aliased or set(model.versions)

    def default_alias(self, base: str) -> str:
        """The alias that a bare name of the base's adapters means."""
        found = next((one.alias for one in self.models if one.name == base), None)
        return found or DEFAULT_ALIAS

    def wanted(self, truth: Truth) -> dict[str, int]:
        """The bases that must be served now, with their versions."""
        found = {}
        names = {model.name.partition("@")[0] for model in self.models} | set(truth)
        for name in names:
            reference = self.reference(name, truth)
            if reference is None or self.model(name, truth) is None:
                continue
            version = wished_version(reference, truth)
            if version is not None:
                found[name] = version
        return found


def base_versions(name: str, truth: Truth) -> list[int]:
    """The versions that can be served: none for a name that MLflow allows and loraplex does not."""
    if name not in truth or not is_legal_name(name):
        return []
    model = truth[name]
    return [
        number
        for number, version in model.versions.items()
        if (version.tags.get(PREFIX + "kind", model.tags.get(PREFIX + "kind")) == "base")
        and re.fullmatch("[0-9a-f]{64}", version.tags.get(PREFIX + "digest", ""))
    ]


def wished_version(reference: str, truth: Truth) -> int | None:
    name, _, alias = reference.partition("@")
    numbers = base_versions(name, truth)
    if not numbers:
        return None
    aliased = truth[name].aliases.get(alias or DEFAULT_ALIAS)
    if alias:
        return aliased if aliased in numbers else None
    return aliased if aliased in numbers else max(numbers)
