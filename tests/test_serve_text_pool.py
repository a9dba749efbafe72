"""Long bodies and costly templates in worker processes, which the kernel limits."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from io import BufferedIOBase
from typing import Any, TypeVar, cast

import psutil
import pytest

from engine.admission import EngineLimits
from engine.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError
from engine.types import TokenLogprobs, TokenOutput
from serve_app.dialects.responses import ResponsesRequest
from serve_app.dispatch.completion import Completion
from serve_app.dispatch.generation import Generation
from serve_app.errors import ApiError, OverloadedError, ServiceUnavailableError
from serve_app.messages import BaseDescription
from serve_app.openai.answer import ResponseBuilder
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.engine_params import (
    Prompt,
    detokenize_request,
    read_prompts,
    tokenize_request,
)
from serve_app.openai.json_body import parse_body
from serve_app.openai.logprobs import PART_ENTRIES, Lists, LogprobsPart, Render, render_part
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest
from serve_app.text.base_text import TEXT_FILES, BaseText
from serve_app.text_workers import pool as text_pool
from serve_app.text_workers import worker as text_worker
from serve_app.text_workers.pool import TextPool
from serve_app.text_workers.worker import RequestBody
from tests import answer_factory
from tests.text_factory import LLAMA3, write_folder
from tests.waiting import until

R = TypeVar("R")
LIMITS = EngineLimits(max_model_len=4096, vocab_size=1000, max_kv_tokens=4096)
BASE = "digest"
HOT = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
WIDE = "{{ messages[0].content.center(999999999) }}"


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def chat(content: str) -> bytes:
    return body(messages=[{"role": "user", "content": content}])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_folder(tmp_path_factory.mktemp("model"), LLAMA3)
    return {n: (folder / n).read_bytes() for n in TEXT_FILES if (folder / n).is_file()}


@pytest.fixture(autouse=True)
def _no_body_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pool, "INLINE_BODY_BYTES", -1)


async def run(
    pool: TextPool,
    function: Callable[[Any, BaseText, EngineLimits], R],
    kind: type[RequestBody],
    raw: bytes,
    files: dict[str, bytes],
    base: str = BASE,
    limits: EngineLimits = LIMITS,
) -> R:
    description = BaseDescription(files, limits, base)
    body = await pool.parse(kind, raw)
    return await pool.run(function, body, raw, BaseText.from_files(files), description)


def sent_jobs(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns a list that gets each job from now on, once its worker's pipe has it."""
    sent: list[bytes] = []

    def send(stream: BufferedIOBase, *frames: bytes) -> None:
        text_worker.send(stream, *frames)
        sent.append(frames[0])

    monkeypatch.setattr(text_pool, "send", send)
    return sent


@pytest.fixture(scope="module")
def pool() -> Iterator[TextPool]:
    pool = TextPool(2)
    yield pool
    pool.close()


async def test_a_worker_reads_what_the_event_loop_reads(
    pool: TextPool, files: dict[str, bytes]
) -> None:
    text = BaseText.from_files(files)
    raw = chat("naïve <|im_start|> 日本語 " * 40)
    parsed = await pool.parse(ChatRequest, raw)
    assert (parsed.model, parsed.messages[0]["content"]) == ("m", "")
    ours = read_prompts(parse_body(ChatRequest, raw), text, LIMITS)
    assert await run(pool, read_prompts, ChatRequest, raw, files) == ours
    for echo in (False, True):
        raw = body(prompt=["one", "two <s> ", "x" * 99], echo=echo, stream_options=None)
        ours = read_prompts(parse_body(CompletionRequest, raw), text, LIMITS)
        assert await run(pool, read_prompts, CompletionRequest, raw, files) == ours
        assert [one.text is not None for one in ours] == 3 * [echo]
    raw = body(prompt="hello", return_token_strs=True)
    ids, texts = await run(pool, tokenize_request, TokenizeRequest, raw, files)
    assert list(ids) == text.encode("hello")
    assert "".join(map(str, texts)) == "<s>hello"
    raw = body(tokens=ids)
    assert await run(pool, detokenize_request, DetokenizeRequest, raw, files) == "<s>hello"


