"""The choices of a response: order, stops, replays, failures; a stream agrees with a whole one."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from engine.errors import GRAMMAR_ERRORS, InvalidRequestError
from engine.types import FinishReason, TokenLogprobs, TokenOutput
from serve_app.errors import EngineFailureError, ServiceUnavailableError
from serve_app.openai import answer as answer_module
from serve_app.openai.engine_params import Prompt
from serve_app.openai.logprobs import PAUSE, PartsRenderer
from serve_app.text.base_text import BaseText
from serve_app.text.template import ChatTemplate
from serve_app.text.tokenizer import TextTokenizer
from tests.answer_factory import (
    EOS,
    Json,
    body_of,
    chat,
    completion,
    ids_of,
    logprobs_of,
    outputs,
    stream_of,
    strictly,
    whole_of,
)
from tests.text_factory import base_text, sentencepiece_tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> BaseText:
    return base_text(tmp_path_factory.mktemp("model"))


def test_choices_of_several_prompts_are_numbered_in_order(text: BaseText) -> None:
    prompts = [Prompt((5,), "a"), Prompt((5, 6), "b")]
    answer = completion(text, prompts, prompt=["a", "b"], n=2, max_tokens=4)
    words = ["fox", "dog", "The", "Paris"]
    for index in (3, 0, 2, 1):  # in any order
        for output in outputs(ids_of(text, words[index]), "length", choice=index % 2):
            assert not answer.is_done
            # A second choice finds the prompt that the first choice computed.
            cached = 1 if index % 2 == 0 else 50
            answer.feed(index // 2, replace(output, num_cached_tokens=cached))
    assert answer.is_done
    body = strictly(Completion, json.loads(whole_of(answer)))
    assert [choice.index for choice in body.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in body.choices] == words
    assert body.usage is not None
    assert body.usage.prompt_tokens == 3  # each prompt once
    assert body.usage.completion_tokens == sum(len(ids_of(text, word)) for word in words)
    assert body.usage.prompt_tokens_details is not None
    assert body.usage.prompt_tokens_details.cached_tokens == 2


def test_interleaved_choices_each_end_once(text: BaseText) -> None:
    answer = chat(text, n=3, stream=True)
    lanes = [outputs(ids_of(text, "fox jumps over"), "length", choice=i) for i in range(3)]
    mixed = [output for step in zip(*lanes, strict=True) for output in step]
    chunks = [strictly(ChatCompletionChunk, event) for event in stream_of(answer, mixed)]
    for index in range(3):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in own) == "fox jumps over"
        assert [c.finish_reason for c in own if c.finish_reason] == ["length"]
        assert [c.delta.role for c in own if c.delta.role] == ["assistant"]


def test_stop_string_ends_the_choice_and_tells_to_abort(text: BaseText) -> None:
    answer = chat(text, stop=["jumps"], stream=True)
    ids = ids_of(text, "fox jumps over the dog")
    aborts = [answer.feed(0, output).abort for output in outputs(ids, "length")]
    assert aborts.count(True) == 1
    assert answer.is_done
    body = body_of(chat(text, stop=["jumps"]), outputs(ids, "length"))
    choice = body["choices"][0]  # type: ignore[index]
    assert choice["message"]["content"] == "fox "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "jumps")
    assert answer.usage().completion_tokens == aborts.index(True) + 1


def test_stop_string_in_the_last_token_needs_no_abort(text: BaseText) -> None:
    answer = chat(text, stop=["jumps"])
    fed = [answer.feed(0, output) for output in outputs(ids_of(text, "fox jumps"), "length")]
    assert not any(item.abort for item in fed)
    assert json.loads(whole_of(answer))["choices"][0]["finish_reason"] == "stop"


def test_stop_string_does_not_count_before_min_tokens(text: BaseText) -> None:
    ids = ids_of(text, "xxxxxx")
    assert len(ids) == 6
    for min_tokens, content in ((0, ""), (2, "xx"), (5, "xxxxx"), (6, "xxxxxx")):
        answer = chat(text, stop=["x"], min_tokens=min_tokens)
        choice = body_of(answer, outputs(ids, "length"))["choices"][0]  # type: ignore[index]
        assert choice["message"]["content"] == content


def test_stop_id_is_named_and_is_no_text(text: BaseText) -> None:
    fox, dog = ids_of(text, "fox"), ids_of(text, "!")
    fed = outputs([*fox, *dog], "stop", stop_token_id=dog[-1])
    choice = body_of(chat(text), fed)["choices"][0]  # type: ignore[index]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("fox", dog[-1])
    fed = outputs([*fox, *dog], "stop", stop_token_id=dog[-1])
    kept = body_of(chat(text, include_stop_str_in_output=True), fed)["choices"][0]  # type: ignore[index]
    assert kept["message"]["content"] == "fox!"


def test_special_tokens_show_when_asked_but_not_the_end(text: BaseText) -> None:
    fed = outputs([2, *ids_of(text, "fox"), EOS])
    choice = body_of(chat(text, skip_special_tokens=False), fed)["choices"][0]  # type: ignore[index]
    assert choice["message"]["content"] == "<|im_start|>fox"


def test_token_ids_come_when_asked(text: BaseText) -> None:
    ids = [*ids_of(text, "fox jumps"), EOS]
    body = body_of(chat(text, return_token_ids=True), outputs(ids))
    assert body["prompt_token_ids"] == [5, 6]
    assert body["choices"][0]["token_ids"] == ids  # type: ignore[index]
    events = stream_of(chat(text, return_token_ids=True, stream=True), outputs(ids))
    streamed = [i for event in events for i in event["choices"][0]["token_ids"]]  # type: ignore[index]
    assert streamed == ids


def test_a_continued_message_keeps_the_space_that_joins_it_to_its_beginning() -> None:
    tokenizer = TextTokenizer(sentencepiece_tokenizer(), "<s>")
    template = ChatTemplate("{{ messages[-1].content }}", {})
    pieces = BaseText(tokenizer, template, {}, frozenset([2]))
    world = tokenizer.token_id("▁world")
    assert world is not None
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "hello"}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    for fields, said in ((continued, " world world"), ({}, "world world")):
        for stream in (False, True):
            answer = chat(pieces, messages=messages, stream=stream, **fields)
            fed = outputs([world, world, 2])
            if stream:
                events = stream_of(answer, fed)
                deltas = [event["choices"][0]["delta"] for event in events]  # type: ignore[index]
                assert "".join(delta["content"] for delta in deltas) == said
            else:
                choice = body_of(answer, fed)["choices"][0]  # type: ignore[index]
                assert choice["message"]["content"] == said


@pytest.mark.parametrize("is_text", [True, False])
def test_echoed_tokens_stand_where_their_offsets_say(text: BaseText, is_text: bool) -> None:
    written = "<|im_start|>user\nhello<|im_end|>\nfox"
    # The first is a token that the tokenizer adds, so the echoed text does not have it.
    ids = [0, *ids_of(text, written)]
    prompt = Prompt(tuple(ids), written if is_text else None)
    (the,) = ids_of(text, " the")
    entries = (None, *(logprobs_of(i) for i in ids[1:]))
    output = TokenOutput("r", 0, 0, (the,), (logprobs_of(the),), entries, "length")
    answer = completion(text, [prompt], echo=True, logprobs=0, max_tokens=1)
    choice = body_of(answer, [output])["choices"][0]  # type: ignore[index]
    said, lists = choice["text"], choice["logprobs"]
    assert said == (written if is_text else "user\nhello\nfox") + " the"
    shown = {
        (token, said[offset : offset + len(token)])
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True)
        if not (token.startswith("<") and token not in said)
    }
    assert len(shown) >= 8 - 2 * (not is_text)
    assert all(token == there for token, there in shown)


def test_prompt_logprobs_as_vllm_shows_them(text: BaseText) -> None:
    answer = chat(text, prompt_logprobs=1)
    known = (None, TokenLogprobs(6, -2.0, 4, ((9, -0.1),)))
    output = TokenOutput("r", 0, 0, (EOS,), prompt_logprobs=known, finish_reason="stop")
    body = body_of(answer, [output])
    first, second = body["prompt_logprobs"]  # type: ignore[misc]
    assert first is None  # type: ignore[has-type]
    assert second["6"] == {  # type: ignore[has-type]
        "logprob": -2.0,
        "rank": 4,
        "decoded_token": text.tokenizer.token_text(6),
    }
    assert second["9"]["rank"] == 1  # type: ignore[has-type]


def test_replayed_output_is_not_sent_twice(text: BaseText) -> None:
    fed = outputs(ids_of(text, "fox jumps over"), "length")
    answer = chat(text)
    for output in [*fed[:3], *fed[1:3], *fed[2:]]:
        answer.feed(0, output)
    choice = json.loads(whole_of(answer))["choices"][0]
    assert choice["message"]["content"] == "fox jumps over"
    assert answer.usage().completion_tokens == len(fed)
    with pytest.raises(EngineFailureError, match="lost"):
        chat(text).feed(0, fed[1])


def test_engine_failures_are_raised(text: BaseText) -> None:
    with pytest.raises(EngineFailureError, match="not finite"):
        chat(text).feed(0, TokenOutput("r", 0, 0, (), finish_reason="error", error="not finite"))
    with pytest.raises(ServiceUnavailableError):
        chat(text).feed(0, TokenOutput("r", 0, 0, (), finish_reason="abort"))


@pytest.mark.parametrize("beginning", GRAMMAR_ERRORS)
def test_failures_of_the_grammar_name_the_field_of_the_body(text: BaseText, beginning: str) -> None:
    output = TokenOutput("r", 0, 0, (), finish_reason="error", error=f"{beginning}a limit")
    with pytest.raises(InvalidRequestError, match=r"guided_regex: .*: a limit") as caught:
        chat(text, guided_regex="a*").feed(0, output)
    assert caught.value.param == "guided_regex"


def test_outputs_after_the_end_are_ignored(text: BaseText) -> None:
    answer = chat(text, stop=["x"], stream=True)
    (x,) = ids_of(text, "x")
    assert answer.feed(0, TokenOutput("r", 0, 0, (x,))).abort
    late = answer.feed(0, TokenOutput("r", 0, 1, (), finish_reason="abort"))
    assert (late.data, late.abort) == (b"", False)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stream_and_whole_answer_agree(text: BaseText, data: st.DataObject) -> None:
    ids = data.draw(
        st.lists(st.integers(0, text.tokenizer.vocab_size + 2), min_size=1, max_size=20)
    )
    fields: Json = {
        "stop": data.draw(st.lists(st.sampled_from(["a", "e ", "\ufffd", "the"]), max_size=2)),
        "min_tokens": data.draw(st.integers(0, 5)),
        "include_stop_str_in_output": data.draw(st.booleans()),
        "skip_special_tokens": data.draw(st.booleans()),
        "logprobs": data.draw(st.booleans()),
    }
    width = data.draw(st.integers(1, 3))
    finish: FinishReason = data.draw(st.sampled_from(["stop", "length"]))
    entries = [logprobs_of(i, (i, -0.5)) for i in ids]
    fed = [
        TokenOutput(
            "r",
            0,
            start,
            tuple(ids[start : start + width]),
            tuple(entries[start : start + width]) if fields["logprobs"] else (),
            finish_reason=finish if start + width >= len(ids) else None,
        )
        for start in range(0, len(ids), width)
    ]
    whole = body_of(chat(text, **fields), fed)["choices"][0]  # type: ignore[index]
    single = body_of(
        chat(text, **fields), outputs(ids, finish, logprobs=entries if fields["logprobs"] else ())
    )["choices"][0]  # type: ignore[index]
    assert whole == single
    events = stream_of(chat(text, stream=True, **fields), fed)
    choices = [event["choices"][0] for event in events]  # type: ignore[index]
    assert "".join(c["delta"]["content"] for c in choices) == whole["message"]["content"]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [whole["finish_reason"]]
    if fields["logprobs"]:
        content = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert content == whole["logprobs"]["content"]


async def test_a_very_large_whole_response_is_joined_in_slices(
    text: BaseText, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = completion(text, [Prompt((5,), "a")], n=2, return_token_ids=True)
    for choice in range(2):
        for output in outputs(ids_of(text, "The quick fox"), "length", choice=choice):
            answer.feed(0, output)
    whole = whole_of(answer)
    assert not list(answer.rendering())
    monkeypatch.setattr(answer_module, "_SLICE_DELTAS", 2)
    num_deltas = sum(len(choice.deltas) for choice in answer._choices)
    pauses = list(answer.rendering())
    assert len(pauses) >= num_deltas // 2
    assert all(part is PAUSE for part in pauses)
    assert await PartsRenderer(text.tokenizer, None).run(answer.rendering()) == whole
