"""The registry's facts about models and versions, as frozen values for pickle and msgspec.

Independent of MLflow. A version's content is its manifest; its digest is the manifest's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class FileEntry:
    path: str  # relative, with '/'
    size: int  # bytes
    sha256: str


Manifest = tuple[FileEntry, ...]  # sorted by path

# The files that may change the text side of an adapter's base; training libraries store them.
ADAPTER_TEXT_FILES = frozenset(
    (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", "chat_template.jinja", "chat_template.json"),
        "generation_config.json",
    )
)


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """The results of a base's validation, stored as tags."""

    architecture: str
    num_parameters: int
    max_model_len: int | None = None
    known_as: tuple[str, ...] = ()  # other names of the same weights: of the folder, in its files
    quantization: str = ""  # of the files: its method, then words; empty: plain weights


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The results of an adapter's validation, stored as tags."""

    rank: int  # the highest of any module
    targets: tuple[str, ...]  # e.g. ("k_proj", "q_proj")
    num_parameters: int = 0  # 0: the tensors were not read, and `is_noop` is unknown
    is_noop: bool = False
    converted: str = ""  # the kind that it was made from at registration, its rank and its error
    invocation: tuple[int, ...] = ()  # aLoRA: it is active from these tokens on; (): always


@dataclass(frozen=True, slots=True)
class EffectFacts:
    """The summary of a check of an adapter's effect, stored as tags. None: not measured."""

    verdict: str  # changes | none | non_finite | unprobed | refused
    checked_s: int  # Unix time
    is_noop: bool
    delta_norm: float | None = None  # Frobenius, over all modules
    max_logit_change: float | None = None
    mean_kl: float | None = None  # nats
    argmax_changed: float | None = None  # share of positions
    num_pages: int | None = None
    device_bytes: int | None = None
    load_s: float | None = None
    reason: str = ""  # why it cannot be served; only with the verdict `refused`
    text: str = ""  # the text files that it brings, see `AdapterVersion.text`; empty: not compared
    variant: str = ""  # LoRA or DoRA, with or without biases, in words
    parity: str = ""  # the comparison with PEFT, in words; empty: not made


@dataclass(frozen=True, slots=True)
class EffectRecord:
    """The stored result of a check: its facts as tags, its files next to the adapter's files."""

    facts: EffectFacts
    files: tuple[tuple[str, bytes], ...]  # (name, content)


@dataclass(frozen=True, slots=True)
class BaseVersion:
    name: str
    version: int
    digest: str
    source: str  # URI of the artifacts, as MLflow has it
    aliases: tuple[str, ...] = ()
    architecture: str = ""
    num_parameters: int = 0
    max_model_len: int | None = None
    created_s: int = 0
    model_id: str = ""  # ORGANISATION/NAME, a second name for clients
    known_as: tuple[str, ...] = ()  # other names of the same weights
    quantization: str = ""  # as in BaseFacts
    tags: tuple[tuple[str, str], ...] = field(default=())  # the user's own, sorted


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    name: str
    version: int
    digest: str
    base_name: str
    base_digest: str
    rank: int
    targets: tuple[str, ...]
    source: str
    aliases: tuple[str, ...] = ()
    num_parameters: int = 0
    is_noop: bool = False
    effect: str = ""  # verdict of the last check; "": never checked
    refused: str = ""  # why it cannot be served, from the last check
    created_s: int = 0
    tags: tuple[tuple[str, str], ...] = field(default=())
    # The parts of its text side that it brings, such as "chat template, added tokens"; "unknown":
    # it has such files, which were not compared with its base's; empty: none.
    text: str = ""
    effect_figures: tuple[tuple[str, float], ...] = ()  # of the last check, named as in EffectFacts
    converted: str = ""  # as in AdapterFacts
    invocation: tuple[int, ...] = ()  # as in AdapterFacts
    variant: str = ""  # as in EffectFacts; empty: never checked


@dataclass(frozen=True, slots=True)
class WeightedVersion:
    """One of the adapters of a request. Their deltas add up, each times its weight."""

    version: AdapterVersion
    weight: float = 1.0

    @property
    def digest(self) -> str:
        return self.version.digest


@dataclass(frozen=True, slots=True)
class Rejected:
    """A version that looks like an adapter and cannot be served, with the reason."""

    name: str
    version: int
    reason: str
    is_public: bool = False  # whether clients get the reason: it is about the content of its files


@dataclass(frozen=True, slots=True)
class DanglingAlias:
    """An alias on a version that cannot be served now; other versions of the name can."""

    name: str
    alias: str
    version: int
    reason: str
    is_public: bool = False  # whether clients get the reason, as that of `Rejected`

    def __str__(self) -> str:
        return f"{self._words}: {self.reason}"

    @property
    def public_words(self) -> str:
        return str(self) if self.is_public else f"{self._words}; the server's log has the reason"

    @property
    def _words(self) -> str:
        return f"{self.name}@{self.alias} is version {self.version}, which cannot be served"


@dataclass(frozen=True, slots=True)
class HeldMeaning:
    """The version that a name keeps resolving to while its alias is on an unservable version."""

    name: str
    base_name: str  # resolution among the versions for this base; empty: among all
    version: int


@dataclass(frozen=True, slots=True)
class Setting:
    """An operator's setting of a registered model, kept as a tag of the model."""

    name: str  # of the registered model
    key: str  # one of `listing.SETTINGS`
    value: str  # unchecked, as it was written


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A line of a model list: the version that a name without suffix resolves to."""

    name: str
    parent: str | None  # the base's name; None for a base
    version: int
    digest: str
    created_s: int


def manifest_json(manifest: Manifest) -> str:
    """Returns canonical JSON: equal files have equal text, whatever made the manifest."""
    ordered = sorted(manifest, key=attrgetter("path"))
    rows = [[entry.path, entry.size, entry.sha256] for entry in ordered]
    return json.dumps(rows, ensure_ascii=True, separators=(",", ":"))


def content_digest(manifest: Manifest) -> str:
    return hashlib.sha256(manifest_json(manifest).encode()).hexdigest()
