"""Texts as models of each family write them, for the tests of response templates."""

import json
from importlib.resources import files
from typing import Any

Call = tuple[str, dict[str, Any]]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]

PARIS: Call = ("get_weather", {"city": "Paris", "days": 2})
# family -> (text, content, reasoning, calls)
TEXTS: dict[str, list[tuple[str, str, str, list[Call]]]] = {
    "chatml-json": [
        ("Hi there, a < b.<|im_end|>", "Hi there, a < b.", "", []),
        ("<think>\nHm, é.\n\n</think>\n\nHi<|im_end|>\n<|endoftext|>", "Hi", "Hm, é.", []),
        (
            'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
            '\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>',
            "Sure.",
            "",
            [PARIS, ("now", {})],
        ),
        ('<think>x</think><tool_call>{"name": "now"}</tool_call>', "", "x", [("now", {})]),
        ("<tool_call>{broken}</tool_call> rest", "<tool_call>{broken}</tool_call>rest", "", []),
    ],
    "qwen-xml": [
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>",
            "",
            "",
            [PARIS],
        ),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>", "", "", [("now", {})]),
    ],
    "llama3-json": [
        (
            '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}<|eot_id|>',
            "",
            "",
            [PARIS],
        ),
        ('<|python_tag|>{"name": "now", "parameters": {}}<|eom_id|>', "", "", [("now", {})]),
        ('See {"name": "now", "parameters": {}}', 'See {"name": "now", "parameters": {}}', "", []),
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
            '{"name": "now", "arguments": {}}]</s>',
            "",
            "",
            [PARIS, ("now", {})],
        ),
        ("Hello.</s>", "Hello.", "", []),
    ],
    "mistral-args": [
        (
            '[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}'
            "[TOOL_CALLS]now[ARGS]{}</s>",
            "",
            "Hm.",
            [PARIS, ("now", {})],
        ),
        ("Sure.[TOOL_CALLS]now[CALL_ID]0aB3[ARGS]{}</s>", "Sure.", "", [("now", {})]),
        ("Hello.</s>", "Hello.", "", []),
    ],
    "granite": [
        (
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
            '{"name": "now", "arguments": {}}]<|end_of_text|>',
            "",
            "",
            [PARIS, ("now", {})],
        ),
        ('<tool_call>[{"name": "now", "arguments": {}}]<|end_of_text|>', "", "", [("now", {})]),
        ("<think>Hm.</think>Hello.<|end_of_text|>", "Hello.", "Hm.", []),
    ],
    "phi": [
        (
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
            '{"name": "now", "arguments": {}}]<|/tool_call|><|end|>',
            "",
            "",
            [PARIS, ("now", {})],
        ),
        (
            'Sure.\n<|tool_call|>[{"name": "now", "arguments": {}}]<|end|>',
            "Sure.",
            "",
            [("now", {})],
        ),
        ("Hello.<|end|><|endoftext|>", "Hello.", "", []),
    ],
    "gemma": [
        (
            "<|channel>thought\nHm.<channel|><|tool_call>call:get_weather{city:"
            '<|"|>Paris<|"|>,days:2}<tool_call|><|tool_response>',
            "",
            "Hm.",
            [PARIS],
        ),
        ("Hello.<turn|>", "Hello.", "", []),
    ],
}


def template_json(family: str) -> dict[str, Any]:
    path = files("serve_app.text") / "response_templates" / f"{family}.json"
    spec: dict[str, Any] = json.loads(path.read_text())["template"]
    return spec
