"""A process that does the text work of large requests for an ingress replica: it parses bodies,
renders chats and tokenizes, apart from the event loop and at a lower priority.

It reads jobs from its standard input and answers on its standard output, one after another
(`text_pool` is the other end); nothing is ever unpickled. The kernel limits it: a job that takes
too much processor time ends the process, and the signal says which limit it was. It keeps nothing
of a request. Ignorant of HTTP, Ray and engines.
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
from serve_app.openai.engine_params import detokenized, read_prompts, tokenized
from serve_app.openai.json_body import parse_body, parse_json
from serve_app.openai.logprobs_parts import LogprobsPart, render_part
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest
from serve_app.text.base_text import BaseText
from serve_app.text.template import Message, TemplateValue
from serve_app.text.template_guard import refuse

NICENESS = 5  # where cores are scarce, streams go first
RENDER_CPU_S = 1.0
JOB_CPU_S = 60.0  # 16 MiB of digits under a byte-level tokenizer
RENDER_BYTES = 256 * 1024**2  # beyond what the process holds
JOB_BYTES = 2 * 1024**3  # tokenizing takes 100 to 300 bytes a character
RENDER_SIGNAL, JOB_SIGNAL = signal.SIGVTALRM, signal.SIGPROF  # of the two time limits

Body = ChatRequest | CompletionRequest | TokenizeRequest | DetokenizeRequest
BODIES: Mapping[str, type[Body]] = {
    kind.__name__: kind
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
}
_decode_part = msgspec.msgpack.Decoder(LogprobsPart).decode
# Left out of what goes back: long, and needed here only.
_TEXT_FIELDS = ("prompt", "messages", "tokens", "chat_template_kwargs", "metadata")


class Job(msgspec.Struct, frozen=True):
    """Its bytes follow it: a body, for `load` the base's text files, for `logprobs` a part."""

    kind: Literal["load", "probe", "parse", "prompts", "tokenize", "detokenize", "logprobs"]
    body: str = ""  # one of BODIES
    base: str = ""  # digest of the base, whose files a `load` brought
    limits: EngineLimits | None = None


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """An exception in its parts; `kind` is its class."""

    kind: Literal["api", "invalid", "context", "unsupported"]
    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400


class Done(msgspec.Struct, frozen=True, tag="done"):
    """`ids`: of every prompt, as native unsigned 32-bit integers; `texts`: a prompt's own text
    where the answer repeats it, or the result's."""

    ids: tuple[bytes, ...] = ()
    texts: tuple[str | None, ...] = ()
    body: bytes = b""  # the short fields of a checked body, as JSON
    lists: dict[str, bytes] = {}  # of a part of the log-probabilities of an answer
    resident_bytes: int = 0  # of this process, after the job


def send(stream: BufferedIOBase, *parts: bytes) -> None:
    stream.write(b"".join(len(part).to_bytes(8, "little") for part in parts))
    for part in parts:
        stream.write(part)
    stream.flush()


def receive(stream: BufferedIOBase, num_parts: int) -> list[bytes]:
    """Raises EOFError where the other end is gone."""
    header = stream.read(8 * num_parts)
    sizes = [int.from_bytes(header[i : i + 8], "little") for i in range(0, len(header), 8)]
    parts = [stream.read(size) for size in sizes]
    if len(parts) < num_parts or any(len(p) < s for p, s in zip(parts, sizes, strict=True)):
        raise EOFError
    return parts


