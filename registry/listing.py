"""Converts MLflow's registered models and versions into the parts of a `Catalog`, and facts into
tags.

The tags are the record: a catalog has all facts about a version from its tags, so that a single
search reads them. A version without a digest tag is not complete: it may be a plain adapter.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from mlflow.entities.model_registry import ModelVersion, RegisteredModel

from registry.entities import (
    ADAPTER_TEXT_FILES,
    AdapterFacts,
    AdapterVersion,
    BaseFacts,
    BaseVersion,
    DanglingAlias,
    EffectFacts,
    Manifest,
    Rejected,
    Setting,
)
from registry.errors import InvalidNameError
from registry.names import check_model_id, check_name, is_legal_name

logger = logging.getLogger(__name__)

PREFIX = "loraplex."
KIND = PREFIX + "kind"  # base | adapter; on the registered model and on the version
DIGEST = PREFIX + "digest"
BASE = PREFIX + "base"  # adapter: the registered name of its base
BASE_DIGEST = PREFIX + "base_digest"
RANK = PREFIX + "rank"
INVOCATION = PREFIX + "alora_invocation_tokens"
TARGETS = PREFIX + "targets"
PARAMETERS = PREFIX + "num_parameters"
NOOP = PREFIX + "noop"
CONVERTED = PREFIX + "converted"  # adapter: the kind that it was made from, rank and error
ARCHITECTURE = PREFIX + "architecture"
MAX_LEN = PREFIX + "max_model_len"
MODEL_ID = PREFIX + "model_id"  # base: ORGANISATION/NAME, a second name for clients
KNOWN_AS = PREFIX + "known_as"  # base: other names of the same weights, separated by commas
QUANTIZATION = PREFIX + "quantization"  # base: of its files, in words
REFUSED = PREFIX + "refused"  # adapter: why it cannot be served
TEXT = PREFIX + "text"  # adapter: the parts of its text side that it brings, or NO_TEXT
VARIANT = PREFIX + "variant"  # adapter: LoRA or DoRA, with or without biases
PARITY = PREFIX + "parity"  # adapter: the last comparison with PEFT
FORCED = PREFIX + "force"  # adapter: "true" accepts it if its configuration names another base
LINKED = PREFIX + "linked"  # the files are hardlinks to the files of the source folder
ROOT = PREFIX + "root"  # folder below the artifacts that holds the files
MANIFEST = PREFIX + "manifest"  # of a plain version, which has no loraplex.json

RUNTIME = PREFIX + "runtime"  # of a registered model, see SETTINGS

# Results of the last check; absent if the check ended before them.
EFFECT = PREFIX + "effect"  # the verdict
EFFECT_TAGS = {
    "delta_norm": PREFIX + "delta_norm",
    "max_logit_change": PREFIX + "max_logit_change",
    "mean_kl": PREFIX + "mean_kl",
    "argmax_changed": PREFIX + "argmax_changed",
    "num_pages": PREFIX + "pages",
    "device_bytes": PREFIX + "device_bytes",
    "load_s": PREFIX + "load_s",
    "checked_s": PREFIX + "checked_s",
}

# Settings of a registered model, not of a version; the tags have PREFIX before these names.
SETTINGS = (
    "canary_weight",  # adapter: share of requests, 0 to 1, for the version with alias canary
    "shadow_weight",  # adapter: share of requests that the version with alias shadow gets a copy of
    "canary_rolled_back",  # adapter: JSON of version, reason and time of the last rollback
    "pin",  # adapter: "true": the version of its default alias stays in the engines' memory
    "runtime",  # adapter: "loaded" or "unloaded" by a script; the latter is hidden
    "serve",  # base: JSON of a ModelArgs without its name: served without being in the YAML file
)

NO_TEXT = "none"
UNKNOWN_TEXT = "unknown"

_MAX_SHOWN_NAME = 100
_MAX_REASON = 1000  # characters of a tag
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)  # any MLflow client may write a tag
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Row:
    """A version as MLflow lists it; the version's tags take precedence over its model's tags."""

    name: str
    version: int
    source: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...]
    created_s: int

    @property
    def is_complete(self) -> bool:
        needed = (BASE, BASE_DIGEST) if self.tags.get(KIND) == "adapter" else ()
        has_digest = _SHA256.fullmatch(self.tags.get(DIGEST, "")) is not None
        return KIND in self.tags and has_digest and all(key in self.tags for key in needed)

    @property
    def rejected(self) -> Rejected | None:
        """The reason why a version is not listed: MLflow allows names that no request can have."""
        try:
            check_name(self.name)
        except InvalidNameError as error:
            shown = ascii(self.name[:_MAX_SHOWN_NAME])[1:-1]
            return Rejected(shown, self.version, f"{error}; rename the registered model")
        return None


def rows(models: Iterable[RegisteredModel], versions: Iterable[ModelVersion]) -> list[Row]:
    """`models` must be read before `versions`, so that `versions` has the version of every
    alias."""
    of_model = {model.name: model for model in models}
    found = []
    for version in versions:
        model = of_model.get(version.name)
        if model is None:  # registered between the two searches: it is in the next listing
            continue
        try:
            found.append(_row(model, version))
        except (TypeError, ValueError) as error:  # an unexpected response for this version alone
            logger.warning("a version of %a is left out: %s", version.name, error)
    return sorted(found, key=lambda row: (row.name, row.version))


def _row(model: RegisteredModel, version: ModelVersion) -> Row:
    number = int(version.version)
    aliases = sorted(_clean(alias) for alias, to in model.aliases.items() if int(to) == number)
    # A digest or facts among the model's tags belong to no particular version.
    inherited = {key: model.tags[key] for key in (KIND, BASE) if key in model.tags}
    tags = {_clean(key): _clean(value) for key, value in (inherited | version.tags).items()}
    source, created_s = version.source or "", _created_s(version)
    return Row(version.name, number, source, tags, tuple(aliases), created_s)


def is_row_of(row: Row, version: ModelVersion) -> bool:
    """Returns False if the model was deleted and created again: then another version has the
    number."""
    return (row.source, row.created_s) == (version.source or "", _created_s(version))


def _created_s(version: ModelVersion) -> int:
    return (version.creation_timestamp or 0) // 1000


def settings(models: Iterable[RegisteredModel]) -> tuple[Setting, ...]:
    return tuple(
        Setting(model.name, key, _clean(model.tags[PREFIX + key]))
        for model in sorted(models, key=lambda model: str(model.name))
        if is_legal_name(model.name)
        for key in SETTINGS
        if PREFIX + key in model.tags
    )


def dangling(
    models: Iterable[RegisteredModel],
    served: Iterable[BaseVersion | AdapterVersion],
    rejected: Iterable[Rejected],
) -> tuple[DanglingAlias, ...]:
    """Returns the aliases on versions that are not served, of names with other versions that
    are."""
    numbers = {(one.name, one.version) for one in served}
    reasons = {(one.name, one.version): (one.reason, one.is_public) for one in rejected}
    names = {name for name, _ in numbers}
    found = []
    for model in models:
        for alias, to in model.aliases.items() if model.name in names else ():
            key = model.name, int(to) if _NUMBER.fullmatch(str(to)) else 0
            if key not in numbers:
                reason = reasons.get(key, ("it is no adapter, or was not read yet", True))
                found.append(DanglingAlias(model.name, _clean(alias), key[1], *reason))
    return tuple(sorted(found, key=lambda one: (one.name, one.alias)))


def _clean(text: str) -> str:
    """Replaces each lone surrogate, which JSON may contain and no encoder accepts, by "?"."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def base_version(row: Row) -> BaseVersion:
    return BaseVersion(
        name=row.name,
        version=row.version,
        digest=row.tags[DIGEST],
        source=row.source,
        aliases=row.aliases,
        architecture=row.tags.get(ARCHITECTURE, ""),
        num_parameters=_number(row, PARAMETERS),
        max_model_len=_number(row, MAX_LEN) or None,
        created_s=row.created_s,
        model_id=_model_id(row.tags.get(MODEL_ID, "")),
        known_as=tuple(filter(None, row.tags.get(KNOWN_AS, "").split(","))),
        quantization=row.tags.get(QUANTIZATION, "")[:_MAX_REASON],
        tags=_own_tags(row),
    )


