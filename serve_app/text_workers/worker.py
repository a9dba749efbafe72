"""A process that does the text work of large requests for an ingress replica: it parses bodies,
renders chats and tokenizes, apart from the event loop and at a lower priority.

It reads jobs from its standard input and writes results to its standard output, one at a time
(`pool` is the other end); it never unpickles. The kernel limits it: a job that uses too much
processor time ends the process by a signal that identifies the limit. It keeps no data of a
request. This module is independent of HTTP, Ray and engines.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from typing import Literal

import msgspec

from engine.admission import EngineLimits
from engine.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError
from serve_app.errors import ApiError
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.engine_params import detokenize_request, read_prompts, tokenize_request
from serve_app.openai.json_body import parse_body, parse_json
from serve_app.openai.logprobs import LogprobsPart, render_part
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest
from serve_app.text.base_text import BaseText
from serve_app.text.template import ChatMessage, TemplateValue
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
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
}
_decode_part = msgspec.msgpack.Decoder(LogprobsPart).decode
# Not returned to the ingress, because they are long and only the worker needs them.
_TEXT_FIELDS = ("prompt", "messages", "tokens", "chat_template_kwargs", "metadata")


class Job(msgspec.Struct, frozen=True):
    """A job, followed by bytes: the request body, the base's text files for `load`, or the part for
    `logprobs`."""

    kind: Literal["load", "probe", "parse", "prompts", "tokenize", "detokenize", "logprobs"]
    body: str = ""  # one of BODIES
    base: str = ""  # digest of the base, whose files an earlier `load` brought
    limits: EngineLimits | None = None

    @property
    def subject(self) -> str:
        """The data that the job reads, for error messages."""
        return "The model's tokenizer or chat template" if self.kind == "load" else "The text"


class JobFailure(msgspec.Struct, frozen=True, tag="failure"):
    """An exception as data; `kind` stands for its class."""

    kind: Literal["api", "invalid", "context", "unsupported"]
    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400


class JobResult(msgspec.Struct, frozen=True, tag="done"):
    """The result of a job; the fields that its kind does not set stay empty."""

    ids: tuple[bytes, ...] = ()  # token ids of each prompt, as native unsigned 32-bit integers
    texts: tuple[str | None, ...] = ()  # echoed prompts, texts of tokens, or the detokenized text
    body: bytes = b""  # the short fields of a checked body, as JSON
    lists: dict[str, bytes] = {}  # a rendered part of log-probabilities
    resident_bytes: int = 0  # of this process, after the job


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

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, TemplateValue] | None = None,
    ) -> str:
        try:
            with _limited(signal.ITIMER_VIRTUAL, RENDER_CPU_S, RENDER_BYTES):
                return super().render_chat(
                    messages,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    variables=variables,
                )
        except MemoryError:
            refuse(f"it needs more than {RENDER_BYTES >> 20} MiB of memory")


class Worker:
    """Runs jobs and holds the text sides of the bases that they need."""

    def __init__(self) -> None:
        self._texts: dict[str, BaseText] = {}  # by the base's digest

    def run(self, job: Job, raw: bytes) -> JobResult | JobFailure:
        try:
            with _limited(signal.ITIMER_PROF, JOB_CPU_S, JOB_BYTES):
                return self._run(job, raw)
        except ApiError as error:
            return JobFailure("api", error.message, error.param, error.code, error.status)
        except ContextLengthError as error:
            return JobFailure("context", error.message, error.param)
        except InvalidRequestError as error:
            return JobFailure("invalid", error.message, error.param)
        except UnsupportedModelError as error:
            return JobFailure("unsupported", str(error))
        except MemoryError:
            return JobFailure("invalid", out_of_memory(job))

    def _run(self, job: Job, raw: bytes) -> JobResult:
        if job.kind == "load":
            files = msgspec.msgpack.decode(raw, type=dict[str, bytes])
            self._texts[job.base] = _LimitedText.from_files(files, is_guarded=False)
            return JobResult()
        if job.kind == "probe":
            self._texts[job.base].probe()
            return JobResult()
        if job.kind == "logprobs":
            part = _decode_part(raw)
            return JobResult(lists=render_part(part, self._texts[job.base].tokenizer))
        kind = BODIES[job.body]
        if job.kind == "parse":
            return JobResult(body=_short_fields(kind, raw))
        assert job.limits is not None
        return _TEXT_JOBS[job.kind](parse_body(kind, raw), self._texts[job.base], job.limits)


def out_of_memory(job: Job) -> str:
    return f"{job.subject} needs more than {JOB_BYTES >> 30} GiB of memory to be read."


def _short_fields(kind: type[RequestBody], raw: bytes) -> bytes:
    """Checks the whole body and returns its short fields as JSON, a few kilobytes."""
    checked = parse_body(kind, raw)
    given = parse_json(raw)
    assert isinstance(given, dict)
    names = kind.model_fields.keys() - set(_TEXT_FIELDS)
    short = {name: given[name] for name in names if name in given}
    options = getattr(checked, "stream_options", None)
    if options is not None:
        short["stream_options"] = options.model_dump()
    return msgspec.json.encode(short)


def _prompts(body: RequestBody, text: BaseText, limits: EngineLimits) -> JobResult:
    assert isinstance(body, ChatRequest | CompletionRequest)
    prompts = read_prompts(body, text, limits)
    is_echoed = isinstance(body, CompletionRequest) and bool(body.echo)
    return JobResult(
        tuple(array("I", prompt.token_ids).tobytes() for prompt in prompts),
        tuple(prompt.text if is_echoed else None for prompt in prompts),
    )


def _tokenize(body: RequestBody, text: BaseText, limits: EngineLimits) -> JobResult:
    assert isinstance(body, TokenizeRequest)
    ids = tokenize_request(body, text, limits)
    names = map(text.tokenizer.token_text, ids) if body.return_token_strs else ()
    return JobResult((array("I", ids).tobytes(),), tuple(names))


def _detokenize(body: RequestBody, text: BaseText, limits: EngineLimits) -> JobResult:
    assert isinstance(body, DetokenizeRequest)
    return JobResult(texts=(detokenize_request(body, text, limits),))


_TEXT_JOBS: Mapping[str, Callable[[RequestBody, BaseText, EngineLimits], JobResult]] = {
    "prompts": _prompts,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
}


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
        result = worker.run(msgspec.msgpack.decode(header, type=Job), raw)
        del raw
        libc.malloc_trim(0)
        if isinstance(result, JobResult):
            result = msgspec.structs.replace(result, resident_bytes=_status("VmRSS"))
        send(results, msgspec.msgpack.encode(result))
