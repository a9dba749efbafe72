"""A process that does the text work of large requests for an ingress replica: it parses bodies,
renders chats and tokenizes, apart from the event loop and at a lower priority.

It reads jobs from its standard input and writes results to its standard output, one at a time
(`pool` is the other end); it never unpickles. The kernel limits it: a job that uses too much
processor time ends the process by a signal that identifies the limit. It keeps no data of a
request. This module is independent of HTTP, Ray and engines.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from typing import Any, Unpack

import msgspec

from engine.admission import EngineLimits
from engine.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError
from serve_app.dialects.messages import CountTokensRequest, MessagesRequest
from serve_app.dialects.responses import ResponsesRequest
from serve_app.errors import ApiError
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.engine_params import detokenize_request, read_prompts, tokenize_request
from serve_app.openai.json_body import check_fields, parse_fields
from serve_app.openai.logprobs import LogprobsPart, render_part
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest
from serve_app.openai.tools import Tool
from serve_app.text.adapter_text import AdapterTexts, key_of
from serve_app.text.base_text import BaseText
from serve_app.text.template import ChatMessage, ChatOptions
from serve_app.text.template_guard import refuse

NICENESS = 5  # where cores are scarce, streams go first
RENDER_CPU_S = 1.0
JOB_CPU_S = 60.0  # 16 MiB of digits under a byte-level tokenizer
RENDER_BYTES = 256 * 1024**2  # on top of the process's size before
JOB_BYTES = 2 * 1024**3  # tokenizing needs 100 to 300 bytes per character
RENDER_SIGNAL, JOB_SIGNAL = signal.SIGVTALRM, signal.SIGPROF  # of the two time limits

RequestBody = ChatRequest | CompletionRequest | TokenizeRequest | DetokenizeRequest
BODIES: Mapping[str, type[RequestBody]] = {
    kind.__name__: kind
    for kind in (
        *(ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest),
        *(ResponsesRequest, MessagesRequest, CountTokensRequest),
    )
}
logger = logging.getLogger(__name__)

# The functions that the ingress itself calls for short bodies.
TEXT_JOBS: Mapping[str, Callable[[Any, BaseText, EngineLimits], object]] = {
    function.__name__: function for function in (read_prompts, tokenize_request, detokenize_request)
}
FAILURES: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ApiError, ContextLengthError, InvalidRequestError, UnsupportedModelError)
}
_decode_part = msgspec.msgpack.Decoder(LogprobsPart).decode
# Not returned to the ingress, because they are long and only the worker needs them.
_TEXT_FIELDS = ("prompt", "messages", "documents", "tokens", "chat_template_kwargs", "metadata")


class Job(msgspec.Struct, frozen=True):
    """A job, followed by bytes: the request body, the base's text files for `load`, or the part for
    `logprobs`."""

    kind: str  # load, probe, parse, logprobs, or the name of one of TEXT_JOBS
    body: str = ""  # one of BODIES
    base: str = ""  # digest of the base, whose files an earlier `load` brought
    limits: EngineLimits | None = None
    own: Mapping[str, bytes] = {}  # files of the base's adapter; small, so they come with each job

    @property
    def subject(self) -> str:
        """The data that the job reads, for error messages."""
        return "The model's tokenizer or chat template" if self.kind == "load" else "The text"


class JobFailure(msgspec.Struct, frozen=True, tag="failure"):
    """An exception as data."""

    kind: str  # one of FAILURES, or RuntimeError
    args: tuple[str | int | bool | None, ...]


class JobResult(msgspec.Struct, frozen=True, tag="done"):
    value: msgspec.Raw  # the job's result, as msgpack
    resident_bytes: int  # of this process, after the job


def send(stream: BufferedIOBase, *parts: bytes) -> None:
    stream.write(b"".join(len(part).to_bytes(8, "little") for part in parts))
    for part in parts:
        stream.write(part)
    stream.flush()


def receive(stream: BufferedIOBase, num_parts: int) -> list[bytes]:
    """Returns `num_parts` parts of one `send`. Raises EOFError if the other end is gone."""
    header = stream.read(8 * num_parts)
    sizes = [int.from_bytes(header[i : i + 8], "little") for i in range(0, len(header), 8)]
    parts = [stream.read(size) for size in sizes]
    if len(parts) < num_parts or any(len(p) < s for p, s in zip(parts, sizes, strict=True)):
        raise EOFError
    return parts


class _LimitedText(BaseText):
    """A BaseText that renders under the kernel's limits, without counting the work."""

    def render_chat(self, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> str:
        try:
            with _limited(signal.ITIMER_VIRTUAL, RENDER_CPU_S, RENDER_BYTES):
                return super().render_chat(messages, **options)
        except MemoryError:
            refuse(f"it needs more than {RENDER_BYTES >> 20} MiB of memory")


class Worker:
    """Runs jobs and holds the text sides of the bases that they need."""

    def __init__(self) -> None:
        self._texts: dict[str, BaseText] = {}  # by the base's digest
        self._adapter_texts = AdapterTexts(max_tokenizers=1, is_guarded=False)

    def run(self, job: Job, raw: bytes) -> object:
        """Returns the job's value, or a JobFailure."""
        try:
            with _limited(signal.ITIMER_PROF, JOB_CPU_S, JOB_BYTES):
                return self._run(job, raw)
        except tuple(FAILURES.values()) as error:
            kinds = (kind.__name__ for kind in type(error).__mro__)
            return JobFailure(next(kind for kind in kinds if kind in FAILURES), error.args)
        except MemoryError:
            return JobFailure("InvalidRequestError", (out_of_memory(job),))
        except Exception:  # a fault of this program: the worker and its texts stay
            logger.exception("a text job of the kind %s failed", job.kind)
            return JobFailure("RuntimeError", ("A text worker failed; its log has the reason.",))

    def _run(self, job: Job, raw: bytes) -> object:
        if job.kind == "load":
            files = msgspec.msgpack.decode(raw, type=dict[str, bytes])
            self._texts[job.base] = _LimitedText.from_files(files, is_guarded=False)
            return None
        if job.kind == "probe":
            self._texts[job.base].probe()
            return None
        if job.kind == "logprobs":
            return render_part(_decode_part(raw), self._text(job).tokenizer)
        fields = parse_fields(BODIES[job.body], raw)
        body = check_fields(BODIES[job.body], fields)
        if job.kind == "parse":
            return _short_fields(body, fields)
        assert job.limits is not None
        return TEXT_JOBS[job.kind](body, self._text(job), job.limits)

    def _text(self, job: Job) -> BaseText:
        base = self._texts[job.base]
        return self._adapter_texts.open(key_of(job.base, job.own), base) if job.own else base


def out_of_memory(job: Job) -> str:
    return f"{job.subject} needs more than {JOB_BYTES >> 30} GiB of memory to be read."


def _short_fields(checked: RequestBody, given: Mapping[str, object]) -> bytes:
    """Returns the short fields of a checked body as JSON, a few kilobytes."""
    names = type(checked).model_fields.keys() - set(_TEXT_FIELDS)
    short = {name: given[name] for name in names if name in given}
    if isinstance(checked, ChatRequest) and not isinstance(checked, ResponsesRequest):
        short["tools"] = [_without_description(tool) for tool in checked.tools]
    options = getattr(checked, "stream_options", None)
    if options is not None:
        short["stream_options"] = options.model_dump()
    return msgspec.json.encode(short)


def _without_description(tool: Tool) -> Tool:
    """Returns a tool as the ingress needs it: to read calls and, only for /v1/responses, to repeat
    the tool in the response."""
    function = {key: value for key, value in tool["function"].items() if key != "description"}
    return {**tool, "function": function}


@contextmanager
def _limited(timer: int, seconds: float, num_bytes: int) -> Iterator[None]:
    """Limits processor time, beyond which the timer's signal ends the process, and the memory added
    to its present size, beyond which an allocation fails."""
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _status("VmData") + num_bytes
    if before != resource.RLIM_INFINITY:
        limit = min(limit, before)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _status(name: str) -> int:
    """Returns a size of this process, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def main() -> None:
    """Runs jobs until the parent closes the pipe; the kernel kills the process if the parent dies
    without closing it."""
    libc = ctypes.CDLL(None)
    pr_set_pdeathsig = 1
    libc.prctl(pr_set_pdeathsig, signal.SIGKILL)
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the parent decides
    jobs = os.fdopen(0, "rb")
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's print must not come between two results
    worker = Worker()
    while True:
        try:
            header, raw = receive(jobs, 2)
        except EOFError:
            return
        value = worker.run(msgspec.msgpack.decode(header, type=Job), raw)
        del raw
        libc.malloc_trim(0)
        if not isinstance(value, JobFailure):
            encoded = msgspec.Raw(msgspec.msgpack.encode(value))
            value = JobResult(encoded, _status("VmRSS"))
        send(results, msgspec.msgpack.encode(value))
