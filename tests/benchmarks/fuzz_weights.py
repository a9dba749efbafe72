"""Mutations of the weights file: its bytes, its header, its tensors."""

from __future__ import annotations

import json
import random
import struct

import torch
from safetensors.torch import load_file, save_file

from tests.benchmarks.fuzz_files import (
    ACCEPTED,
    EITHER,
    UNCHANGED,
    WEIGHTS,
    AdapterFiles,
    Expectation,
    Mutation,
    flip_bits,
    refused,
)

_NUMBERS: tuple[object, ...] = (-1, -(2**40), 2**47, 2**63, 2**64 + 8, 1.5, 4.0, "0", None, True)
_SHAPE_WORDS = r"shape|rank|features|bytes, its offsets"


def truncated(files: AdapterFiles, rng: random.Random) -> Expectation:
    raw = files.weights
    header_end = len(raw) - len(files.data)
    places = (
        rng.randrange(8),
        8,
        rng.randrange(8, header_end),
        header_end,
        header_end + files.span(files.any_key(rng))[0],
        rng.randrange(header_end, len(raw)),
        len(raw) - 1,
    )
    files.write_weights(raw[: rng.choice(places)])
    return refused("truncated|too few|not valid JSON|no LoRA tensors")


def bytes_appended(files: AdapterFiles, rng: random.Random) -> Expectation:
    files.write_weights(files.weights + rng.randbytes(rng.choice((1, 7, 4096))))
    return refused("belong to no tensor")


def bits_of_length_flipped(files: AdapterFiles, rng: random.Random) -> Expectation:
    files.write_weights(flip_bits(files.weights, rng, 1, 0, 8))
    return refused("header|truncated")


def bits_of_header_flipped(files: AdapterFiles, rng: random.Random) -> Expectation:
    raw = files.weights
    end = len(raw) - len(files.data)
    files.write_weights(flip_bits(raw, rng, rng.choice((1, 1, 2, 8)), 8, end))
    return EITHER


def bits_of_body_flipped(files: AdapterFiles, rng: random.Random) -> Expectation:
    raw = files.weights
    begin = len(raw) - len(files.data)
    files.write_weights(flip_bits(raw, rng, rng.choice((1, 2, 8, 64)), begin, len(raw)))
    return EITHER


def bytes_replaced(files: AdapterFiles, rng: random.Random) -> Expectation:
    raw = bytearray(files.weights)
    start = rng.randrange(len(raw))
    run = rng.choice((b"\0", b"\xff", b"[", b'"', rng.randbytes(1))) * rng.choice((1, 16, 512))
    raw[start : start + len(run)] = run
    files.write_weights(bytes(raw))
    return EITHER


def wrong_offsets(files: AdapterFiles, rng: random.Random) -> Expectation:
    key = files.any_key(rng)
    begin, end = files.span(key)
    number = rng.choice(_NUMBERS)
    files.header[key]["data_offsets"] = rng.choice(
        (
            [number, end],
            [begin, number],
            [end, begin],
            [begin + 4, end + 4],
            [begin - 4, end - 4],
            [begin, end + 4],
            [0, 2**48],
            [begin + 2**45, end + 2**45],
            [begin],
            [begin, end, end],
            {"0": begin},
            None,
            number,
        )
    )
    files.write_header()
    return refused("offsets|truncated|twice")


def overlapping(files: AdapterFiles, rng: random.Random) -> Expectation:
    """Two tensors of one size that share their bytes; the data may shrink with them."""
    key = files.any_key(rng, "lora_A")
    other = rng.choice([k for k in files.header if k != key])
    files.header[other]["data_offsets"] = files.header[key]["data_offsets"]
    files.header[other]["shape"] = files.header[key]["shape"]
    files.write_header()
    return refused("overlap|hole|belong to no tensor|needs .* bytes")