def adapter_version(row: Row) -> AdapterVersion:
    return AdapterVersion(
        name=row.name,
        version=row.version,
        digest=row.tags[DIGEST],
        base_name=row.tags[BASE],
        base_digest=row.tags[BASE_DIGEST],
        rank=_number(row, RANK),
        targets=tuple(filter(None, row.tags.get(TARGETS, "").split(","))),
        source=row.source,
        aliases=row.aliases,
        num_parameters=_number(row, PARAMETERS),
        is_noop=row.tags.get(NOOP) == "true",
        effect=row.tags.get(EFFECT, ""),
        refused=_refusal(row),
        created_s=row.created_s,
        tags=_own_tags(row),
        text=_text(row),
        effect_figures=_figures(row),
        converted=row.tags.get(CONVERTED, "")[:_MAX_REASON],
        invocation=_invocation(row),
        variant=row.tags.get(VARIANT, "")[:_MAX_REASON],
    )


def base_tags(facts: BaseFacts) -> dict[str, str]:
    max_len = "" if facts.max_model_len is None else str(facts.max_model_len)
    known_as = ",".join(facts.known_as)
    known = {MAX_LEN: max_len, KNOWN_AS: known_as, QUANTIZATION: facts.quantization}
    tags = {ARCHITECTURE: facts.architecture, PARAMETERS: str(facts.num_parameters)}
    return tags | _without_empty(known)


