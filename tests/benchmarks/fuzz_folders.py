"""Mutations of the folder: links, pipes, pickles, archives, files without end, other bases."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import shutil
import socket
import tarfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.benchmarks.fuzz_files import (
    ACCEPTED,
    CONFIG,
    EITHER,
    UNCHANGED,
    WEIGHTS,
    AdapterFiles,
    Expectation,
    Json,
    Mutation,
    refused,
)

TERABYTE = 10**12
CANARY = "pickle-was-run"  # a file beside the folders: the evil pickle makes it
_WHAT = "adapter_config|adapter_model|folder"


class _Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self._path),)


def _pickled(files: AdapterFiles) -> bytes:
    return pickle.dumps({"x": _Evil(files.folder.parent / CANARY)})


def linked_outside(files: AdapterFiles, rng: random.Random) -> Expectation:
    """A link to anything beyond the folder, a good file of the same name among it."""
    name = rng.choice((CONFIG, WEIGHTS))
    twin = files.folder.with_name(f"{files.folder.name}-twin")
    shutil.copytree(files.folder, twin)
    good = twin / name
    targets = (
        good,
        Path("..") / twin.name / name,
        Path("/etc/passwd"),
        Path("/dev/zero"),
        Path("/dev/random"),
        Path("/dev/stdin"),
        Path("/proc/self/environ"),
        Path("/proc/self/mem"),
        Path("/proc/kmsg"),
        Path("/"),
        twin,
    )
    target = rng.choice(targets)
    files.replace(name, lambda path: path.symlink_to(target))
    return refused(_WHAT)


def linked_nowhere(files: AdapterFiles, rng: random.Random) -> Expectation:
    name = rng.choice((CONFIG, WEIGHTS))
    target = rng.choice(("no-such-file", name, "/proc/self/fd/0/x", "x" * 255, "../" * 500))
    files.replace(name, lambda path: path.symlink_to(target))
    return refused(_WHAT)


def linked_inside(files: AdapterFiles, rng: random.Random) -> Expectation:
    name = rng.choice((CONFIG, WEIGHTS))
    (files.folder / name).rename(files.folder / "real")
    (files.folder / name).symlink_to(rng.choice(("real", "./real", files.folder / "real")))
    return ACCEPTED


def not_a_file(files: AdapterFiles, rng: random.Random) -> Expectation:
    name = rng.choice((CONFIG, WEIGHTS))

    def listen(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(str(path))

    def link_to_pipe(path: Path) -> None:
        os.mkfifo(files.folder / "pipe")
        path.symlink_to("pipe")

    makers = (os.mkfifo, os.mkfifo, Path.mkdir, listen, link_to_pipe)
    files.replace(name, rng.choice(makers))
    return refused(_WHAT)


def missing_file(files: AdapterFiles, rng: random.Random) -> Expectation:
    name = rng.choice((CONFIG, WEIGHTS))
    if rng.random() < 0.5:
        (files.folder / name).unlink()
    else:
        (files.folder / name).write_bytes(b"")
    return refused(_WHAT)


def odd_neighbours(files: AdapterFiles, rng: random.Random) -> Expectation:
    """Things beside the two files that nobody asked for."""
    for name in rng.sample(("Ünïcødé", "a\nb", "\u202egpj.exe", "-rf", "~", "x" * 255, " "), 3):
        (files.folder / name).write_bytes(rng.randbytes(10))
    (files.folder / "adapter_model.py").write_text("raise SystemExit")
    (files.folder / "sub").mkdir()
    (files.folder / "sub" / WEIGHTS).symlink_to("/dev/zero")
    os.mkfifo(files.folder / "pipe")
    return ACCEPTED


def pickle_in_place(files: AdapterFiles, rng: random.Random) -> Expectation:
    tensors = load_file(files.folder / WEIGHTS)
    buffer = io.BytesIO()
    torch.save(tensors, buffer, _use_new_zipfile_serialization=rng.random() < 0.5)
    name = rng.choice((CONFIG, WEIGHTS, WEIGHTS))
    (files.folder / name).write_bytes(rng.choice((buffer.getvalue(), _pickled(files))))
    return refused("header|JSON")


def pickle_beside(files: AdapterFiles, rng: random.Random) -> Expectation:
    name = rng.choice(("adapter_model.bin", "adapter_model.pt", "x.pth", "training_args.bin"))
    (files.folder / name).write_bytes(_pickled(files))
    if rng.random() < 0.5:
        return ACCEPTED
    (files.folder / WEIGHTS).unlink()
    return refused("pickle")


def pickle_of_an_odd_name(files: AdapterFiles, rng: random.Random) -> Expectation:
    name = rng.choice(("\n\x1b[2J.bin", "\udcff.pt", "é" * 100 + ".pth", "a\u202eb.bin"))
    (files.folder / name).write_bytes(_pickled(files))
    (files.folder / WEIGHTS).unlink()
    return refused("pickle")


def archive(files: AdapterFiles, rng: random.Random) -> Expectation:
    """Ten megabytes of zeros in some kilobytes; a good adapter in an archive."""
    buffer = io.BytesIO()
    kind = rng.choice(("zip", "gzip", "tar"))
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
            zipped.writestr("../../" + WEIGHTS, bytes(10**7))
    elif kind == "gzip":
        buffer.write(gzip.compress(rng.choice((bytes(10**7), files.weights)), 1))
    else:
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.add(files.folder / WEIGHTS, "../../etc/passwd")
    (files.folder / rng.choice((CONFIG, WEIGHTS))).write_bytes(buffer.getvalue())
    return refused("header|JSON|adapter_config.json is larger")


def sparse(files: AdapterFiles, rng: random.Random) -> Expectation:
    """A terabyte that takes no room: behind good files, or alone."""
    name = rng.choice((CONFIG, WEIGHTS, WEIGHTS))
    if rng.random() < 0.3:
        (files.folder / name).write_bytes(b"")
    os.truncate(files.folder / name, TERABYTE)
    return refused("belong to no tensor|larger than|header|no LoRA tensors")


def sparse_tensor(files: AdapterFiles, rng: random.Random) -> Expectation:
    """A header that agrees with the file: one tensor has nearly a terabyte."""
    begin = len(files.data)
    columns = (TERABYTE - begin) // 4 // 48
    names = (
        files.any_key(rng),
        "x",
        "base_model.model.model.embed_tokens.base_layer.weight",
        "base_model.model.lm_head.base_layer.weight",
        "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight",
    )
    key = rng.choice(names)
    shape = [48, columns] if rng.random() < 0.5 else [columns, 48]
    if key in files.header:  # its old bytes stay, for nobody
        start, end = files.span(key)
        hole: Json = {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]}
        files.header["base_model.model.hole.lora_A.weight"] = hole
    size = 4 * 48 * columns
    files.header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + size]}
    files.write_header()
    header = len(files.weights) - begin
    os.truncate(files.folder / WEIGHTS, header + begin + size)
    return refused("tensor|features|rank|shape|copy of the base")


def adapter_of_another_base(files: AdapterFiles, rng: random.Random) -> Expectation:
    path = files.folder / WEIGHTS
    tensors = load_file(path)
    factor = rng.choice((2, 3))
    kind = rng.choice(("wider", "deeper", "other family"))
    if kind == "wider":
        tensors = {k: v.repeat(1, factor) if "_A" in k else v for k, v in tensors.items()}
    elif kind == "deeper":
        deep = {k.replace("layers.", "layers.1"): v.clone() for k, v in tensors.items()}
        tensors |= deep
    else:
        tensors = {
            k.replace("model.model.", "model.transformer.").replace("self_attn", "attn"): v
            for k, v in tensors.items()
        }
    save_file(tensors, path)
    return refused("tensor|features|rank|no module|has no") if kind != "deeper" else EITHER


def two_things_at_once(files: AdapterFiles, rng: random.Random) -> Expectation:
    """A good configuration and good weights that do not belong together."""
    raw = json.loads((files.folder / CONFIG).read_text())
    targets = raw["target_modules"]
    raw["target_modules"] = rng.choice((targets[:-1], [*targets, "o_proj_x"], [*targets, "norm"]))
    rank = raw["r"]
    raw["r"] = rng.choice((rank, rank + 1, rank * 2, max(1, rank // 2)))
    is_same = raw["r"] == rank and len(raw["target_modules"]) > len(targets)
    (files.folder / CONFIG).write_text(json.dumps(raw))
    # PEFT refuses to adapt a norm: no tensor of one can be in the file, none is missing.
    return UNCHANGED if is_same else refused("rank|target_modules")


FOLDER_MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "links": (linked_outside, linked_outside, linked_nowhere, linked_inside),
    "no files": (not_a_file, missing_file),
    "neighbours": (odd_neighbours,),
    "pickles": (pickle_in_place, pickle_beside, pickle_of_an_odd_name),
    "archives": (archive,),
    "without end": (sparse, sparse_tensor),
    "another base": (adapter_of_another_base, two_things_at_once),
}
