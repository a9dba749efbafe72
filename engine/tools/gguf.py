"""Converts a GGUF file once into a folder that the engine reads: safetensors, tokenizer and chat
template.

Uses gguf, which has the block formats, and transformers for the tokenizer; no other module of the
engine imports them. Weights are stored in bfloat16: half the bytes of float32, and finer than any
4-bit source. Reads in slices of rows and writes file by file.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from gguf.gguf_reader import ReaderTensor
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from engine.errors import UnsupportedModelError
from engine.model_config import ModelConfig, parse_model_config
from engine.tools.gguf_config import (
    ROPE_TENSORS,
    Architecture,
    Metadata,
    hugging_face_name,
    make_config,
)
from engine.tools.gguf_header import check_header
from engine.weight_files import INDEX_FILE, SINGLE_FILE, new_folder
from engine.weight_shapes import expected_shapes, is_norm

logger = logging.getLogger(__name__)

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_SHARD_BYTES = 2 * 1024**3
_SLICE_ELEMENTS = 4 * 1024 * 1024  # of float32 temporaries
_EOS_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def convert_gguf(
    gguf_path: Path, out_dir: Path, progress: Callable[[str], None] = logger.info
) -> dict[str, int]:
    """Writes `out_dir` as a whole or not at all. Returns the number of tensors of each type in the
    file, the most frequent type first. Raises OSError for a file that cannot be opened,
    UnsupportedModelError for one that is no GGUF or is cut off, and for a model, a tokenizer or a
    type that is not read."""
    if out_dir.exists():
        raise FileExistsError(f"{out_dir} exists")
    progress(f"reading {gguf_path.name}")
    file = _open(gguf_path)
    with new_folder(out_dir) as partial:
        _save_json(partial / "config.json", file.config)
        ids = _eos_ids(file.metadata, file.parsed.vocab_size)
        _save_json(partial / "generation_config.json", {"eos_token_id": ids})
        _save_tokenizer(gguf_path, partial)
        progress("converting to bfloat16 safetensors")
        _save_weights(partial, file.tensors, file.metadata.architecture, file.parsed)
        progress(f"saved {out_dir}")
    return file.types()


def outline_gguf(gguf_path: Path, folder: Path) -> dict[str, int]:
    """Writes the config.json of the converted base, and a sparse file of its weights that has the
    header alone, which is enough for an estimate of the fit. Returns and raises as `convert_gguf`,
    which refuses a tokenizer, too."""
    file = _open(gguf_path)
    _save_json(folder / "config.json", file.config)
    header, end = {}, 0
    for name, tensor in file.tensors.items():
        is_float32 = _is_offset(name, file.metadata.architecture)
        begin, end = end, end + (4 if is_float32 else 2) * int(tensor.n_elements)
        header[name] = {
            "dtype": "F32" if is_float32 else "BF16",
            "shape": _shape(tensor),
            "data_offsets": (begin, end),
        }
    head = json.dumps(header).encode()
    with (folder / SINGLE_FILE).open("wb") as weights:
        weights.write(len(head).to_bytes(8, "little") + head)
        weights.truncate(8 + len(head) + end)
    return file.types()


@dataclass(frozen=True, slots=True)
class _File:
    """A file whose header is read and checked; its weights are not read."""

    metadata: Metadata
    config: Mapping[str, object]  # of the converted base
    parsed: ModelConfig
    tensors: Mapping[str, ReaderTensor]  # by Hugging Face's names

    def types(self) -> dict[str, int]:
        counts = Counter(tensor.tensor_type.name for tensor in self.tensors.values())
        return dict(counts.most_common())


def _open(gguf_path: Path) -> _File:
    check_header(gguf_path)
    reader = GGUFReader(gguf_path)
    metadata = Metadata({name: field.contents() for name, field in reader.fields.items()})
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    rope = {name: tensors.pop(name).data.tolist() for name in ROPE_TENSORS if name in tensors}
    shapes = {name: _shape(tensor) for name, tensor in tensors.items()}
    config = make_config(metadata, shapes, rope)
    parsed = parse_model_config(config, {})
    return _File(metadata, config, parsed, _check(metadata.architecture, tensors, parsed))


def _eos_ids(metadata: Metadata, vocab_size: int) -> list[int]:
    ids = {}
    for key in _EOS_KEYS:
        value = metadata.fields.get(key)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < vocab_size:
            raise UnsupportedModelError(f"{key} is {value!r}, the model has {vocab_size} tokens")
        ids[value] = key
    return list(ids)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _check(
    architecture: Architecture, tensors: Mapping[str, ReaderTensor], config: ModelConfig
) -> dict[str, ReaderTensor]:
    """Returns the tensors by Hugging Face's names, all known, there, and of a type that is read."""
    expected = expected_shapes(config)
    named: dict[str, ReaderTensor] = {}
    for name, tensor in tensors.items():
        found = hugging_face_name(architecture, name)
        if found not in expected:
            raise UnsupportedModelError(f"the file holds {name}, which the model has not")
        if _shape(tensor) != expected[found]:
            raise UnsupportedModelError(
                f"{name} has shape {list(_shape(tensor))}, the metadata make it "
                f"{list(expected[found])}"
            )
        if tensor.tensor_type.name not in TYPES:
            raise UnsupportedModelError(
                f"{name} has type {tensor.tensor_type.name}, known are {', '.join(TYPES)}"
            )
        named[found] = tensor
    for found in expected:
        if found not in named:
            raise UnsupportedModelError(f"tensor {found} is missing in the file")
    return named


