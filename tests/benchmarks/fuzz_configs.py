"""Mutations of adapter_config.json: its text, its numbers, its patterns, its variants."""

from __future__ import annotations

import json
import random

from tests.benchmarks.fuzz_files import (
    ACCEPTED,
    CONFIG,
    EITHER,
    UNCHANGED_OR_REFUSED,
    AdapterFiles,
    Expectation,
    Mutation,
    flip_bits,
    refused,
)

# JSON's texts, not values: some are numbers that no Python float holds.
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "null", "true", "{}", '"16"', '""', "1e400")
_BAD_RANKS = (*_NO_NUMBERS, "0", "-1", "-16", "2147483648", "8.5", "4.0", "[8]", '"../8"', "1")
_BAD_ALPHAS = (*_NO_NUMBERS, "[8]", "1e308", "-1e308")
_GOOD_ALPHAS = ["0", "-16", "0.5", "1e-30", "16.0", "1e2"]
# Each matches, or fails to match, the name of a module for a very long time if it is tried by
# backtracking.
_MATCHES_ALL = ".*" * 2000
EVIL_PATTERNS = (
    "(a+)+$",
    "(a|a)*x",
    "(.|.)*x",
    "(a|aa)+$",
    "((.*)*)*x",
    "(.*a){20}x",
    ".*.*.*.*.*.*.*.*x",
    "(.*.*.*.*){2}x",
    ".*?.*?.*?.*?.*?.*?.*?.*?x",
    "(?:.?){100}x",
    "(.?.?.?.?.?.?.?.?.?.?){9}x",
    "(?=(.*)*x)",
    "((.)(.)(.)(.)?)*x",
    "(\\w|\\S)(\\w|\\S)" + "(\\w|\\S)" * 30 + "x",
    r"(.*)\1\1\1x",
    "(?:" * 90 + "." + "?)" * 90 + "x",
    "(" * 1500 + ")" * 1500,
    "a{65535}{65535}",
    "(?:(?:.{1,30}){1,30}){1,30}x",
    "(?i)" + "[\\x00-\\U0010ffff]" * 200,
    "[" * 2000,
    "(?P<n>a)(?(n)b|c)",
    "(?<=a)b",
    "(?x)#",
    "a**",
    "(?P<",
    "\\",
    _MATCHES_ALL,
    "|" * 4000,
    ".*\ud800",
    "q_proj" * 200_000,
)
_UNSUPPORTED: tuple[tuple[str, object, str], ...] = (
    ("use_dora", True, "magnitude of DoRA"),
    ("use_dora", "false", "use_dora"),
    ("bias", "some", "bias"),
    ("bias", ["x"] * 100_000, "bias"),
    ("bias", None, "bias"),
    ("lora_bias", True, "bias"),
    ("modules_to_save", ["lm_head"], "modules_to_save"),
    ("modules_to_save", "../x", "modules_to_save"),
    ("fan_in_fan_out", True, "fan_in_fan_out"),
    ("layer_replication", [[0, 2], [1, 3]], "layer_replication"),
    ("trainable_token_indices", [1, 2], "trainable_token_indices"),
    ("trainable_token_indices", {"embed_tokens": [1]}, "trainable_token_indices"),
    ("trainable_token_indices", {"embed_tokens": [10**400]}, "trainable_token_indices"),
    ("target_parameters", ["mlp.experts.gate_up_proj"], "target_parameters"),
    ("use_qalora", True, "QALoRA"),
    ("arrow_config", {"top_k": 3}, "Arrow"),
    ("init_lora_weights", "pissa", "init_lora_weights"),
    ("init_lora_weights", "loftq", "init_lora_weights"),
    ("init_lora_weights", "pissa" + "x" * 100_000, "init_lora_weights"),
    ("peft_type", "IA3", "peft_type"),
    ("peft_type", "lora", "peft_type"),
    ("peft_type", None, "peft_type"),
    ("peft_type", "../../LORA", "peft_type"),
    ("peft_type", [["x"]] * 100_000, "peft_type"),
    ("use_rslora", "yes", "use_rslora"),
    ("use_rslora", 1, "use_rslora"),
    ("target_modules", [], "target_modules"),
    ("target_modules", None, "target_modules"),
    ("target_modules", 3, "target_modules"),
    ("target_modules", "", "target_modules"),
    ("target_modules", [["q_proj"]], "target_modules"),
    ("target_modules", {"q_proj": 1}, "target_modules"),
    ("target_modules", ["../q_proj"], "target_modules"),
    ("target_modules", ["q_proj\u200b", "v_proj"], "target_modules"),
    ("target_modules", ["no_such_module"], "target_modules"),
    ("exclude_modules", ["q_proj", "lm_head"], "target_modules"),
    ("exclude_modules", ".*", "target_modules"),
    ("exclude_modules", 7, "exclude_modules"),
    ("layers_to_transform", [0], "target_modules"),
    ("layers_to_transform", "0", "layers_to_transform"),
    ("layers_to_transform", [True], "layers_to_transform"),
    ("layers_to_transform", [1.0], "layers_to_transform"),
    ("layers_to_transform", -1, "target_modules"),
    ("layers_to_transform", [10**400], "target_modules"),
    ("rank_pattern", {"q_proj": 3, "lm_head": 3}, "adapter_config.json has 3"),
    ("rank_pattern", {"q_proj": -1}, "rank_pattern"),
    ("rank_pattern", {"q_proj": "4"}, "rank_pattern"),
    ("rank_pattern", ["q_proj"], "rank_pattern"),
    ("rank_pattern", {"(": 4}, "rank_pattern"),
    ("alpha_pattern", {"q_proj": None}, "alpha_pattern"),
    ("alpha_pattern", {"q_proj": "16"}, "alpha_pattern"),
    ("alpha_pattern", {"q_proj": 10**400}, "alpha_pattern"),
    ("alpha_pattern", {"x" * 5000: 1}, "alpha_pattern"),
    ("alpha_pattern", "q_proj", "alpha_pattern"),
)
_HARMLESS: tuple[dict[str, object], ...] = (
    {"base_model_name_or_path": "../../../../etc/passwd"},
    {"base_model_name_or_path": "/dev/zero"},
    {"base_model_name_or_path": "someone/another-base"},
    {"base_model_name_or_path": "ünïcødé \u202e\n\0"},
    {"base_model_name_or_path": None},
    {"revision": "../../main", "task_type": None},
    {"lora_dropout": 0.9},
    {"lora_dropout": 0},
    {"inference_mode": False},
    {"init_lora_weights": False},
    {"init_lora_weights": "gaussian"},
    {"modules_to_save": []},
    {"rank_pattern": {}, "alpha_pattern": {}},
    {"rank_pattern": {"nothing_is_called_so": 77}},
    {"alpha_pattern": {"q_proj": 5, "lm_head": 0.25}},
    {"alpha_pattern": {r"layers\.[01]\.self_attn\.(q|v)_proj": 3}},
    {"alpha_pattern": {"^model.layers.1.self_attn.q_proj": 11}},
    {"alpha_pattern": {f"module_{i}": i for i in range(500)}},
    {"use_rslora": True},
    {"use_rslora": None},
    {"exclude_modules": ["no_such_module"]},
    {"exclude_modules": r"vision.*\.q_proj"},
    {"peft_version": "99.0.0+\u00e9"},
)