def wrong_shape(files: AdapterFiles, rng: random.Random) -> Expectation:
    key = files.any_key(rng)
    rows, columns = files.shape(key)
    number = rng.choice(_NUMBERS)
    files.header[key]["shape"] = rng.choice(
        (
            [columns, rows],
            [rows * columns],
            [1, rows, columns],
            [1] * 7 + [rows, columns],
            [rows * 2, columns],
            [rows, columns // 2],
            [0, columns],
            [rows, number],
            [number, columns],
            [number],
            number,
            [2**24, 2**24],
            [2**47] * 8,
            "4x4",
        )
    )
    files.write_header()
    return refused(_SHAPE_WORDS)


def wrong_type_name(files: AdapterFiles, rng: random.Random) -> Expectation:
    names = (
        "F64",
        "I8",
        "U8",
        "BOOL",
        "I64",
        "F8_E4M3",
        "f32",
        "F32 ",
        "",
        "C64",
        7,
        None,
        ["F32"],
    )
    files.header[files.any_key(rng)]["dtype"] = rng.choice((*names, {"F32": 1}, "F" * 10**5))
    files.write_header()
    return refused("type")


def tensors_of_another_type(files: AdapterFiles, rng: random.Random) -> Expectation:
    """Real ones: half types are served, the rest is refused."""
    kind = rng.choice((torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool))
    path = files.folder / WEIGHTS
    save_file({key: tensor.to(kind) for key, tensor in load_file(path).items()}, path)
    return ACCEPTED if kind in (torch.float16, torch.bfloat16) else refused("type")


def tensors_of_another_shape(files: AdapterFiles, rng: random.Random) -> Expectation:
    path = files.folder / WEIGHTS
    tensors = load_file(path)
    key = rng.choice(list(tensors))
    tensor = tensors[key]
    tensors[key] = rng.choice(
        (
            tensor.T.contiguous(),
            tensor[:-1].contiguous(),
            tensor[:, :-1].contiguous(),
            torch.cat((tensor, tensor)),
            torch.cat((tensor, tensor), 1),
            tensor.flatten(),
            tensor[None],
            tensor[:0],
            torch.tensor(1.0),
        )
    )
    save_file(tensors, path)
    return refused(_SHAPE_WORDS)


def not_finite(files: AdapterFiles, rng: random.Random) -> Expectation:
    key = files.any_key(rng)
    begin, end = files.span(key)
    place = begin + 4 * rng.randrange((end - begin) // 4)
    # NaN, both infinities, a signalling NaN, one with a payload
    bits = rng.choice((0x7FC00000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF))
    data = files.data[:place] + struct.pack("<I", bits) + files.data[place + 4 :]
    files.write_header(data=data)
    return refused("holds NaN or infinity")


def extreme_values(files: AdapterFiles, rng: random.Random) -> Expectation:
    path = files.folder / WEIGHTS
    tensors = load_file(path)
    key = rng.choice([key for key in tensors if "lora_B" in key or "embedding_B" in key])
    value = rng.choice((3.3e38, -3.3e38, 1e-45, -0.0, 0.0, 1e30))
    tensors[key][0, 0] = value
    save_file(tensors, path)
    return refused("overflows") if abs(value) > 1e38 else ACCEPTED


def untrained(files: AdapterFiles, rng: random.Random) -> Expectation:
    """All of lora_A or of lora_B zero: a good adapter that changes nothing."""
    path = files.folder / WEIGHTS
    half = rng.choice(("_A", "_B"))
    zeroed = {k: v.zero_() if half in k else v for k, v in load_file(path).items()}
    save_file(zeroed, path)
    return ACCEPTED


def duplicate_keys(files: AdapterFiles, rng: random.Random) -> Expectation:
    """The header's text names a tensor twice; parsers differ in which one they take."""
    key = files.any_key(rng)
    other = json.dumps(files.header[rng.choice(list(files.header))])
    text = json.dumps(files.header)
    files.write_header(f"{text[:-1]}, {json.dumps(key)}: {other}}}".encode())
    return refused("twice")


def pair_in_both_spellings(files: AdapterFiles, rng: random.Random) -> Expectation:
    path = files.folder / WEIGHTS
    tensors = load_file(path)
    key = rng.choice([key for key in tensors if key.endswith(".weight")])
    tensors[key.replace(".weight", ".default.weight")] = tensors[key].clone()
    save_file(tensors, path)
    return refused("twice")


def nested_header(files: AdapterFiles, rng: random.Random) -> Expectation:
    depth = rng.choice((10, 300, 900, 960, 990, 1000, 5000, 10**5))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    value = opening * depth + ("1" if opening == '{"a":' else "") + closing * depth
    if rng.random() < 0.3:
        files.write_header((opening * depth).encode())
        return refused("not valid JSON")
    field = rng.choice(("dtype", "shape", "data_offsets"))
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | {field: "HERE"}
    text = json.dumps({"x": entry}).replace('"HERE"', value)
    files.write_header(text.encode())
    return refused("not valid JSON|type|shape|offsets")


def crowded_header(files: AdapterFiles, rng: random.Random) -> Expectation:
    """Millions of small values: memory and time of whoever parses them."""
    filler = rng.choice((b"[],", b"{},", b"1,", b'"",', b"null,"))
    size = rng.choice((900_000, 5_000_000, 9_900_000))
    files.write_header(b'{"x": [' + filler * (size // len(filler)) + b"1]}")
    return refused("type|header")


def many_tensors(files: AdapterFiles, rng: random.Random) -> Expectation:
    count = rng.choice((3000, 70_000))
    for i in range(count):
        files.header[f"x{i}"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    files.write_header()
    return refused("not PEFT's|modules_to_save|limit is")


def header_of_another_form(files: AdapterFiles, rng: random.Random) -> Expectation:
    good = json.dumps(files.header)
    texts = (
        b"[]",
        b"null",
        b"1",
        b"",
        b"{}",
        b"{",
        b'{"x": 1}',
        b'{"x": {}}',
        good.encode("utf-16"),
        good.encode("utf-8-sig"),
        good.encode("utf-32"),
        good.replace("F32", "F\x00").encode(),
        good.encode()[:-1] + b', "\xff\xfe": {}}',
        good.encode() + b"{}",
        good.encode()[:-1] + b', "__metadata__": 3}',
        good.encode()[:-1] + b', "__metadata__": {"format": [1]}}',
    )
    files.write_header(rng.choice(texts))
    return refused("header|type|no LoRA tensors|belong to no tensor")


def harmless_header(files: AdapterFiles, rng: random.Random) -> Expectation:
    good = json.dumps(files.header)
    keys = list(files.header)
    rng.shuffle(keys)
    texts = (
        good + " " * rng.choice((1, 8, 1000)),
        good[:-1] + ', "__metadata__": {"format": "pt", "by": "\\u00e9 \\ud83d\\ude00"}}',
        json.dumps({key: files.header[key] for key in keys}),
        json.dumps(files.header, indent=2),
        good.replace("base_model", "b\\u0061se_model"),
    )
    files.write_header(rng.choice(texts).encode())
    return ACCEPTED


def extra_tensor(files: AdapterFiles, rng: random.Random) -> Expectation:
    site = "base_model.model.model.layers.0.self_attn.q_proj"
    names = (
        "x",
        "../../etc/passwd",
        "/etc/passwd",
        f"{site}.lora_C.weight",
        f"{site}.lora_magnitude_vector",
        f"{site}.lora_B.bias",
        f"{site}.base_layer.weight",
        "base_model.model.lm_head.weight",
        "base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj\u200b.lora_A.weight",
        "base_model.model.model.layers.\uff10.self_attn.q_proj.lora_A.weight",
        "base_model.model.\u202eevil.lora_A.weight",
        "base_model.model.a\nINFO all is well\x1b[2J.lora_A.weight",
        "base_model.model.\ud800.lora_A.weight",
        "base_model.model." + "a." * 20000 + "lora_A.weight",
        "base_model.model.model.norm.lora_A.weight",
        "base_model.model.model.rotary_emb.lora_A.weight",
        "\0",
        "",
    )
    size = len(files.data)
    files.header[rng.choice(names)] = {
        "dtype": "F32",
        "shape": [4, 4],
        "data_offsets": [size, size + 64],
    }
    files.write_header(data=files.data + bytes(64))
    return refused("tensor|lora_|copy of the base")


def missing_tensor(files: AdapterFiles, rng: random.Random) -> Expectation:
    path = files.folder / WEIGHTS
    tensors = load_file(path)
    for key in rng.sample(list(tensors), rng.randint(1, len(tensors))):
        del tensors[key]
    save_file(tensors, path)
    return refused("missing|no LoRA tensors|no tensors for it")


def renamed_tensor(files: AdapterFiles, rng: random.Random) -> Expectation:
    path = files.folder / WEIGHTS
    tensors = load_file(path)
    key = rng.choice([key for key in tensors if "layers" in key])
    changes = (
        ("layers.", "layers.9"),
        ("lora_", "LORA_"),
        ("base_model.model.", ""),
        ("base_model.model.", "base_model.model.base_model.model."),
        (".lora_A" if "lora_A" in key else ".lora_B", ".lora_E"),
        ("_proj", "_proj.base_layer"),
        ("self_attn", "self_attn/../mlp"),
    )
    tensors[key.replace(*rng.choice(changes))] = tensors.pop(key)
    save_file(tensors, path)
    return refused("tensor|lora_|has no module|missing")


def default_spelling(files: AdapterFiles, rng: random.Random) -> Expectation:
    """PEFT's older files have the adapter's name in the key; its newer ones cannot read them."""
    path = files.folder / WEIGHTS
    tensors = load_file(path)
    longer = {
        k if ".base_layer." in k else k.replace(".weight", ".default.weight"): v
        for k, v in tensors.items()
    }
    save_file(longer, path)
    return UNCHANGED


WEIGHT_MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "truncated": (truncated, truncated),
    "appended": (bytes_appended,),
    "bits of the header": (bits_of_header_flipped, bits_of_length_flipped, bytes_replaced),
    "bits of the body": (bits_of_body_flipped,),
    "offsets": (wrong_offsets, wrong_offsets, overlapping),
    "shapes": (wrong_shape, tensors_of_another_shape),
    "types": (wrong_type_name, tensors_of_another_type),
    "values": (not_finite, not_finite, extreme_values, untrained),
    "duplicate keys": (duplicate_keys, pair_in_both_spellings),
    "nesting": (nested_header, nested_header),
    "crowded header": (crowded_header, many_tensors),
    "form of the header": (header_of_another_form, harmless_header),
    "names of tensors": (extra_tensor, extra_tensor, renamed_tensor, missing_tensor),
    "old spelling": (default_spelling,),
}
