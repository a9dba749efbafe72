"""The safetensors files of a base: one file, or shards with an index. Pickles are never read."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.errors import UnsupportedModelError
from engine.json_values import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# What transformers' Trainer and accelerate write beside the weights.
_OF_TRAINER = re.compile(r"(?:training_args|optimizer|scheduler|sampler|rng_state|random_states).*")
# Not the weights under the usual names: those of an adapter, those in the names of Mistral, and one
# file of several.
_NOT_WHOLE = re.compile(r"(?:adapter_|consolidated|optimizer).*|.*-of-(?!0*1\.)[0-9]+\..*")
_SHARD_NAME = re.compile(r"[A-Za-z0-9._-]+\.safetensors")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder to write, which takes this place at the end, as a whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of all weights. Raises UnsupportedModelError if one is missing."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = read_json(folder / INDEX_FILE)
    if index is None:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pth") for p in folder.glob(pattern))
        pickles = [name for name in pickles if not _OF_TRAINER.fullmatch(name)]
        if pickles:
            raise UnsupportedModelError(
                f"the weights are a pickle ({pickles[0]}), which is never read: save as safetensors"
            )
        raise UnsupportedModelError(
            f"the folder has neither {SINGLE_FILE} nor {INDEX_FILE}{_remedy(folder)}"
        )
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedModelError(f"{INDEX_FILE} has no weight_map")
    names = {str(name) for name in weight_map.values()}
    for name in names:
        if not _SHARD_NAME.fullmatch(name):
            raise UnsupportedModelError(f"{INDEX_FILE} names {name!r}, not a file of the folder")
        if not (folder / name).is_file():
            raise UnsupportedModelError(f"{INDEX_FILE} names {name}, which is missing")
    return [folder / name for name in sorted(names)]


def has_weights(folder: Path) -> bool:
    """Returns False for a folder whose weights are to be drawn, or cannot be read."""
    try:
        return bool(weight_files(folder))
    except UnsupportedModelError:
        return False


def _remedy(folder: Path) -> str:
    """Returns how the folder becomes one with weights in one file, "" if it does not show."""
    for name in (SINGLE_FILE, INDEX_FILE):
        if (folder / name).is_symlink():
            return f": {name} is a link to {str((folder / name).readlink())!r}, which is no file"
    others = [p.name for p in folder.glob("*.safetensors") if p.is_file()]
    if len(others) == 1 and not _NOT_WHOLE.fullmatch(others[0]):
        return f": {others[0]} has to be renamed to {SINGLE_FILE}"
    return _merge_of_parts(folder)


def _merge_of_parts(folder: Path) -> str:
    """Returns how a checkpoint of a trainer on several devices becomes one, "" for another."""
    if (folder / "zero_to_fp32.py").is_file():
        return ", it is DeepSpeed's: python zero_to_fp32.py . FOLDER --safe_serialization"
    names = sorted({path.parent.name for path in folder.glob("*/*.distcp")})
    parts = next((name for name in names if not _OF_TRAINER.fullmatch(name)), None)
    return "" if parts is None else f", it is FSDP's: accelerate merge-weights {parts} FOLDER"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it
    order: int  # among the tensors of its file


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """Yields all tensors, also of other parts than the text's, from the headers. Raises
    UnsupportedModelError."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for order, key in enumerate(file.keys()):
                    view = file.get_slice(key)
                    yield StoredTensor(path, key, tuple(view.get_shape()), view.get_dtype(), order)
        except (SafetensorError, OSError) as error:
            raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from None