def text_of_another_form(files: AdapterFiles, rng: random.Random) -> Expectation:
    good = json.dumps(files.config)
    texts = (
        b"",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"{}",
        b"{",
        good.encode()[: rng.randrange(len(good))],
        good[:-1].encode() + b",}",
        good.encode("utf-16"),
        good.encode("utf-8-sig"),
        good[:-1].encode() + b', "x": "\xff"}',
        good.encode() + b"x",
        b"\0" * 4096,
        b" " * 2**21,
        good.encode() + b" " * 2**21,
        b"[" * rng.choice((900, 990, 100_000)),
        b"peft_type: LORA\nr: 8\n",
        b"!!python/object/apply:os.system ['true']",
        b"9" * 100_000,
    )
    files.write_config(rng.choice(texts))
    return refused("adapter_config.json|peft_type")


def bits_of_config_flipped(files: AdapterFiles, rng: random.Random) -> Expectation:
    raw = (files.folder / CONFIG).read_bytes()
    files.write_config(flip_bits(raw, rng, rng.choice((1, 1, 2, 8)), 0, len(raw)))
    return EITHER


def duplicate_field(files: AdapterFiles, rng: random.Random) -> Expectation:
    field = rng.choice(("r", "lora_alpha", "peft_type", "target_modules", "use_dora"))
    good = json.dumps(files.config)
    files.write_config(f'{{"{field}": {rng.choice(("1", "true", "[]"))}, {good[1:]}'.encode())
    return refused("twice")


def nested_field(files: AdapterFiles, rng: random.Random) -> Expectation:
    """Where Python's parser can follow, a value that nobody reads is nobody's harm."""
    depth = rng.choice((50, 900, 960, 980, 990, 1000, 50_000))
    field = rng.choice(("auto_mapping", "r", "lora_alpha", "target_modules", "bias", "peft_type"))
    value = rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))
    files.config[field] = "HERE"
    files.write_config(json.dumps(files.config).replace('"HERE"', value).encode())
    return EITHER if field == "auto_mapping" else refused(f"{field}|not valid JSON")


