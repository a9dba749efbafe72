"""Bodies and chunks as the client reads them, checked by the OpenAI client's own types."""

import json
import math

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.types import TokenOutput
from serve_app.errors import ApiError
from serve_app.openai.engine_params import Prompt
from serve_app.openai.responses import error_event
from serve_app.text.base_text import BaseText
from tests.answer_factory import (
    EOS,
    body_of,
    chat,
    completion,
    ids_of,
    logprobs_of,
    outputs,
    stream_of,
    strictly,
)
from tests.text_factory import base_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> BaseText:
    return base_text(tmp_path_factory.mktemp("model"))


def test_chat_body(text: BaseText) -> None:
    body = body_of(chat(text), outputs([*ids_of(text, "Paris 👩‍👩‍👧‍👦"), EOS]))
    answer = strictly(ChatCompletion, body)
    choice = answer.choices[0]
    assert (answer.id, answer.object, answer.model) == ("id-1", "chat.completion", 'base:"adapter"')
    assert choice.message.content == "Paris 👩‍👩‍👧‍👦"
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == len(ids_of(text, "Paris 👩‍👩‍👧‍👦")) + 1
    assert answer.usage.total_tokens == 2 + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_chat_stream(text: BaseText) -> None:
    fed = outputs(ids_of(text, "Paris is 日本語"), "length")
    answer = chat(text, stream=True, stream_options={"include_usage": True})
    events = stream_of(answer, fed)
    chunks = [strictly(ChatCompletionChunk, event) for event in events]
    *said, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in said) == "Paris is 日本語"
    assert [chunk.choices[0].delta.role for chunk in said] == ["assistant"] + [None] * (
        len(said) - 1
    )
    assert said[0].choices[0].delta.content  # never a role before there is content
    assert [c.choices[0].finish_reason for c in said] == [None] * (len(said) - 1) + ["length"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(fed)
    assert all(event["usage"] is None for event in events[:-1])


def test_stream_without_options_has_no_usage(text: BaseText) -> None:
    events = stream_of(chat(text, stream=True), outputs(ids_of(text, "Paris")))
    assert all("usage" not in event and event["choices"] for event in events)


def test_continuous_usage_counts_up(text: BaseText) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = chat(text, stream=True, stream_options=options)
    chunks = [
        strictly(ChatCompletionChunk, event)
        for event in stream_of(answer, outputs(ids_of(text, "Paris is"), "length"))
    ]
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)


def test_empty_answer_still_has_one_chunk_with_role_and_reason(text: BaseText) -> None:
    (event,) = stream_of(chat(text, stream=True), outputs([EOS]))
    choice = strictly(ChatCompletionChunk, event).choices[0]
    assert (choice.delta.role, choice.delta.content) == ("assistant", "")
    assert choice.finish_reason == "stop"


def test_chat_logprobs(text: BaseText) -> None:
    smile = [i for c in "ðŁĺĢ" if (i := text.tokenizer.token_id(c)) is not None]
    entries = [
        logprobs_of(smile[0], (smile[0], -0.5), (9, -1.0)),
        logprobs_of(smile[1], (9, -0.1), logprob=-math.inf),
        logprobs_of(smile[2], logprob=math.nan),
        logprobs_of(smile[3], (9, -math.inf)),
    ]
    fed = outputs(smile, "length", logprobs=entries)
    body = body_of(chat(text, logprobs=True, top_logprobs=2), fed)
    logprobs = strictly(ChatCompletion, body).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.bytes for token in logprobs.content] == [[0xF0], [0x9F], [0x98], [0x80]]
    assert [token.logprob for token in logprobs.content] == [-0.5, -9999.0, -9999.0, -0.5]
    assert [len(token.top_logprobs) for token in logprobs.content] == [2, 1, 0, 1]
    assert logprobs.content[3].top_logprobs[0].logprob == -9999.0
    events = stream_of(chat(text, logprobs=True, stream=True), fed)
    (chunk,) = [strictly(ChatCompletionChunk, event) for event in events]
    assert chunk.choices[0].delta.content == "😀"  # logprobs wait for their text
    assert chunk.choices[0].logprobs is not None
    assert len(chunk.choices[0].logprobs.content or ()) == 4