async def test_short_fields_come_back_and_long_ones_do_not(pool: TextPool) -> None:
    long = "x" * 100_000
    raw = body(
        prompt=long,
        temperature=0.5,
        stop=["a"],
        logit_bias={"7": 1},
        stream=True,
        stream_options={"include_usage": True, "other": long},
        metadata={"k": long},
        unknown=long,
    )
    parsed = await pool.parse(CompletionRequest, raw)
    assert len(repr(parsed)) < 4000
    assert (parsed.temperature, parsed.stop, parsed.logit_bias) == (0.5, ("a",), ((7, 1.0),))
    assert parsed.stream_options is not None
    assert parsed.stream_options.include_usage is True


async def test_documents_and_the_descriptions_of_tools_stay_in_the_worker(
    pool: TextPool, files: dict[str, bytes]
) -> None:
    long = "x" * 10_000
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "description": long, "parameters": parameters, "strict": False}
    raw = body(
        messages=[{"role": "user", "content": "hi"}],
        documents=[{"text": long}],
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    parsed = await pool.parse(ChatRequest, raw)
    assert len(repr(parsed)) < 4000
    assert parsed.tool_choice.names == ("weather",)
    del function["description"]
    assert parsed.template_tools == ({"type": "function", "function": function},)
    assert parsed.documents == ()

    tool = {"type": "function", "name": "weather", "description": long, "parameters": parameters}
    repeated = await pool.parse(ResponsesRequest, body(input="hi", tools=[tool]))
    assert repeated.tools[0]["function"]["description"] == long


async def test_a_refusal_of_a_worker_is_the_event_loops(
    pool: TextPool, files: dict[str, bytes]
) -> None:
    with pytest.raises(ApiError, match="temperature") as caught:
        await pool.parse(CompletionRequest, body(prompt="a", temperature=9))
    assert (caught.value.status, caught.value.param) == (400, "temperature")
    far_too_long = body(prompt="word " * 100_000)
    with pytest.raises(ContextLengthError, match="4096 tokens") as context:
        await run(pool, read_prompts, CompletionRequest, far_too_long, files)
    assert context.value.param == "prompt"
    many = body(tokens=[1] * 5000)
    with pytest.raises(ContextLengthError, match=r"at most 4096.*got 5000"):
        await run(pool, detokenize_request, DetokenizeRequest, many, files)
    with pytest.raises(ContextLengthError, match="4096 tokens"):
        await run(pool, tokenize_request, TokenizeRequest, far_too_long, files)


async def test_a_chat_template_is_stopped_and_the_next_chat_is_answered(
    pool: TextPool, files: dict[str, bytes]
) -> None:
    for base, source, words in (("hot", HOT, "more than 1 s"), ("wide", WIDE, "256 MiB")):
        hostile = files | {"chat_template.jinja": source.encode()}
        with pytest.raises(InvalidRequestError, match=f"chat template.*{words}"):
            await run(pool, read_prompts, ChatRequest, chat("hi"), hostile, base)
    hot = files | {"chat_template.jinja": HOT.encode()}
    with pytest.raises(UnsupportedModelError, match=r"chat template.*more than 1 s"):
        await pool.probe(BaseDescription(hot, LIMITS, "hot"))
    dear = files | {"chat_template.jinja": b"{{ messages[0].content.center(9) }}"}
    await pool.probe(BaseDescription(dear, LIMITS, "dear"))
    prompts = await run(pool, read_prompts, ChatRequest, chat("hi"), dear, "dear")
    text = BaseText.from_files(files)
    assert list(prompts[0].token_ids) == text.encode("hi".center(9), add_special_tokens=False)


async def test_a_chat_template_that_crashes_a_worker_is_the_requests_error(
    pool: TextPool, files: dict[str, bytes]
) -> None:
    deep = "{% set ns.x = " + "(" * 40 + "ns.x" + ",)" * 40 + " %}"
    source = "{% set ns = namespace(x=1) %}{% for i in range(20000) %}" + deep + "{% endfor %}"
    crashing = files | {"chat_template.jinja": f"{source}{{{{ {{ns.x: 1}} }}}}".encode()}
    with pytest.raises(InvalidRequestError, match="crashes the process"):
        await run(pool, read_prompts, ChatRequest, chat("hi"), crashing, "crashing")
    assert await run(pool, read_prompts, ChatRequest, chat("hi"), files)


async def test_a_worker_that_is_killed_while_idle_costs_no_request(
    pool: TextPool, files: dict[str, bytes]
) -> None:
    await run(pool, read_prompts, CompletionRequest, body(prompt="a"), files)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)
    assert await run(pool, read_prompts, CompletionRequest, body(prompt="a"), files)