def wrong_rank(files: AdapterFiles, rng: random.Random) -> Expectation:
    return _number(
        files, "r", rng.choice((*_BAD_RANKS, "9" * 4000, "9" * 5000)), "rank|r must|JSON"
    )


def wrong_alpha(files: AdapterFiles, rng: random.Random) -> Expectation:
    words = "lora_alpha|scale|JSON"
    numbers = (*_BAD_ALPHAS, "9" * 400, "-" + "9" * 4000, "9" * 5000)
    return _number(files, "lora_alpha", rng.choice(numbers), words)


def other_alpha(files: AdapterFiles, rng: random.Random) -> Expectation:
    _number(files, "lora_alpha", rng.choice(_GOOD_ALPHAS), "")
    return ACCEPTED


def missing_field(files: AdapterFiles, rng: random.Random) -> Expectation:
    field = rng.choice(("r", "lora_alpha", "peft_type", "target_modules"))
    del files.config[field]
    files.write_config()
    return refused(f"{field} |no {field}")


def _number(files: AdapterFiles, field: str, text: str, words: str) -> Expectation:
    files.config[field] = "HERE"
    files.write_config(json.dumps(files.config).replace('"HERE"', text).encode())
    return refused(words)


def evil_pattern(files: AdapterFiles, rng: random.Random) -> Expectation:
    pattern = rng.choice(EVIL_PATTERNS)
    field = rng.choice(("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"))
    files.change_config(**{field: {pattern: 4} if field.endswith("_pattern") else pattern})
    # The others name no module, and PEFT would try some of them for years.
    return EITHER if pattern == _MATCHES_ALL else UNCHANGED_OR_REFUSED


def evil_layers_pattern(files: AdapterFiles, rng: random.Random) -> Expectation:
    pattern = rng.choice((*EVIL_PATTERNS, "layers", "h", "nothing", "(?P<idx>a)", "layers|x"))
    value: object = pattern if rng.random() < 0.5 else [pattern] * rng.choice((1, 3, 5000))
    layers = rng.choice((None, [0, 1, 2], [0]))
    files.change_config(layers_pattern=value, layers_to_transform=layers)
    return EITHER


def many_names(files: AdapterFiles, rng: random.Random) -> Expectation:
    """Adds as many names as a megabyte holds: each module is compared with all of them."""
    count = rng.choice((1000, 20_000, 60_000))
    field = rng.choice(("target_modules", "exclude_modules", "rank_pattern", "layers_to_transform"))
    names = [f"m{i}.x" for i in range(count)]
    if field == "rank_pattern":
        shapes = ("m{}", "m{}.*", r"(m{}|x)\.y", ".*m{}")
        shape = rng.choice(shapes)
        files.change_config(rank_pattern={shape.replace("{}", str(i)): 5 for i in range(count)})
    elif field == "target_modules":
        targets = files.config["target_modules"]
        assert isinstance(targets, list)
        files.change_config(target_modules=[*names, *targets])
    elif field == "layers_to_transform":
        files.change_config(layers_to_transform=list(range(count)))
    else:
        files.change_config(exclude_modules=names)
    return UNCHANGED_OR_REFUSED


def unsupported_variant(files: AdapterFiles, rng: random.Random) -> Expectation:
    field, value, words = rng.choice(_UNSUPPORTED)
    files.change_config(**{field: value})
    return refused(words)


def harmless_field(files: AdapterFiles, rng: random.Random) -> Expectation:
    files.change_config(**rng.choice(_HARMLESS))
    return ACCEPTED


def unknown_field(files: AdapterFiles, rng: random.Random) -> Expectation:
    names = ("zzz", "__class__", "../x", "\u0000", "r ", "R", "auto_map", "trust_remote_code", "")
    values: tuple[object, ...] = (True, "os.system('true')", {"a": [1]}, "x" * 100_000, None)
    files.change_config(**{rng.choice(names): rng.choice(values)})
    return ACCEPTED


CONFIG_MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "text of the configuration": (text_of_another_form, bits_of_config_flipped, duplicate_field),
    "nested configuration": (nested_field,),
    "rank": (wrong_rank,),
    "alpha": (wrong_alpha, other_alpha),
    "missing fields": (missing_field,),
    "patterns": (evil_pattern, evil_pattern, evil_layers_pattern),
    "many names": (many_names,),
    "variants": (unsupported_variant, unsupported_variant, harmless_field),
    "unknown fields": (unknown_field,),
}