class _LimitedText(BaseText):
    """Renders without counting the work, under the kernel's limits."""

    def render_chat(
        self,
        messages: Sequence[Message],
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
    def __init__(self) -> None:
        self._texts: dict[str, BaseText] = {}  # by the base's digest

    def answer(self, job: Job, raw: bytes) -> Done | Failure:
        try:
            with _limited(signal.ITIMER_PROF, JOB_CPU_S, JOB_BYTES):
                return self._do(job, raw)
        except ApiError as error:
            return Failure("api", error.message, error.param, error.code, error.status)
        except ContextLengthError as error:
            return Failure("context", error.message, error.param)
        except InvalidRequestError as error:
            return Failure("invalid", error.message, error.param)
        except UnsupportedModelError as error:
            return Failure("unsupported", str(error))
        except MemoryError:
            return Failure("invalid", out_of_memory(job))

    def _do(self, job: Job, raw: bytes) -> Done:
        if job.kind == "load":
            files = msgspec.msgpack.decode(raw, type=dict[str, bytes])
            self._texts[job.base] = _LimitedText.from_files(files, is_guarded=False)
            return Done()
        if job.kind == "probe":
            self._texts[job.base].probe()
            return Done()
        if job.kind == "logprobs":
            part = _decode_part(raw)
            return Done(lists=render_part(part, self._texts[job.base].tokenizer))
        kind = BODIES[job.body]
        if job.kind == "parse":
            return Done(body=_short_fields(kind, raw))
        assert job.limits is not None
        return _WORK[job.kind](parse_body(kind, raw), self._texts[job.base], job.limits)


def out_of_memory(job: Job) -> str:
    what = "model's tokenizer or chat template" if job.kind == "load" else "text"
    return f"The {what} takes more than {JOB_BYTES >> 30} GiB of memory to read."


def _short_fields(kind: type[Body], raw: bytes) -> bytes:
    """The body has been checked whole; what goes back has a few kilobytes."""
    checked = parse_body(kind, raw)
    given = parse_json(raw)
    assert isinstance(given, dict)
    names = kind.model_fields.keys() - set(_TEXT_FIELDS)
    short = {name: given[name] for name in names if name in given}
    options = getattr(checked, "stream_options", None)
    if options is not None:
        short["stream_options"] = options.model_dump()
    return msgspec.json.encode(short)


def _prompts(body: Body, text: BaseText, limits: EngineLimits) -> Done:
    assert isinstance(body, ChatRequest | CompletionRequest)
    prompts = read_prompts(body, text, limits)
    is_echoed = isinstance(body, CompletionRequest) and bool(body.echo)
    return Done(
        tuple(array("I", prompt.token_ids).tobytes() for prompt in prompts),
        tuple(prompt.text if is_echoed else None for prompt in prompts),
    )


def _tokenize(body: Body, text: BaseText, limits: EngineLimits) -> Done:
    assert isinstance(body, TokenizeRequest)
    ids = tokenized(body, text, limits)
    names = map(text.tokenizer.token_text, ids) if body.return_token_strs else ()
    return Done((array("I", ids).tobytes(),), tuple(names))


def _detokenize(body: Body, text: BaseText, limits: EngineLimits) -> Done:
    assert isinstance(body, DetokenizeRequest)
    return Done(texts=(detokenized(body, text, limits),))


_WORK: Mapping[str, Callable[[Body, BaseText, EngineLimits], Done]] = {
    "prompts": _prompts,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
}


@contextmanager
def _limited(timer: int, seconds: float, num_bytes: int) -> Iterator[None]:
    """Of processor time, beyond which the timer's signal ends the process, and of memory beyond
    what it holds, beyond which an allocation fails."""
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
    """A size of this process, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def main() -> None:
    """Ends with the parent, which may not have had the time to say so."""
    libc = ctypes.CDLL(None)
    pr_set_pdeathsig = 1
    libc.prctl(pr_set_pdeathsig, signal.SIGKILL)
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides
    jobs = os.fdopen(0, "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # no library's print may come between two answers
    worker = Worker()
    while True:
        try:
            header, raw = receive(jobs, 2)
        except EOFError:
            return
        answer = worker.answer(msgspec.msgpack.decode(header, type=Job), raw)
        del raw
        libc.malloc_trim(0)
        if isinstance(answer, Done):
            answer = msgspec.structs.replace(answer, resident_bytes=_status("VmRSS"))
        send(answers, msgspec.msgpack.encode(answer))
