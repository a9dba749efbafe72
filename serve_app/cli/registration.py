"""Registers bases and adapters: `engine` checks the files, then the registry stores them. A refused
registration leaves no trace; an adapter without effect is refused.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from engine.checks.effect_report import EffectReport
from engine.checks.moved_scales import FOLDED_FOR, fold_adapter
from engine.checks.parity import check_parity
from engine.checks.validation import (
    ConversionLimits,
    Notice,
    check_adapter,
    check_base,
    convert_adapter,
)
from engine.errors import REFUSALS, EngineMemoryError, ParityError
from registry.cache import Cache
from registry.catalog import DEFAULT_ALIAS
from registry.client import Registry
from registry.entities import AdapterFacts, AdapterVersion, BaseFacts, BaseVersion
from registry.errors import NotFoundError, RegistrationError
from registry.manifest import MAX_CONFIG_BYTES, Progress, no_progress
from registry.names import check_alias, check_model_id, check_name, model_key
from registry.plain_mlflow import check_trained_on, is_folded_for
from serve_app.cli import effect
from serve_app.cli.addresses import Kind, describe_missing
from serve_app.text.base_text import BaseText

_REMEDY = ". Is the adapter untrained? To register it anyway: --allow-noop"

# Of a converted adapter. In bfloat16, in which A and B are served, each number is off by 0.2 %.
LIMITS = ConversionLimits(max_error=1e-3)

_NOTICED_MINUTES = 0.1

_KINDS = {
    "adapter_config.json": "an adapter: loraplex register adapter",
    "config.json": "a whole model: loraplex register base",
}
_MAX_SHOWN = 8  # folders in an error

_REFUSED: tuple[type[Exception], ...] = (
    *(*REFUSALS, RegistrationError),
    *(ParityError, EngineMemoryError),  # the requested measurement is impossible here
)

V = TypeVar("V", BaseVersion, AdapterVersion)


@dataclass(frozen=True, slots=True)
class Registration(Generic[V]):
    version: V
    warnings: tuple[str, ...]  # sentences for the user
    effect: EffectReport | None = None  # for an adapter


def register_base(
    registry: Registry,
    folder: Path,
    name: str,
    *,
    alias: str | None = DEFAULT_ALIAS,
    link: bool = False,
    model_id: str = "",
    progress: Progress = no_progress,
) -> Registration[BaseVersion]:
    """Registers a base. `link`: a local store gets the files as hardlinks; the folder must never
    change again. `model_id`: ORGANISATION/NAME, which clients may use as the model, too. A `name`
    of that form is the id, and its last part the registered name."""
    if "/" in name:
        name, model_id = name.rpartition("/")[2], model_id or name
    if model_id:
        check_model_id(model_id)
    _check_request(folder, "config.json", name, alias)
    with _refused(f"base model {name!r}"):
        BaseText.from_folder(folder)  # tokenizer and template, as a front will open them
        report = check_base(folder)
    facts = BaseFacts(
        report.architecture,
        report.num_parameters,
        report.max_model_len,
        _known_as(folder),
        report.quantization,
    )
    version = registry.register_base(
        folder, name, facts=facts, alias=alias, link=link, model_id=model_id, progress=progress
    )
    return Registration(version, report.warnings)


def register_adapter(
    registry: Registry,
    folder: Path,
    name: str,
    base: str,
    *,
    cache: Cache,
    alias: str | None = DEFAULT_ALIAS,
    probe: effect.ProbeMode = "auto",
    allow_noop: bool = False,
    force: bool = False,
    limits: ConversionLimits = LIMITS,
    parity: float | None = None,
    unquantized_base: Path | None = None,
    progress: Progress = no_progress,
) -> Registration[AdapterVersion]:
    """Registers an adapter. `base`: `name`, `name@alias` or `name@version`; its files come through
    the cache. `probe`: whether the base is run to measure the effect of the adapter. `force`:
    accept an adapter whose configuration names another base. `limits`: of a conversion to LoRA.
    `parity`: the largest difference of a logit to PEFT's; None: it is not compared.
    `unquantized_base`: the folder of the base that the adapter was trained on, from which the AWQ
    base was made; the adapter is folded, and registered for this AWQ base alone."""
    _check_request(folder, "adapter_config.json", name, alias)
    found = _find_base(registry, name, base)
    checked = f"{found.name}@{found.version}"  # even if an alias moves meanwhile
    what = f"adapter {name!r} for base {checked}"
    with _refused(what):
        notices = _check_lineage(
            folder, found, unquantized_base, force, has_parity=parity is not None
        )
    base_folder = registry.fetch(found, cache, progress=progress)
    with tempfile.TemporaryDirectory(prefix="loraplex-") as scratch:
        with _refused(what):
            if parity is not None:  # whether there are packages and memory, before all work
                check_parity(folder, base_folder, len(effect.PROBES))
            servable = _make_servable(
                folder, base_folder, scratch, found, limits, unquantized_base, progress
            )
            report = check_adapter(servable.folder, base_folder)
            if report.is_noop and not allow_noop:  # before a base is loaded
                raise RegistrationError(f"{report.warnings[0]}{_REMEDY}")
            proof = effect.prove(servable.folder, name, base_folder, mode=probe)
            if parity is not None and proof.verdict != "refused":
                proof = effect.with_parity(proof, servable.folder, folder, base_folder, parity)
        _check_effect(name, proof, allow_noop)
        _check_parity(name, proof, is_converted=bool(servable.words))
        version = registry.register_adapter(
            servable.folder,
            name,
            base=checked,
            facts=AdapterFacts(
                *(report.rank, report.targets, report.num_parameters, report.is_noop),
                *("; ".join(servable.words), report.invocation),
            ),
            alias=alias,
            effect=effect.record(proof, name, found),
            progress=progress,
        )
    warnings = (*notices, *servable.notes, *report.warnings, *proof.warnings)
    return Registration(version, warnings, proof)


class _Servable(NamedTuple):
    """An adapter as engines read it, the changes made to it, and sentences for the user."""

    folder: Path
    words: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _make_servable(
    folder: Path,
    base_folder: Path,
    scratch: str,
    base: BaseVersion,
    limits: ConversionLimits,
    unquantized_base: Path | None,
    progress: Progress,
) -> _Servable:
    """Converts an adapter of another kind to LoRA, and folds one of an AWQ base, in `scratch`."""
    made = convert_adapter(
        folder, base_folder, _new_folder(scratch, "lora"), limits, _notice(progress)
    )
    result = _Servable(folder)
    if made is not None:
        words = (made.words,) if made.words else ()
        result = _Servable(Path(scratch) / "lora", words, made.notes)
    if unquantized_base is not None:
        folded = _new_folder(scratch, "folded")
        fold = fold_adapter(result.folder, base_folder, base.digest, unquantized_base, folded)
        result = _Servable(folded, (*result.words, fold.words), result.notes)
    return result


def _find_base(registry: Registry, name: str, base: str) -> BaseVersion:
    try:
        return registry.snapshot().resolve_base(base)
    except NotFoundError as error:
        raise RegistrationError(
            f"adapter {name!r}: {error}; register the base first: loraplex register base"
        ) from error


def _notice(progress: Progress) -> Notice:
    def show(minutes: float, done: int, total: int) -> None:
        if minutes >= _NOTICED_MINUTES:  # its unit is bytes: a module counts as one
            progress(f"Converting to LoRA, about {minutes:.1f} minutes", done, total)

    return show


def _new_folder(scratch: str, name: str) -> Path:
    folder = Path(scratch) / name
    folder.mkdir()
    return folder


def _check_lineage(
    folder: Path,
    base: BaseVersion,
    unquantized_base: Path | None,
    force: bool,
    *,
    has_parity: bool,
) -> tuple[str, ...]:
    """Raises RegistrationError for an adapter of another base. Returns sentences for the user about
    one of the same base in other bits."""
    is_folded = is_folded_for(_field(folder / "adapter_config.json", FOLDED_FOR), base)
    if unquantized_base is None:
        if not is_folded and not force:
            trained_on = _field(folder / "adapter_config.json", "base_model_name_or_path")
            return check_trained_on(trained_on, base, "to register it anyway: --force")
    elif has_parity:
        raise RegistrationError(
            "--parity is not for --unquantized-base: PEFT reads the adapter before it is folded"
        )
    elif is_folded:
        raise RegistrationError("it is folded for this base: leave out --unquantized-base")
    elif not base.quantization.startswith("awq "):
        raise RegistrationError(
            f"--unquantized-base is for AWQ bases, this one is {base.quantization or 'plain'}"
        )
    elif not (unquantized_base / "config.json").is_file():
        raise RegistrationError(
            f"--unquantized-base {unquantized_base} is no folder of a base: it has no config.json"
        )
    return ()


def _check_effect(name: str, found_out: EffectReport, allow_noop: bool) -> None:
    match found_out.verdict:
        case "refused" | "non_finite":
            raise RegistrationError(f"adapter {name!r} is refused: {found_out.reason}")
        case "none" if not allow_noop:
            raise RegistrationError(f"adapter {name!r} is refused: {found_out.reason}{_REMEDY}")


def _check_parity(name: str, found_out: EffectReport, *, is_converted: bool) -> None:
    parity = found_out.parity
    if parity is not None and not parity.is_within:
        remedy = "another --parity-bound, or no --parity"
        if is_converted:
            remedy = f"a smaller --max-error of its conversion to LoRA, {remedy}"
        raise RegistrationError(
            f"adapter {name!r} is refused: {parity.words}; the bound is {parity.bound:g}. To "
            f"register it anyway: {remedy}"
        )


def _check_request(folder: Path, required: str, name: str, alias: str | None) -> None:
    """Refuses wrong names and folders before gigabytes are read."""
    check_name(name)
    if alias is not None:
        check_alias(alias)
    if not folder.is_dir():
        kind: Kind = "base" if required == "config.json" else "adapter"
        words = "is not a folder" if folder.exists() else describe_missing(folder, kind)
        raise RegistrationError(f"{folder} {words}")
    if not (folder / required).is_file():
        raise RegistrationError(f"{folder} holds no {required}{_elsewhere(folder, required)}")


def _elsewhere(folder: Path, required: str) -> str:
    """Returns what to give instead of a folder without the required file: one of its folders that
    has it, as a trainer's checkpoints do, or the same folder to the other command."""
    for name, words in _KINDS.items():
        if name != required and (folder / name).is_file():
            return f", it is {words}"
    found = sorted(path.parent.name for path in folder.glob(f"*/{required}"))
    if not found:
        return ""
    more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    return f"; these folders in it do: {', '.join(map(ascii, found[:_MAX_SHOWN]))}{more}"


def _known_as(folder: Path) -> tuple[str, ...]:
    """Returns further names of the weights: the folder, and the name in its config.json."""
    named = _field(folder / "config.json", "_name_or_path")
    keys = dict.fromkeys(model_key(name) for name in (str(folder.resolve()), named))
    return tuple(key for key in keys if key and "," not in key)


def _field(path: Path, name: str) -> str:
    """Returns a text field of a JSON file, or "" if it has none; later checks find other faults,
    such as a file that is too large to be read here."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            return ""
        value = msgspec.json.decode(path.read_bytes(), type=dict[str, object]).get(name)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except _REFUSED as error:
        raise RegistrationError(f"{what} is refused: {error}") from error