async def test_a_worker_that_is_killed_at_a_job_is_a_503(
    pool: TextPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.parse(CompletionRequest, body(prompt="a"))
    for pid in (pids := pool.pids):
        os.kill(pid, signal.SIGSTOP)
    sent = sent_jobs(monkeypatch)
    async with _running(pool.parse(CompletionRequest, body(prompt="a"))) as parsing:
        await until(lambda: bool(sent))  # a kill before would hit an idle worker, which is no error
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(ServiceUnavailableError):
        parsing.result()


async def test_a_worker_that_cannot_be_started_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TextPool(2)
    monkeypatch.setattr(text_pool.sys, "executable", "/no/such/program")
    try:
        with pytest.raises(ServiceUnavailableError):
            await pool.parse(CompletionRequest, body(prompt="a"))
    finally:
        pool.close()


# Responses with many log-probabilities

TOKENS = tuple(range(10, 410))


class Arrived:
    """A generation whose outputs have all arrived."""

    def __init__(self, outputs: list[TokenOutput]) -> None:
        self._outputs = outputs
        self.request_ids = tuple({output.request_id for output in outputs})
        self.engine_load = None

    async def read(self) -> list[TokenOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs


def large_answer(
    text: BaseText, *, is_chat: bool, stream: bool
) -> tuple[ResponseBuilder, TokenOutput]:
    """400 tokens in prompt and output with 20 alternatives each: 8,400 entries in every list."""
    top = tuple((one, -1.5 - one / 7) for one in range(20, 40))
    numbers = tuple(TokenLogprobs(one, -0.5, 3, top) for one in TOKENS)
    prompts = [Prompt(TOKENS, None)]
    if is_chat:
        fields = {"logprobs": True, "top_logprobs": 20}
        answer = answer_factory.chat(text, stream=stream, **fields)
    else:
        fields = {"logprobs": 20, "echo": True}
        if not stream:
            fields["prompt_logprobs"] = 20
        answer = answer_factory.completion(text, prompts, stream=stream, max_tokens=400, **fields)
    asked: tuple[TokenLogprobs | None, ...] = () if is_chat else (None, *numbers[1:])
    return answer, TokenOutput("r", 0, 0, TOKENS, numbers, asked, "length")


async def answered(text: BaseText, render: Render | None, *, is_chat: bool, stream: bool) -> bytes:
    answer, output = large_answer(text, is_chat=is_chat, stream=stream)
    generation = cast("Generation", Arrived([output]))
    completion = Completion(generation, answer, render=render)
    return await (completion.read() if stream else completion.whole())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_worker_renders_log_probabilities_as_the_event_loop_does(
    pool: TextPool, files: dict[str, bytes], is_chat: bool, stream: bool
) -> None:
    text = BaseText.from_files(files)
    num_parts = 0

    async def render(part: LogprobsPart) -> Lists:
        nonlocal num_parts
        num_parts += 1
        return await pool.logprobs(part, BaseDescription(files, LIMITS, BASE))

    ours = await answered(text, None, is_chat=is_chat, stream=stream)
    assert await answered(text, render, is_chat=is_chat, stream=stream) == ours
    assert num_parts >= 2  # of 4,096 entries each; the first is rendered inline


@pytest.mark.parametrize(
    "failure",
    [
        ServiceUnavailableError("no worker", 1),
        InvalidRequestError("it takes too much memory"),
        UnsupportedModelError("tokenizer.json: it takes too much memory"),
    ],
)
async def test_an_answer_that_is_there_is_not_lost_with_the_workers(
    files: dict[str, bytes], failure: Exception
) -> None:
    async def broken(part: LogprobsPart) -> Lists:
        raise failure

    text = BaseText.from_files(files)
    ours = await answered(text, None, is_chat=False, stream=True)
    assert await answered(text, broken, is_chat=False, stream=True) == ours


async def test_no_large_answer_takes_more_than_a_part_of_the_event_loop_at_a_time(
    files: dict[str, bytes],
) -> None:
    text = BaseText.from_files(files)
    sizes: list[int] = []

    async def render(part: LogprobsPart) -> Lists:
        sizes.append(part.num_entries)
        return render_part(part, text.tokenizer)

    for stream in (False, True):
        sizes.clear()
        await answered(text, render, is_chat=False, stream=stream)
        # A stream lists echo and output; a whole response also repeats the prompt.
        assert sum(sizes) >= 8_400 * (2 if stream else 3) - 2 * PART_ENTRIES
        assert max(sizes) <= PART_ENTRIES


async def test_an_answer_that_is_there_is_not_refused_for_bodies_that_wait(
    pool: TextPool, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pool, "_MAX_WAITING_BYTES", 0)
    part = LogprobsPart("chat", 0, ((7, TokenLogprobs(7, -0.5, 1, ()), 0),))
    text = BaseText.from_files(files)
    assert await pool.logprobs(part, BaseDescription(files, LIMITS, BASE)) == render_part(
        part, text.tokenizer
    )


# Bodies that wait


async def test_bodies_that_wait_for_a_worker_are_bounded(
    pool: TextPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pool, "_MAX_WAITING_BYTES", 100)
    with pytest.raises(OverloadedError):
        await pool.parse(CompletionRequest, body(prompt="a" * 100))


async def test_a_cancelled_job_frees_its_body_and_one_that_runs_counts_until_its_end(
    pool: TextPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bytes(bytes):
        """A body whose deallocation can be observed."""

        def __del__(self) -> None:
            freed.append(len(self))

    freed: list[int] = []
    monkeypatch.setattr(text_pool, "_MAX_WAITING_BYTES", 4000)
    await pool.parse(CompletionRequest, body(prompt="a"))
    for pid in (pids := pool.pids):
        os.kill(pid, signal.SIGSTOP)  # the job that runs lasts until SIGCONT
    sent = sent_jobs(monkeypatch)
    try:
        running = asyncio.ensure_future(
            pool.parse(CompletionRequest, Bytes(body(prompt="a" * 999)))
        )
        await until(lambda: bool(sent))
        for _ in range(20):
            queued = asyncio.ensure_future(
                pool.parse(CompletionRequest, Bytes(body(prompt="a" * 1999)))
            )
            await asyncio.sleep(0)
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued
            del queued
        assert len(freed) >= 19  # the frames of the last cancellation may still exist
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(OverloadedError):
            await pool.parse(CompletionRequest, body(prompt="a" * 3500))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    await pool.parse(CompletionRequest, body(prompt="a"))  # queued behind the running job
    await pool.parse(CompletionRequest, body(prompt="a" * 3500))


async def test_the_worker_of_bodies_above_a_megabyte_delays_no_other(
    pool: TextPool, files: dict[str, bytes]
) -> None:
    limits = EngineLimits(max_model_len=2**22, vocab_size=1000, max_kv_tokens=4096)
    await pool.parse(CompletionRequest, body(prompt="a b " * 500_000))
    pid = pool._workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    async with _running(
        run(
            pool,
            read_prompts,
            CompletionRequest,
            body(prompt="a b " * 500_000),
            files,
            limits=limits,
        )
    ) as large:
        try:
            small = run(pool, read_prompts, CompletionRequest, body(prompt="a b"), files)
            await asyncio.wait_for(small, 120)
            assert not large.done()
        finally:
            os.kill(pid, signal.SIGCONT)


async def test_a_worker_that_has_grown_is_replaced(
    pool: TextPool, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.parse(CompletionRequest, body(prompt="a"))
    before = pool.pids
    monkeypatch.setattr(text_pool, "_MAX_RESIDENT_BYTES", 1)
    await pool.parse(CompletionRequest, body(prompt="a"))
    monkeypatch.undo()
    assert len(pool.pids) < len(before)
    assert not any(psutil.pid_exists(pid) for pid in set(before) - set(pool.pids))


async def test_a_base_whose_tokenizer_makes_a_worker_grow_is_served(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pool, "_MAX_RESIDENT_BYTES", 1)
    pool = TextPool(2)
    try:
        for _ in range(2):
            assert await run(pool, read_prompts, CompletionRequest, body(prompt="a"), files)
            assert not pool.pids  # replaced after the job
    finally:
        pool.close()


@asynccontextmanager
async def _running(work: object) -> AsyncIterator["asyncio.Task[object]"]:
    task: asyncio.Task[object] = asyncio.ensure_future(work)  # type: ignore[arg-type]
    try:
        yield task
    finally:
        await asyncio.wait([task])