def adapter_tags(facts: AdapterFacts, base: BaseVersion) -> dict[str, str]:
    tags = {
        BASE: base.name,
        BASE_DIGEST: base.digest,
        RANK: str(facts.rank),
        TARGETS: ",".join(facts.targets),
    }
    if facts.num_parameters:  # the tensors were read
        tags[PARAMETERS] = str(facts.num_parameters)
        tags[NOOP] = "true" if facts.is_noop else "false"
    invocation = ",".join(map(str, facts.invocation))
    return tags | _without_empty({INVOCATION: invocation, CONVERTED: facts.converted})


def text_tags(manifest: Manifest) -> dict[str, str]:
    """Returns no tag for an adapter whose text files must be compared with its base's."""
    has_files = any(entry.path in ADAPTER_TEXT_FILES for entry in manifest)
    return {} if has_files else {TEXT: NO_TEXT}


def _text(row: Row) -> str:
    text = row.tags.get(TEXT, UNKNOWN_TEXT)
    return "" if text == NO_TEXT else text[:_MAX_REASON]


def _invocation(row: Row) -> tuple[int, ...]:
    """Returns () if the tag is not a list of token ids: only the choice of a replica needs it."""
    parts = row.tags.get(INVOCATION, "").split(",")
    return tuple(map(int, parts)) if all(map(_NUMBER.fullmatch, parts)) else ()


def _refusal(row: Row) -> str:
    if row.tags.get(EFFECT) != "refused":
        return ""
    return row.tags.get(REFUSED) or "the check of its files refused it"


def effect_tags(facts: EffectFacts) -> dict[str, str]:
    """Returns the tags of a check, the verdict last: with it, all other tags are written."""
    values = {key: getattr(facts, name) for name, key in EFFECT_TAGS.items()}
    measured = {key: f"{value:.6g}" for key, value in values.items() if isinstance(value, float)}
    counted = {key: str(value) for key, value in values.items() if isinstance(value, int)}
    reason = facts.reason[:_MAX_REASON]
    words = {REFUSED: reason, TEXT: facts.text, VARIANT: facts.variant, PARITY: facts.parity}
    noop = "true" if facts.is_noop else "false"
    return {**measured, **counted, **_without_empty(words), NOOP: noop, EFFECT: facts.verdict}


def _without_empty(tags: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in tags.items() if value}


def _figures(row: Row) -> tuple[tuple[str, float], ...]:
    """Returns the measured figures of the last check, without tags that are no finite numbers: any
    MLflow client may write them."""
    found = []
    for name, key in EFFECT_TAGS.items():
        with suppress(ValueError):
            value = float(row.tags.get(key, ""))
            if math.isfinite(value):
                found.append((name, value))
    return tuple(found)


def _number(row: Row, key: str) -> int:
    text = row.tags.get(key, "")
    return int(text) if _NUMBER.fullmatch(text) else 0


def _model_id(tag: str) -> str:
    """Returns an empty string for an illegal id: any MLflow client may write the tag."""
    try:
        return check_model_id(tag) if tag else ""
    except InvalidNameError:
        return ""


def _own_tags(row: Row) -> tuple[tuple[str, str], ...]:
    own = {k: v for k, v in row.tags.items() if not k.startswith((PREFIX, "mlflow."))}
    return tuple(sorted(own.items()))
