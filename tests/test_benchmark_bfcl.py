"""The benchmark of function calls: its rules on hand cases, and its reading of the questions."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tests.benchmarks.bfcl import read_questions, schema_of, tool_of
from tests.benchmarks.bfcl_checker import find_fault

FUNCTION = {
    "name": "kitchen.mix",
    "description": "Mixes.",
    "parameters": {
        "type": "dict",
        "properties": {
            "what": {"type": "string"},
            "grams": {"type": "float"},
            "times": {"type": "integer"},
            "parts": {"type": "array", "items": {"type": "string"}},
            "where": {"type": "dict", "properties": {"room": {"type": "string"}}},
        },
        "required": ["what"],
    },
}
POSSIBLE = {
    "what": ["Rye flour", "rye"],
    "grams": [2.0, ""],
    "times": [3, ""],
    "parts": [["a b", "c"], ""],
    "where": [{"room": ["kitchen", ""]}, ""],
}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"what": "rye"}, ""),
        ({"what": "RYE-flour."}, ""),
        ({"what": "wheat"}, "wrong_value"),
        ({"what": 4}, "wrong_type"),
        ({}, "missing_required"),
        ({"what": "rye", "grams": 2}, ""),
        ({"what": "rye", "grams": "2.0"}, "wrong_type"),
        ({"what": "rye", "times": 3.0}, "wrong_type"),
        ({"what": "rye", "times": True}, "wrong_type"),
        ({"what": "rye", "times": 4}, "wrong_value"),
        ({"what": "rye", "parts": ["A B", "c"]}, ""),
        ({"what": "rye", "parts": ["c", "a b"]}, "wrong_value"),
        (
            {"what": "rye", "parts": [1]},
            "wrong_value",
        ),
        ({"what": "rye", "parts": "c"}, "wrong_type"),
        ({"what": "rye", "where": {"room": "Kitchen"}}, ""),
        ({"what": "rye", "where": {}}, ""),
        ({"what": "rye", "where": {"floor": 1}}, "wrong_value"),
        ({"what": "rye", "speed": 1}, "unexpected_parameter"),
    ],
)
def test_the_rules_of_the_benchmark(arguments: dict[str, object], fault: str) -> None:
    assert find_fault(FUNCTION, [("kitchen_mix", arguments)], POSSIBLE) == fault


def test_one_call_of_the_right_function_is_demanded() -> None:
    call = ("kitchen_mix", {"what": "rye"})
    assert find_fault(FUNCTION, [], POSSIBLE) == "wrong_count"
    assert find_fault(FUNCTION, [call, call], POSSIBLE) == "wrong_count"
    assert find_fault(FUNCTION, [("kitchen.mix", {"what": "rye"})], POSSIBLE) == "wrong_name"


def test_an_argument_that_has_no_empty_value_may_not_be_left_out() -> None:
    possible = {"what": ["rye"], "times": [3]}
    assert find_fault(FUNCTION, [("kitchen_mix", {"what": "rye"})], possible) == "missing_optional"


def test_descriptions_become_json_schemas() -> None:
    tool = tool_of(FUNCTION)["function"]
    assert tool["name"] == "kitchen_mix"
    properties = tool["parameters"]["properties"]
    assert tool["parameters"]["type"] == properties["where"]["type"] == "object"
    assert properties["grams"] == {"type": "number"}
    pair = {"type": "tuple", "items": {"type": "float"}, "optional": True}
    assert schema_of(pair) == {"type": "array", "items": {"type": "number"}}


def test_questions_are_read_from_a_wheel_and_from_a_folder(tmp_path: Path) -> None:
    row = {"id": "simple_python_0", "question": [[{"role": "user", "content": "Mix."}]]}
    answer = {"id": "simple_python_0", "ground_truth": [{"kitchen.mix": POSSIBLE}]}
    files = {
        "bfcl_eval/data/BFCL_v4_simple_python.json": {**row, "function": [FUNCTION]},
        "bfcl_eval/data/possible_answer/BFCL_v4_simple_python.json": answer,
    }
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, json.dumps(content) + "\n")
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(json.dumps(content))
    found = read_questions(tmp_path / "some.whl", "simple_python")
    assert found == read_questions(tmp_path, "simple_python")
    assert found[0].possible == POSSIBLE
    assert found[0].functions == [FUNCTION]
    with pytest.raises(FileNotFoundError, match="BFCL_v4_irrelevance"):
        read_questions(tmp_path / "some.whl", "irrelevance")
