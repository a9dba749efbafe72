"""Adapters that were registered by plain `mlflow` calls: recognises, reads once and measures them.

Three layouts: a bare PEFT folder, the transformers flavour with a PEFT adapter, loraplex's flavour.
The caller writes the result into tags; from then on the version is like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflow.models import Model
from mlflow.store.artifact.artifact_repo import ArtifactRepository

from registry.artifacts import download, list_files
from registry.catalog import Catalog
from registry.entities import AdapterFacts, BaseVersion, FileEntry, Manifest
from registry.errors import RegistrationError
from registry.flavor import ADAPTER_CONFIG, DATA, FLAVOR_NAME
from registry.listing import BASE, FORCED, KIND
from registry.manifest import (
    MAX_ADAPTER_BYTES,
    MAX_CONFIG_BYTES,
    check_sizes,
    hash_file,
    served_names,
)
from registry.names import check_name, model_key

FOLDED_FOR = "loraplex_folded_for"  # in adapter_config.json, as `engine.checks.moved_scales`
_BITSANDBYTES = ("-unsloth-bnb-4bit", "-bnb-4bit")  # behind a base's name, as Unsloth publishes it
_MAX_INVOCATION = 512  # tokens, as `lora.peft_config` allows


@dataclass(frozen=True, slots=True)
class PlainAdapter:
    """The content of an adapter's files. `match_base` finds the registered base."""

    root: str  # folder below the version's artifacts
    manifest: Manifest
    facts: AdapterFacts
    bases: tuple[str, ...]  # names that its base may have, the likeliest first
    trained_on: str  # the base's name in its configuration; empty: none
    folded_for: str = ""  # the digest of the AWQ base that it was folded for


def inspect(repository: ArtifactRepository, scratch: Path) -> PlainAdapter | None:
    """Returns None if the version is no adapter. Raises RegistrationError, InvalidNameError or
    ArtifactError if it is refused."""
    top = list_files(repository, "")
    base: str | None = None
    root = ""
    if ADAPTER_CONFIG not in top:
        if "MLmodel" not in top or top["MLmodel"] > MAX_CONFIG_BYTES:
            return None
        flavors = _flavors(repository, scratch / "MLmodel")
        ours, hugging_face = flavors.get(FLAVOR_NAME), flavors.get("transformers")
        if isinstance(ours, dict) and ours.get("kind") == "adapter":
            root, base = DATA, str(ours.get("base", ""))
        elif isinstance(hugging_face, dict) and "peft_adaptor" in hugging_face:
            root = str(hugging_face["peft_adaptor"])
        else:
            return None
        check_name(root)  # the file chooses the folder to read
        top = list_files(repository, root)
    return _read(repository, root, top, base, scratch)


def check_untagged(tags: Mapping[str, str]) -> None:
    """Raises RegistrationError if the tags of a version, which holds no adapter, are those of
    one."""
    if tags.get(KIND) == "adapter" or (BASE in tags and KIND not in tags):
        key = KIND if KIND in tags else BASE
        raise RegistrationError(
            f"the tag {key} is {tags[key][:200]!r}, but its source holds no {ADAPTER_CONFIG}: "
            "create a version whose source is the folder with this file"
        )


def match_base(
    plain: PlainAdapter, tagged: str | None, bases: Catalog, *, forced: bool = False
) -> BaseVersion:
    """Returns the base of an adapter that plain MLflow calls registered.

    `tagged`: the base's registered name from the version's tags; it takes precedence. `bases`:
    every registered base, of which the default version is used. Raises RegistrationError if no such
    base is registered or, unless `forced`, if the adapter's own configuration names another
    model."""
    names = (tagged,) if tagged else plain.bases
    for name in names:
        base = bases.default_base(name)
        if base is not None:
            remedy = f"set the tag {FORCED} to true if it fits anyway"
            if not is_folded_for(plain.folded_for, base) and not forced:
                check_trained_on(plain.trained_on, base, remedy)
            return base
    raise RegistrationError(
        f"its base is not registered: looked for {', '.join(map(repr, names)) or 'nothing'} "
        "(set the tag loraplex.base to the registered name of its base)"
    )


def is_folded_for(folded_for: str, base: BaseVersion) -> bool:
    """Returns True for an adapter that was folded for this base, whichever base it was trained on.
    Raises RegistrationError if it was folded for another base."""
    if folded_for and folded_for != base.digest:
        raise RegistrationError(
            f"{FOLDED_FOR} is {folded_for[:200]!r}: the adapter was folded for another AWQ base "
            f"than {base.name!r}, whose digest is {base.digest}"
        )
    return bool(folded_for)


