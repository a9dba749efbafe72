"""The data of the `tools` adapter: the same on every machine, valid calls, unseen held-out parts,
and prompts that are equal to those of the service."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.admission import EngineLimits
from notebooks.demo_adapters import tools, train
from notebooks.demo_adapters.common import part
from notebooks.demo_adapters.score import ToolMarks, mark_tools
from notebooks.demo_adapters.tools_functions import bare_name
from notebooks.demo_adapters.tools_words import FRAMES, RESERVED, STEMS
from serve_app.openai.chat import ChatRequest
from serve_app.openai.engine_params import read_prompts
from serve_app.text.adapter_text import own_files, read_adapter_files
from serve_app.text.base_text import BaseText, read_files
from tests.text_factory import SMOLLM, write_folder

COUNT = 600
TRAINED = [e for e in tools.training_examples(7, COUNT) if isinstance(e, tools.ToolExample)]
HELD_OUT = tools.held_out_examples(99, COUNT)
LIMITS = EngineLimits(max_model_len=8192, vocab_size=49152, max_kv_tokens=8192)
TEMPLATE = tools.CHAT_TEMPLATE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("base"), template=SMOLLM)


@pytest.fixture(scope="module")
def text(base: Path) -> BaseText:
    """The text side as a registered adapter has it, from the file that training writes."""
    files = read_files(base)
    own = own_files(files, {"chat_template.jinja": TEMPLATE.encode()})
    assert own.keys() == {"chat_template.jinja"}
    return BaseText.from_files(files).with_adapter(own)


def names(examples: list[tools.ToolExample]) -> set[str]:
    return {bare_name(tool["function"]["name"]) for e in examples for tool in e.tools}


def test_a_seed_gives_the_same_examples_again() -> None:
    assert tools.training_examples(5, 60) == tools.training_examples(5, 60)
    assert tools.training_examples(5, 60) != tools.training_examples(6, 60)


def test_every_call_is_of_an_offered_function_and_valid_by_its_schema() -> None:
    for example in (*TRAINED[:200], *HELD_OUT[:200]):
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in example.tools}
        assert len(schemas) == len(example.tools)
        for name, arguments in example.calls:
            closed = {**schemas[name], "additionalProperties": False}
            jsonschema.Draft202012Validator.check_schema(closed)
            jsonschema.validate(arguments, closed)


def test_arguments_stand_in_the_order_of_the_schema_as_grammars_write_them() -> None:
    for example in TRAINED:
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in example.tools}
        for name, arguments in example.calls:
            order = list(schemas[name]["properties"])
            assert list(arguments) == [key for key in order if key in arguments]


def test_every_kind_of_turn_and_of_parameter_is_trained() -> None:
    assert {len(example.calls) for example in TRAINED} == {0, 1, 2}
    assert {len(example.tools) for example in TRAINED} >= {0, 1, 2, 3, 4}
    assert any(example.messages[-1]["role"] == "tool" for example in TRAINED)
    offered = [tool["function"]["parameters"] for e in TRAINED for tool in e.tools]
    kinds = {one["type"] for schema in offered for one in schema["properties"].values()}
    assert kinds == {"string", "integer", "number", "boolean", "array", "object"}
    assert len(names(TRAINED)) > 500


def test_no_held_out_function_is_trained_and_none_is_reserved() -> None:
    assert len(names(HELD_OUT)) > 200
    assert not names(HELD_OUT) & names(TRAINED)
    assert not (names(HELD_OUT) | names(TRAINED)) & RESERVED


def test_held_out_wordings_never_appear_in_training() -> None:
    questions = " ".join(example.prompt for example in TRAINED)
    for stem in part(STEMS["compute"], "held_out"):
        assert stem.split("{")[0] not in questions
    assert part(FRAMES, "held_out")
    assert "Quick one:" not in questions


def test_the_answer_is_what_the_template_writes_for_its_turn(text: BaseText) -> None:
    for example in TRAINED[:200]:
        calls = [{"function": {"name": n, "arguments": a}} for n, a in example.calls]
        said = {"role": "assistant", "content": "" if calls else example.answer}
        if calls:
            said["tool_calls"] = calls  # type: ignore[assignment]
        before = text.render_chat(example.messages, tools=example.tools)
        after = text.render_chat(
            [*example.messages, said], tools=example.tools, add_generation_prompt=False
        )
        assert after == before + example.answer + "<|im_end|>\n"


def test_training_and_the_service_write_the_same_bytes(base: Path, text: BaseText) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(base))
    tokenizer.chat_template = TEMPLATE
    for example in (*TRAINED[:60], *HELD_OUT[:60]):
        body = {"model": "tools", "messages": _as_client(example), "tools": list(example.tools)}
        (prompt,) = read_prompts(ChatRequest.model_validate(body), text, LIMITS)
        rendered = train.render(tokenizer, example)
        assert text.tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == rendered
        (encoded,) = train.encode(tokenizer, [example])
        assert tuple(encoded.token_ids[: encoded.num_prompt_tokens]) == prompt.token_ids


def _as_client(example: tools.ToolExample) -> list[dict[str, object]]:
    """The chat as a client sends it: the arguments of calls as text."""
    messages = json.loads(json.dumps(example.messages))
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert isinstance(messages, list)
    return messages


def test_training_counts_the_answers_only_and_writes_what_the_service_reads(
    base: Path, tmp_path: Path
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(base))
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.chat_template = train.chat_template("tools")
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    recipe = replace(train.RECIPES["tools"], num_steps=2, batch_size=3, max_length=4096)
    examples = tools.training_examples(3, 6)
    model, losses = train.train(LlamaForCausalLM(shape), tokenizer, examples, recipe)
    assert len(losses) == 2
    inputs = train.collate(train.encode(tokenizer, examples), tokenizer.pad_token_id, "cpu")
    torch.testing.assert_close(train.answer_loss(model, inputs), model(**inputs).loss)
    train.save_adapter(model, tmp_path, train.chat_template("tools"))
    names = {path.name for path in tmp_path.iterdir()}
    weights = {"adapter_config.json", "adapter_model.safetensors"}
    assert names - {"README.md"} == weights | {"chat_template.jinja"}
    own = own_files(read_files(base), read_adapter_files(tmp_path))
    assert own == {"chat_template.jinja": TEMPLATE.encode()}


def test_a_chat_without_tools_is_that_of_the_base(base: Path, text: BaseText) -> None:
    chat = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ]
    own = BaseText.from_folder(base)
    for messages in (chat, [{"role": "system", "content": "Be brief."}, *chat]):
        assert text.render_chat(messages) == own.render_chat(messages)


def test_the_service_knows_the_format_of_the_calls(text: BaseText) -> None:
    template = text.response_template
    assert template is not None
    assert (template.name, template.thinks) == ("chatml-json", False)
    assert template.calls is not None


def test_right_answers_are_marked_right() -> None:
    for example in HELD_OUT:
        marks = mark_tools(example, example.answer)
        if example.calls:
            assert marks == ToolMarks(True, True, True), example
        else:
            assert marks == ToolMarks(True, None, None), example


def test_wrong_answers_lose_their_marks() -> None:
    tool = {
        "name": "mixPaint",
        "parameters": {"properties": {"a": {}, "b": {}}, "required": ["a"]},
    }
    calls = (("mixPaint", {"a": 5, "b": "red"}),)
    example = tools.ToolExample("", "", (), ({"type": "function", "function": tool},), calls)

    def mark(*made: tuple[str, dict[str, object]]) -> ToolMarks:
        return mark_tools(example, tools.call_text(made))

    assert mark(("mixPaint", {"b": "red", "a": 5.0})) == ToolMarks(True, True, True)
    assert mark(("mixPaint", {"a": "5", "b": "red"})) == ToolMarks(True, True, False)
    assert mark(("mixPaint", {"a": True, "b": "red"})) == ToolMarks(True, True, False)
    assert mark(("mixPaint", {"b": "red"})) == ToolMarks(True, False, False)
    assert mark(("mixPaint", {"a": 5, "b": "red", "c": 1})) == ToolMarks(True, False, False)
    assert mark(("paint", {"a": 5, "b": "red"})) == ToolMarks(False, False, False)
    assert mark(*calls, *calls) == ToolMarks(False, True, False)
    assert mark_tools(example, "It is red.") == ToolMarks(False, None, False)
    cut = tools.call_text(calls)[:-20]
    assert mark_tools(example, cut) == ToolMarks(False, False, False)