def _save_weights(
    folder: Path,
    tensors: Mapping[str, ReaderTensor],
    architecture: Architecture,
    config: ModelConfig,
) -> None:
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        size = 2 * int(tensor.n_elements)
        if shards[-1] and held + size > _SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = [SINGLE_FILE] if len(shards) == 1 else files
    for file, names in zip(files, shards, strict=True):
        made = {name: _convert(name, tensors[name], architecture, config) for name in names}
        save_file(made, folder / file, metadata={"format": "pt"})
        made.clear()
    if len(shards) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _save_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": places})


def _convert(
    name: str, tensor: ReaderTensor, architecture: Architecture, config: ModelConfig
) -> torch.Tensor:
    if _is_offset(name, architecture):
        # In float32, in which adding the offset again gives the stored number.
        return next(_slices(tensor)) - architecture.norm_offset
    made = torch.empty(_shape(tensor), dtype=torch.bfloat16)
    first = 0
    for rows in _slices(tensor):
        made[first : first + len(rows)] = rows
        first += len(rows)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    module = name.rsplit(".", 2)[-2]
    if architecture.permutes and module in heads:
        # llama.cpp turns neighbours, Hugging Face the halves of a head.
        pairs = made.view(heads[module], -1, 2, *made.shape[1:])
        made = pairs.transpose(1, 2).reshape(made.shape)
    return made.contiguous()


def _is_offset(name: str, architecture: Architecture) -> bool:
    return bool(architecture.norm_offset) and is_norm(name)


def _slices(tensor: ReaderTensor) -> Iterator[torch.Tensor]:
    """Yields the rows in float32, some at a time; a vector as a whole."""
    columns = _shape(tensor)[-1]
    is_vector = len(_shape(tensor)) == 1
    step = len(tensor.data) if is_vector else max(_SLICE_ELEMENTS // columns, 1)
    kind = GGMLQuantizationType(tensor.tensor_type)
    for first in range(0, len(tensor.data), step):
        yield torch.from_numpy(dequantize(tensor.data[first : first + step], kind).copy())


def _save_tokenizer(gguf_path: Path, folder: Path) -> None:
    transformers_logging.disable_progress_bar()
    # The bar over a GGUF's tensors ignores the line above; errors are exceptions.
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    except Exception as error:  # the library lets out whatever a wrong list of tokens causes
        raise UnsupportedModelError(
            f"transformers cannot read the tokenizer: {type(error).__name__}: {error}"
        ) from error
    tokenizer.save_pretrained(folder)


def _save_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