def check_trained_on(trained_on: str, base: BaseVersion, remedy: str) -> tuple[str, ...]:
    """Raises RegistrationError if the adapter names a model that it was trained on, and the base
    has no such name. Only the last parts of paths and ids are compared, in lower case. An AWQ base
    computes with other activations than the base that it was made of, whose name its files may
    hold: its adapters must name an AWQ base. A base is the same in bitsandbytes' 4 bits, too, be it
    the adapter's or this one, since what enters its linear layers is the same. Returns sentences
    about that for the user."""
    is_awq = base.quantization.startswith("awq ")
    if is_awq and "awq" not in model_key(trained_on):
        raise RegistrationError(
            f"base_model_name_or_path is {trained_on[:200]!r}, which names no AWQ base: an adapter "
            f"that was trained on the unquantized base needs --unquantized-base FOLDER; {remedy}"
        )
    names = (base.name, base.model_id, *base.known_as)
    keys = {model_key(name) for name in names if name}
    key = model_key(trained_on)
    if trained_on and key not in keys:
        if not is_awq and _without_4_bits(key) in keys:
            return (
                f"base_model_name_or_path is {trained_on[:200]!r}: the adapter was trained on "
                f"{base.name!r} rounded to bitsandbytes' 4 bits, and is served on {base.name!r} as "
                "it is registered",
            )
        plain = {_without_4_bits(one) for one in keys} - {""}
        if base.quantization.startswith("bitsandbytes ") and (_without_4_bits(key) or key) in plain:
            return (
                f"base_model_name_or_path is {trained_on[:200]!r}: the adapter is served on "
                f"{base.name!r}, which is that model rounded to bitsandbytes' 4 bits",
            )
        known = ", ".join(repr(name) for name in dict.fromkeys(names) if name)
        raise RegistrationError(
            f"base_model_name_or_path is {trained_on[:200]!r}, but the base is {known}; {remedy}"
        )
    return ()


def _without_4_bits(name: str) -> str:
    """Returns the name of the base of which a name means bitsandbytes' 4 bits, otherwise ""."""
    ending = next((one for one in _BITSANDBYTES if name.lower().endswith(one)), "")
    return name[: -len(ending)] if ending else ""


def _flavors(repository: ArtifactRepository, target: Path) -> dict[str, object]:
    download(repository, "MLmodel", target, max_bytes=MAX_CONFIG_BYTES)
    try:
        flavors: object = Model.load(str(target)).flavors
    except Exception as error:  # an untrusted file in MLflow's parser may raise anything
        raise RegistrationError(f"MLmodel cannot be read: {str(error)[:300]}") from error
    return flavors if isinstance(flavors, dict) else {}


def _read(
    repository: ArtifactRepository,
    root: str,
    listed: dict[str, int],
    base: str | None,
    scratch: Path,
) -> PlainAdapter:
    sizes = {path.rpartition("/")[2]: size for path, size in listed.items()}
    served = served_names(sizes, ADAPTER_CONFIG, "the version")
    # It is downloaded without a request, so the sizes that the store reports are checked first.
    check_sizes(tuple(FileEntry(name, sizes[name], "") for name in served), MAX_ADAPTER_BYTES, "it")
    if sizes[ADAPTER_CONFIG] > MAX_CONFIG_BYTES:
        raise RegistrationError(f"{ADAPTER_CONFIG} has {sizes[ADAPTER_CONFIG]} bytes")
    entries = []
    for name in served:
        target = scratch / name
        path = f"{root}/{name}" if root else name
        download(repository, path, target, max_bytes=sizes[name])
        entries.append(FileEntry(name, *hash_file(target)))
        if name != ADAPTER_CONFIG:
            target.unlink()
    config = _config(scratch / ADAPTER_CONFIG)
    trained_on, folded_for = (
        value if isinstance(value := config.get(key), str) else ""
        for key in ("base_model_name_or_path", FOLDED_FOR)
    )
    # "organisation/model" of the Hub, or a local path: its last part may be the registered name.
    last = trained_on.rstrip("/").rpartition("/")[2]
    names = (base,) if base else (trained_on, last, _without_4_bits(last))
    bases = tuple(dict.fromkeys(name for name in names if name))
    return PlainAdapter(root, tuple(entries), _facts(config), bases, trained_on, folded_for)


def _config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RegistrationError(f"{ADAPTER_CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise RegistrationError(f"{ADAPTER_CONFIG} is not a JSON object")
    return config


def _facts(config: dict[str, object]) -> AdapterFacts:
    """Returns the facts that the configuration claims; the engine compares them with the tensors
    when it loads them."""
    rank = config.get("r")
    patterns = config.get("rank_pattern")
    ranks = [rank, *(patterns.values() if isinstance(patterns, dict) else ())]
    numbers = [value for value in ranks if isinstance(value, int) and value > 0]
    if not isinstance(rank, int) or not numbers:
        kind = config.get("peft_type")
        raise RegistrationError(
            f"{ADAPTER_CONFIG} has no rank: r is {rank!r}, and peft_type is {kind!r:.100}; only "
            "'LORA' is served"
        )
    targets = config.get("target_modules")
    if isinstance(targets, str):
        targets = [targets]
    names = targets if isinstance(targets, list) else []
    return AdapterFacts(
        max(numbers),
        tuple(sorted(str(name) for name in names)),
        invocation=_invocation(config.get("alora_invocation_tokens")),
    )


def _invocation(value: object) -> tuple[int, ...]:
    """Returns () for a value that is no list of token ids: such an adapter is refused when it is
    loaded."""
    tokens = value if isinstance(value, list) and len(value) <= _MAX_INVOCATION else []
    is_list = all(type(token) is int and 0 <= token < 2**31 for token in tokens)
    return tuple(tokens) if is_list else ()
