"""The safetensors files of a base: one file, or shards with an index. Pickles are never read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.errors import UnsupportedModelError
from engine.json_values import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"[A-Za-z0-9._-]+\.safetensors")


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of all weights. Raises UnsupportedModelError if one is missing."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = read_json(folder / INDEX_FILE)
    if index is None:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pth") for p in folder.glob(pattern))
        if pickles:
            raise UnsupportedModelError(
                f"the weights are a pickle ({pickles[0]}), which is never read: save as safetensors"
            )
        raise UnsupportedModelError(f"the folder has neither {SINGLE_FILE} nor {INDEX_FILE}")
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


def tensor_names(folder: Path) -> Iterator[str]:
    """Yields the names of all tensors, from the headers."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                yield from file.keys()
        except (SafetensorError, OSError) as error:
            raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from None


def num_stored_parameters(folder: Path) -> int:
    """Returns the number of parameters of all tensors, also in other parts than the text's, from
    the headers."""
    count = 0
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                count += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from None
    return count