def test_completion_body_with_logprobs(text: BaseText) -> None:
    ids = ids_of(text, "fox jumps")
    entries = [logprobs_of(i, (i, -0.5), (ids[0], -0.7)) for i in ids]
    fed = outputs(ids, "length", logprobs=entries)
    answer = completion(text, [Prompt((5,), "x")], logprobs=2)
    choice = strictly(Completion, body_of(answer, fed)).choices[0]
    lists = choice.logprobs
    assert choice.text == "fox jumps"
    assert lists is not None
    assert "".join(lists.tokens or ()) == "fox jumps"
    assert lists.token_logprobs == [-0.5] * len(ids)
    starts = [choice.text.index(token) for token in lists.tokens or ()]
    assert lists.text_offset == starts


def test_echo_with_logprobs_as_lm_eval_reads_it(text: BaseText) -> None:
    prompt_ids = tuple(ids_of(text, "The lazy dog"))
    other = ids_of(text, "!")[0]
    answer = completion(text, [Prompt(prompt_ids, None)], logprobs=1, echo=True, max_tokens=1)
    likely = [None, *(logprobs_of(i, (i, -0.25), logprob=-0.25) for i in prompt_ids[1:-1])]
    likely.append(logprobs_of(prompt_ids[-1], (other, -0.1), logprob=-3.0))
    output = TokenOutput(
        "r", 0, 0, (other,), (logprobs_of(other),), tuple(likely), finish_reason="length"
    )
    # The client's types allow no null here, but OpenAI's own server sends it.
    choice = Completion.construct(None, **body_of(answer, [output])).choices[0]
    lists = choice.logprobs
    assert choice.text == "The lazy dog!"
    assert lists is not None
    assert lists.token_logprobs is not None
    assert lists.top_logprobs is not None
    assert len(lists.token_logprobs) == len(prompt_ids) + 1
    assert lists.token_logprobs[0] is None
    assert lists.top_logprobs[0] is None
    is_greedy = [
        own == max(top.values())
        for own, top in zip(lists.token_logprobs[1:-1], lists.top_logprobs[1:-1], strict=True)
    ]
    assert is_greedy == [True] * (len(prompt_ids) - 2) + [False]
    assert [len(top) for top in lists.top_logprobs[1:]] == [1] * (len(prompt_ids) - 2) + [2, 1]
    assert lists.text_offset is not None
    assert lists.text_offset[-1] == len("The lazy dog")


def test_top_logprobs_that_share_a_text_keep_the_most_likely(text: BaseText) -> None:
    first, second = (text.tokenizer.token_id(c) for c in "ðŁ")
    assert first is not None
    assert second is not None
    entry = logprobs_of(first, (second, -0.1), logprob=-2.0)
    fed = outputs([first], "length", logprobs=[entry])
    body = body_of(completion(text, [Prompt((5,), "x")], logprobs=1), fed)
    lists = strictly(Completion, body).choices[0].logprobs
    assert lists is not None
    assert lists.top_logprobs == [{"\ufffd": -0.1}]


def test_echo_alone_gives_the_prompt_back(text: BaseText) -> None:
    fed = outputs([9], "length")
    answer = completion(text, [Prompt((5, 6), "as written ")], echo=True, max_tokens=0)
    body = strictly(Completion, body_of(answer, fed))
    assert body.choices[0].text == "as written "
    assert body.usage is not None
    assert body.usage.completion_tokens == 0
    streamed = completion(text, [Prompt((5,), "as written ")], echo=True, max_tokens=0, stream=True)
    (event,) = stream_of(streamed, fed)
    assert strictly(Completion, event).choices[0].text == "as written "


def test_echo_comes_with_the_first_chunk_only(text: BaseText) -> None:
    answer = completion(text, [Prompt((5,), "once ")], echo=True, stream=True)
    events = stream_of(answer, outputs(ids_of(text, "fox jumps over"), "length"))
    reasons = [event["choices"][0].pop("finish_reason") for event in events]  # type: ignore[index]
    assert [reason for reason in reasons if reason] == ["length"]
    said = [Completion.construct(None, **event).choices[0].text for event in events]
    assert "".join(said) == "once fox jumps over"
    assert said[0].startswith("once ")


def test_error_event_is_one_that_clients_take_for_a_failure() -> None:
    data = error_event(ApiError(503, "a\nb", "server_error", None, "unavailable")).decode()
    event, done, rest = data.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    name, payload = event.split("\n")
    assert name == "event: error"
    assert json.loads(payload[len("data: ") :])["error"]["code"] == "unavailable"
