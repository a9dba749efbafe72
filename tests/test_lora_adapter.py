"""Adapters that `read_adapter` accepts equal PEFT's own delta; the rest is refused with its
reason."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lora.adapter import WEIGHTS_FILE, Adapter, read_adapter
from lora.errors import AdapterError
from lora.header import read_header
from lora.sites import Site, Slice
from lora.untrusted import open_regular

HIDDEN, KV, INNER, VOCAB, LAYERS = 16, 8, 24, 32, 2
Tensors = dict[str, torch.Tensor]


def make_sites() -> tuple[Site, ...]:
    sites = []
    for i in range(LAYERS):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        qkv = (
            Slice(f"{attention}.q_proj", HIDDEN),
            Slice(f"{attention}.k_proj", KV),
            Slice(f"{attention}.v_proj", KV),
        )
        gate_up = (Slice(f"{mlp}.gate_proj", INNER), Slice(f"{mlp}.up_proj", INNER))
        sites += [
            Site(f"{i}.qkv", HIDDEN, qkv),
            Site(f"{i}.o", HIDDEN, (Slice(f"{attention}.o_proj", HIDDEN),)),
            Site(f"{i}.gate_up", HIDDEN, gate_up),
            Site(f"{i}.down", INNER, (Slice(f"{mlp}.down_proj", HIDDEN),)),
        ]
    head = Site("lm_head", HIDDEN, (Slice("lm_head", VOCAB),))
    embedding = Site("embed_tokens", VOCAB, (Slice("model.embed_tokens", HIDDEN),), "embedding")
    return (*sites, head, embedding)


def make_base() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def read(path: Path, max_rank: int = 64, base: torch.nn.Module | None = None) -> Adapter:
    parameters = {} if base is None else dict(base.named_parameters())
    return read_adapter(path, "digest", make_sites(), max_rank, parameters.get)


def write(path: Path, tensors: Tensors, **config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    fields: dict[str, object] = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "layers_to_transform": [0],
    }
    (path / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


TOKENS_OF = "base_model.model.model.embed_tokens.token_adapter"


def good_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{Q0}.lora_A.weight": torch.randn(4, HIDDEN, generator=generator),
        f"{Q0}.lora_B.weight": torch.randn(HIDDEN, 4, generator=generator),
    }


PARITY: dict[str, dict[str, object]] = {
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "all linear": {"target_modules": "all-linear", "lora_alpha": 3},
    "a regular expression": {"target_modules": r".*\.1\.(self_attn|mlp)\.(q|down)_proj"},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 1},
    "excluded": {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.0\.mlp.*"},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {"k_proj": 7, r"layers\.1\.mlp\.down_proj": 2, "q": 9},
        "alpha_pattern": {"q_proj": 5, "^model.layers.0.mlp.down_proj": 11},
    },
    "rank-stabilised": {"target_modules": ["o_proj"], "use_rslora": True, "lora_alpha": 6},
    "rank-stabilised with patterns": {
        "target_modules": ["o_proj", "gate_proj"],
        "use_rslora": True,
        "rank_pattern": {"gate_proj": 5},
        "alpha_pattern": {"o_proj": 9},
    },
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(PARITY))
def test_delta_of_every_module_is_pefts(name: str, tmp_path: Path) -> None:
    base = make_base()
    settings = {"r": 4, "lora_alpha": 8, "init_lora_weights": False} | PARITY[name]
    model = peft.get_peft_model(base, peft.LoraConfig(**settings))  # type: ignore[arg-type]
    model.save_pretrained(str(tmp_path))
    adapter = read(tmp_path, base=make_base())
    expected = {
        module_name: module.get_delta_weight("default")  # type: ignore[attr-defined]
        for module_name, module in base.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert set(adapter.modules) == set(expected)
    for module, weights in adapter.modules.items():
        delta = weights.b.T @ weights.a  # [out, in]
        if module == "model.embed_tokens":
            delta = delta.T  # PEFT's is [vocabulary, hidden], like the weight
        torch.testing.assert_close(delta, expected[module].detach())
    assert not adapter.is_noop
    assert adapter.rank == max(weights.rank for weights in adapter.modules.values())


def test_a_good_folder_and_its_other_spellings(tmp_path: Path) -> None:
    plain = read(write(tmp_path / "plain", good_tensors()))
    named = {k.replace(".weight", ".default.weight"): v for k, v in good_tensors().items()}
    other = read(write(tmp_path / "named", named))
    module = "model.layers.0.self_attn.q_proj"
    assert torch.equal(plain.modules[module].b, other.modules[module].b)
    assert plain.num_parameters == 2 * 4 * HIDDEN
    assert plain.digest == "digest"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_read_and_scaled_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {k: v.to(dtype) for k, v in good_tensors().items()}
    adapter = read(write(tmp_path, tensors, lora_alpha=0.3))
    weights = adapter.modules["model.layers.0.self_attn.q_proj"]
    assert weights.a.dtype == weights.b.dtype == torch.float32
    assert torch.equal(weights.b, tensors[f"{Q0}.lora_B.weight"].float().T * (0.3 / 4))


def test_an_untrained_adapter_is_flagged(tmp_path: Path) -> None:
    tensors = good_tensors()
    tensors[f"{Q0}.lora_B.weight"].zero_()
    assert read(write(tmp_path, tensors)).is_noop


def replace(key: str, value: torch.Tensor) -> Tensors:
    return good_tensors() | {f"{Q0}.{key}": value}


def with_value(value: float) -> Tensors:
    tensors = good_tensors()
    tensors[f"{Q0}.lora_B.weight"][3, 1] = value
    return tensors


MODULE = "model.layers.0.self_attn.q_proj"
BAD_TENSORS: dict[str, tuple[Tensors, str]] = {
    "float64": (replace("lora_A.weight", torch.zeros(4, HIDDEN).double()), "type 'F64'"),
    "int8": (replace("lora_A.weight", torch.zeros(4, HIDDEN).to(torch.int8)), "type 'I8'"),
    "NaN": (with_value(float("nan")), f"lora_B of {MODULE} holds NaN or infinity"),
    "infinity": (with_value(float("inf")), f"lora_B of {MODULE} holds NaN or infinity"),
    "overflow": (with_value(3e38), "overflows float32"),
    "no B": (
        {k: v for k, v in good_tensors().items() if "lora_A" in k},
        f"lora_B of {MODULE} is missing",
    ),
    "nothing": ({}, "holds no LoRA tensors"),
    "ranks disagree": (
        replace("lora_B.weight", torch.ones(HIDDEN, 3)),
        f"lora_A of {MODULE} has rank 4, its lora_B has rank 3",
    ),
    "another base": (
        replace("lora_A.weight", torch.ones(4, 12)),
        f"lora_A of {MODULE} has in_features 12, the base has 16",
    ),
    "another output": (
        replace("lora_B.weight", torch.ones(20, 4)),
        f"lora_B of {MODULE} has out_features 20, the base has 16",
    ),
    "one dimension": (replace("lora_A.weight", torch.ones(4)), "has shape [4], not 2-d"),
    "rank zero": (
        {
            f"{Q0}.lora_A.weight": torch.ones(0, HIDDEN),
            f"{Q0}.lora_B.weight": torch.ones(HIDDEN, 0),
        },
        "has rank 0, allowed are 1 to 64",
    ),
    "module of no site": (
        good_tensors() | {f"{Q0.replace('.0.', '.7.')}.lora_A.weight": torch.ones(4, HIDDEN)},
        "the base has no module model.layers.7.self_attn.q_proj",
    ),
    "model without a head": (
        {key.replace("model.model.", "model."): one for key, one in good_tensors().items()},
        f"no module {MODULE.removeprefix('model.')} that can be adapted, and the adapter was "
        "trained on a model without a head (AutoModel), which generates no text: train it on",
    ),
    "not targeted": (
        good_tensors()
        | {
            f"{Q0.replace('q_', 'o_')}.lora_A.weight": torch.ones(4, HIDDEN),
            f"{Q0.replace('q_', 'o_')}.lora_B.weight": torch.ones(HIDDEN, 4),
        },
        "which target_modules does not name",
    ),
    "DoRA": (
        replace("lora_magnitude_vector", torch.ones(HIDDEN)),
        "is a magnitude of DoRA, but adapter_config.json does not set use_dora",
    ),
    "bias of lora_B": (replace("lora_B.bias", torch.ones(HIDDEN)), "does not set lora_bias"),
    "bias": (replace("base_layer.bias", torch.ones(HIDDEN)), "does not set bias"),
    "bias of no site": (
        good_tensors() | {"base_model.model.model.norm.bias": torch.ones(HIDDEN)},
        "the base has no module model.norm that can be adapted",
    ),
    "tokens that are not named": (
        good_tensors() | {f"{TOKENS_OF}.trainable_tokens_delta": torch.ones(2, HIDDEN)},
        "names other modules than the file has trained tokens of",
    ),
    "tokens of no embedding": (
        good_tensors() | {f"{Q0}.token_adapter.trainable_tokens_delta": torch.ones(2, HIDDEN)},
        f"{MODULE} is no embedding or head of the base",
    ),
    "magnitude of the head": (
        good_tensors() | {"base_model.model.lm_head.lora_magnitude_vector": torch.ones(VOCAB)},
        "is a magnitude of DoRA, which is not supported at lm_head",
    ),
    "whole weight": (
        good_tensors() | {"base_model.model.lm_head.weight": torch.ones(VOCAB, HIDDEN)},
        "modules_to_save in adapter_config.json does not name it: name it there",
    ),
    "twice": (
        replace("lora_A.default.weight", torch.ones(4, HIDDEN)),
        f"lora_A of {MODULE} is in the file twice",
    ),
    "foreign name": (
        good_tensors() | {"q_proj.lora_down.weight": torch.ones(4, HIDDEN)},
        "has a name that is not PEFT's",
    ),
    "a copy of the base": (
        good_tensors() | {"base_model.model.lm_head.base_layer.weight": torch.ones(VOCAB, HIDDEN)},
        "differs from the base",
    ),
    "a longer vocabulary": (
        good_tensors() | {"base_model.model.lm_head.base_layer.weight": torch.ones(40, HIDDEN)},
        "has shape [40, 16], the base has [32, 16]",
    ),
}


@pytest.mark.parametrize("name", list(BAD_TENSORS))
def test_bad_tensors_are_refused(name: str, tmp_path: Path) -> None:
    tensors, reason = BAD_TENSORS[name]
    with pytest.raises(AdapterError) as refusal:
        read(write(tmp_path, tensors), base=make_base())
    assert reason in str(refusal.value)


BAD_TOKENS: dict[str, tuple[torch.Tensor, object, str]] = {
    "another number": (torch.ones(3, HIDDEN), [1, 2], "have shape [3, 16], expected are [2, 16]"),
    "twice": (torch.ones(2, HIDDEN), [1, 1], "are not different tokens below 32"),
    "beyond the vocabulary": (torch.ones(2, HIDDEN), [1, 32], "are not different tokens below 32"),
    "not a number": (torch.full((2, HIDDEN), torch.nan), [1, 2], "hold NaN or infinity"),
    "too many": (torch.ones(9, HIDDEN), list(range(9)), "9 tokens of model.embed_tokens"),
    "another module": (torch.ones(2, HIDDEN), {"lm_head": [1, 2]}, "names other modules"),
}


@pytest.mark.parametrize("name", list(BAD_TOKENS))
def test_bad_trained_tokens_are_refused(name: str, tmp_path: Path) -> None:
    rows, indices, reason = BAD_TOKENS[name]
    tensors = good_tensors() | {f"{TOKENS_OF}.trainable_tokens_delta": rows}
    folder = write(tmp_path, tensors, trainable_token_indices=indices)
    with pytest.raises(AdapterError) as refusal:
        read(folder, max_rank=8, base=make_base())
    assert reason in str(refusal.value)


def test_a_copy_of_the_base_that_nobody_can_compare_is_refused(tmp_path: Path) -> None:
    tensors = good_tensors()
    tensors["base_model.model.lm_head.base_layer.weight"] = torch.ones(VOCAB, HIDDEN)
    with pytest.raises(AdapterError, match="save_embedding_layers=False"):
        read(write(tmp_path, tensors))


BAD_CONFIGS: list[tuple[dict[str, object], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"peft_type": "ADALORA"}, "or merge the adapter (merge_and_unload) and register a base"),
    ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS': the adapter belongs to a model with a"),
    ({"peft_type": "PREFIX_TUNING"}, "cannot become LoRA: train LoRA"),
    ({"use_dora": True}, f"a magnitude of DoRA is missing for {MODULE}"),
    ({"use_dora": "false"}, "use_dora must be true or false"),
    ({"use_dora": True, "lora_bias": True}, "PEFT refuses together"),
    ({"use_dora": True, "alora_invocation_tokens": [5]}, "PEFT refuses together"),
    ({"bias": "some"}, "bias must be none, all or lora_only, not 'some'"),
    ({"bias": None}, "bias must be none, all or lora_only, not None"),
    ({"lora_bias": True}, f"a bias of lora_B is missing for {MODULE}"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "names other modules than the file has trained tokens of"),
    ({"trainable_token_indices": [-1]}, "must be a list of token ids, not a list of 1"),
    ({"trainable_token_indices": {"embed_tokens": 1}}, "must be a list of token ids, not 1"),
    ({"target_parameters": ["x"]}, "target_parameters"),
    ({"alora_invocation_tokens": [-1]}, "not a token id"),
    ({"init_lora_weights": "pissa_niter_4"}, "fits a changed base"),
    ({"r": 8}, f"{MODULE} has rank 4, adapter_config.json has 8"),
    ({"r": 0}, "r must be an integer of at least 1, not 0"),
    ({"r": "4"}, "r must be an integer"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a finite number"),
    ({"lora_alpha": None}, "lora_alpha must be a finite number"),
    ({"rank_pattern": {"q_proj": 5}}, "adapter_config.json has 5"),
    ({"rank_pattern": {"q_proj": -1}}, "rank_pattern['q_proj'] must be an integer"),
    ({"rank_pattern": [1]}, "rank_pattern is not a JSON object"),
    ({"alpha_pattern": {"(": 1}}, "is not a regular expression"),
    ({"alpha_pattern": {r"(?i)(a+)b": 1}}, "flags and comments inside a pattern"),
    ({"alpha_pattern": {"a" * 5000 + "*": 1}}, "are too many"),
    ({"alpha_pattern": {"q_proj": 10**400}}, "must be a finite number, not 1000"),
    ({"lora_alpha": 10**400}, "lora_alpha must be a finite number, not 1000"),
    (
        {"target_modules": "(.*.*)*x", "layers_to_transform": None},
        "which target_modules does not name",
    ),
    ({"rank_pattern": {f"m{i}": 1 for i in range(5000)}}, "rank_pattern has 5000 keys"),
    ({"layers_pattern": "(.*)*x"}, "is not the name of a list of layers"),
    ({"layers_pattern": "layers", "layers_to_transform": None}, "without layers_to_transform"),
    ({"target_modules": "q_proj"}, "cannot be used when target_modules is a pattern"),
    ({"peft_type": ["x"] * 100_000}, "peft_type is a list of 100000"),
    ({"target_modules": None}, "names no target_modules"),
    ({"target_modules": 3}, "neither a list of names"),
    ({"target_modules": ["q_proj", "o_proj"]}, "the file has no tensors for it"),
    ({"layers_to_transform": "x"}, "layers_to_transform"),
    ({"use_rslora": "yes"}, "use_rslora must be true or false"),
]


@pytest.mark.parametrize(("change", "reason"), BAD_CONFIGS, ids=lambda value: ascii(value)[:60])
def test_bad_configurations_are_refused(
    change: dict[str, object], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError) as refusal:
        read(write(tmp_path, good_tensors(), **change))
    assert reason in str(refusal.value)


def test_rank_above_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="has rank 4, allowed are 1 to 3"):
        read(write(tmp_path, good_tensors()), max_rank=3)


def header_file(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def entry(offsets: list[int], shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def tensor_file(entries: dict[str, object], num_bytes: int) -> bytes:
    return header_file(json.dumps(entries).encode(), bytes(num_bytes))


BAD_FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "has 0 bytes, too few"),
    "seven bytes": (lambda good: good[:7], "has 7 bytes, too few"),
    "git-lfs pointer": (
        lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
        "git-lfs pointer",
    ),
    "header of 2^63 bytes": (
        lambda good: (2**63).to_bytes(8, "little") + good[8:],
        "claims 9223372036854775808 bytes",
    ),
    "header beyond the file": (
        lambda good: (9999).to_bytes(8, "little") + good[8:],
        "its header needs 9999 bytes",
    ),
    "header not JSON": (lambda _: header_file(b"{nonsense"), "not valid JSON"),
    "header nested": (lambda _: header_file(b"[" * 100000), "not valid JSON"),
    "header names a tensor twice": (
        lambda _: header_file(b'{"x": {}, "x": {}}'),
        "its header names x twice",
    ),
    "header in UTF-16": (lambda _: header_file("{}".encode("utf-16")), "not valid JSON"),
    "notes that are none": (
        lambda _: tensor_file({"__metadata__": 3}, 0),
        "the __metadata__ of its header",
    ),
    "header of 9 MB": (
        lambda _: header_file(b'{"x": [' + b"[]," * 3_000_000 + b"1]}"),
        "its header claims 9000010 bytes",
    ),
    "type of a hundred levels": (
        lambda _: header_file(b'{"x": {"dtype": ' + b"[" * 100 + b"]" * 100 + b"}}"),
        f"{WEIGHTS_FILE}: tensor x has type a list of 1",
    ),
    "header a list": (lambda _: header_file(b"[]"), "not a JSON object"),
    "entry a number": (
        lambda _: tensor_file({"x": 1}, 0),
        f"{WEIGHTS_FILE}: tensor x has type None",
    ),
    "one byte short": (lambda good: good[:-1], "is truncated"),
    "one byte long": (lambda good: good + b"\0", "1 bytes that belong to no tensor"),
    "overlap": (
        lambda _: tensor_file({"x": entry([0, 8], [2]), "y": entry([4, 12], [2])}, 12),
        "overlap another tensor's",
    ),
    "hole": (
        lambda _: tensor_file({"x": entry([0, 8], [2]), "y": entry([12, 20], [2])}, 20),
        "leave a hole",
    ),
    "offsets backwards": (
        lambda _: tensor_file({"x": entry([8, 0], [2])}, 8),
        "needs 8 bytes, its offsets give -8",
    ),
    "offsets against shape": (
        lambda _: tensor_file({"x": entry([0, 8], [3])}, 8),
        "needs 12 bytes, its offsets give 8",
    ),
    "negative size": (lambda _: tensor_file({"x": entry([0, 8], [-2])}, 8), "no valid shape"),
    "vast size": (lambda _: tensor_file({"x": entry([0, 8], [2**60])}, 8), "no valid shape"),
    "true as a size": (
        lambda _: header_file(
            b'{"x": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', bytes(4)
        ),
        "no valid shape",
    ),
    "unknown type": (lambda _: tensor_file({"x": entry([0, 8], [2], "F31")}, 8), "type 'F31'"),
}


@pytest.mark.parametrize("name", list(BAD_FILES))
def test_corrupt_files_are_refused(name: str, tmp_path: Path) -> None:
    spoil, reason = BAD_FILES[name]
    file = write(tmp_path, good_tensors()) / "adapter_model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(AdapterError) as refusal:
        read(tmp_path)
    assert reason in str(refusal.value)
    assert str(tmp_path) not in str(refusal.value)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    folder = write(tmp_path, good_tensors())
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"the folder has no adapter_model\.safetensors"):
        read(folder)
    torch.save(good_tensors(), folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"are a pickle \(adapter_model.bin\)"):
        read(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "not valid JSON"), (b"[1]", "not a JSON object"), (b" " * 2**21, "larger than")],
)
def test_a_configuration_that_is_none_is_refused(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, good_tensors())
    (folder / "adapter_config.json").write_bytes(content)
    with pytest.raises(AdapterError, match=reason):
        read(folder)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_no_file_of_the_folder_is_refused_and_never_waited_for(
    name: str, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", good_tensors())
    makers: dict[str, Callable[[Path], object]] = {
        "is a link that leaves the folder": lambda path: path.symlink_to(other / name),
        "link that leaves": lambda path: path.symlink_to("/dev/zero"),
        "is a link to nothing": lambda path: path.symlink_to("no-such-file"),
        "is not a regular file": os.mkfifo,
        "not a regular": Path.mkdir,
    }
    for number, (reason, make) in enumerate(makers.items()):
        folder = write(tmp_path / str(number), good_tensors())
        (folder / name).unlink()
        make(folder / name)
        with pytest.raises(AdapterError, match=f"{name} .*{reason}"):
            read(folder)


def test_links_within_the_folder_and_into_the_hubs_blobs_are_followed(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    folder = write(tmp_path / "snapshots" / "0123", good_tensors())
    (folder / "adapter_config.json").rename(blobs / "a")
    (folder / "adapter_config.json").symlink_to("../../blobs/a")
    (folder / "adapter_model.safetensors").rename(folder / "real")
    (folder / "adapter_model.safetensors").symlink_to("real")
    assert read(folder).rank == 4


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\ud800", "no/such/folder"])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read(Path(path))


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """A mapping of it would end the process."""
    path = tmp_path / "weights"
    entries: dict[str, object] = {"x": entry([0, 4000], [1000])}
    path.write_bytes(tensor_file(entries, 4000))
    with open_regular(path) as file:
        tensors = read_header(file, "weights")
        os.truncate(path, 100)
        with pytest.raises(AdapterError, match="became shorter"):
            tensors.read("x")


def test_a_copy_of_the_base_that_claims_a_terabyte_is_refused_by_its_shape(tmp_path: Path) -> None:
    file = write(tmp_path, good_tensors()) / "adapter_model.safetensors"
    columns = 10**12 // 64
    entries: dict[str, object] = {
        f"{Q0}.lora_A.weight": entry([0, 256], [4, HIDDEN]),
        f"{Q0}.lora_B.weight": entry([256, 512], [HIDDEN, 4]),
        "base_model.model.lm_head.base_layer.weight": entry(
            [512, 512 + 64 * columns], [16, columns]
        ),
    }
    raw = tensor_file(entries, 512)
    file.write_bytes(raw)
    os.truncate(file, len(raw) + 64 * columns)
    with pytest.raises(AdapterError, match="has shape"):
        read(tmp_path, base=make_base())


def test_a_reason_is_short_and_printable_whatever_the_file_says(tmp_path: Path) -> None:
    for name in ("a\nINFO all is well\x1b[2J", "\ud800", "\u202eevil", "x" * 100_000):
        tensors: dict[str, object] = {name: entry([0, 4], [1])}
        (write(tmp_path, good_tensors()) / "adapter_model.safetensors").write_bytes(
            tensor_file(tensors, 4)
        )
        with pytest.raises(AdapterError) as refusal:
            read(tmp_path)
        reason = str(refusal.value)
        assert reason.isascii()
        assert reason.isprintable()
        assert len(reason) < 400


def test_a_field_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, good_tensors()) / "adapter_config.json"
    path.write_text('{"r": 8, ' + path.read_text()[1:])
    with pytest.raises(AdapterError, match=r"adapter_config\.json names r twice"):
        read(tmp_path)


def test_the_files_own_tensors_are_what_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path, good_tensors())
    tensors = load_file(folder / "adapter_model.safetensors")
    weights = read(folder).modules[MODULE]
    assert torch.equal(weights.a, tensors[f"{Q0}.lora_A.weight"])


def test_refusals_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(AdapterError("the reason")))
    assert str(error) == "the reason"
