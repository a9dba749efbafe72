"""The worker processes of an ingress replica for large bodies: jobs out, results back.

Parsing and tokenizing a body of 16 MiB costs seconds of processor time and more than a gigabyte;
`tokenizers` holds the interpreter's lock for 1.3 s per megabyte. That work runs in processes of
lower priority that the kernel limits, and that are replaced when they die or have grown. Their
queues are bounded in bytes, and bodies above one megabyte have a separate worker, so that they do
not delay smaller bodies. This module is independent of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.admission import EngineLimits
from engine.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError
from serve_app.errors import ApiError, OverloadedError, ServiceUnavailableError
from serve_app.openai.engine_params import Prompt
from serve_app.openai.json_body import parse_body
from serve_app.openai.logprobs import Lists, LogprobsPart
from serve_app.text.base_text import BaseText
from serve_app.text.template_guard import TemplateBudgetError
from serve_app.text_workers.worker import (
    JOB_CPU_S,
    JOB_SIGNAL,
    RENDER_CPU_S,
    RENDER_SIGNAL,
    Job,
    JobFailure,
    JobResult,
    RequestBody,
    out_of_memory,
    receive,
    send,
)

logger = logging.getLogger(__name__)

_LARGE_BYTES = 1024**2  # all larger bodies share one worker
_MAX_WAITING_BYTES = 256 * 1024**2
_MAX_RESIDENT_BYTES = 512 * 1024**2  # a worker above it after a job is replaced
_MAX_BASES = 4  # whose tokenizers a worker holds
_ROOT = str(Path(__file__).resolve().parents[2])
_COMMAND = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); "
    "from serve_app.text_workers.worker import main; main()"
)

# Replace the texts, which only the workers parse.
_PLACEHOLDERS: Mapping[str, object] = {
    "ChatRequest": {"messages": [{"role": "user", "content": ""}]},
    "CompletionRequest": {"prompt": ""},
    "TokenizeRequest": {"prompt": ""},
    "DetokenizeRequest": {"tokens": []},
}
_decode = msgspec.msgpack.Decoder(JobResult | JobFailure).decode

B = TypeVar("B", bound=RequestBody)
Files = Mapping[str, bytes]


class TextPool:
    """The text workers of an ingress replica."""

    def __init__(self, num_workers: int) -> None:
        """There are at least two workers, the first for bodies above one megabyte; each process
        starts with its first job."""
        self._workers = tuple(_WorkerProcess() for _ in range(max(2, num_workers)))
        self._lock = threading.Lock()  # a job's end is counted on its worker's thread
        self._waiting_bytes = 0

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    async def parse(self, kind: type[B], raw: bytes) -> B:
        """Returns a checked body with placeholders in place of its texts."""
        result = await self._run(Job("parse", kind.__name__), raw)
        short_fields = msgspec.json.decode(result.body, type=dict[str, object])
        placeholders = _PLACEHOLDERS[kind.__name__]
        assert isinstance(placeholders, dict)
        return parse_body(kind, msgspec.json.encode(short_fields | placeholders))

    async def prompts(
        self, kind: type[RequestBody], raw: bytes, base: str, files: Files, limits: EngineLimits
    ) -> tuple[Prompt, ...]:
        """Returns the same as `read_prompts`, but keeps a prompt's text only if the response echoes
        it. `base` is the digest of the base, `files` are its text files."""
        result = await self._run(Job("prompts", kind.__name__, base, limits), raw, files)
        return tuple(
            Prompt(_ids(ids), text) for ids, text in zip(result.ids, result.texts, strict=True)
        )

    async def tokenize(
        self, kind: type[RequestBody], raw: bytes, base: str, files: Files, limits: EngineLimits
    ) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
        """Returns token ids, and their texts if the body requests them."""
        result = await self._run(Job("tokenize", kind.__name__, base, limits), raw, files)
        return _ids(result.ids[0]), result.texts

    async def detokenize(
        self, kind: type[RequestBody], raw: bytes, base: str, files: Files, limits: EngineLimits
    ) -> str:
        result = await self._run(Job("detokenize", kind.__name__, base, limits), raw, files)
        return result.texts[0] or ""

    async def logprobs(self, part: LogprobsPart, base: str, files: Files) -> Lists:
        """Renders a part. Never refused for a full queue: the tokens are generated already."""
        raw = msgspec.msgpack.encode(part)
        return (await self._run(Job("logprobs", "", base), raw, files)).lists

    async def probe(self, base: str, files: Files) -> None:
        """Raises UnsupportedModelError if the shortest chat exceeds a worker's limits."""
        try:
            await self._run(Job("probe", "", base), b"", files)
        except InvalidRequestError as error:
            raise UnsupportedModelError(error.message) from None

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    async def _run(self, job: Job, raw: bytes, files: Files | None = None) -> JobResult:
        """Runs a job in the least busy worker. The body is counted while the pool holds it: until
        the job ends, even if the caller was cancelled, or until a job in the queue is cancelled."""
        size, body = len(raw), [raw]
        workers = self._workers[:1] if size > _LARGE_BYTES else self._workers[1:]
        worker = min(workers, key=lambda worker: worker.num_jobs)
        with self._lock:
            has_capacity = self._waiting_bytes + size <= _MAX_WAITING_BYTES
            if not has_capacity and job.kind != "logprobs":
                raise OverloadedError("Too many long requests wait to be tokenized.", 5)
            self._waiting_bytes += size
            worker.num_jobs += 1

        def release(_: object = None) -> None:
            body.clear()  # the executor's queue keeps a cancelled job until its turn
            with self._lock:
                self._waiting_bytes -= size
                worker.num_jobs -= 1

        try:
            future = worker.executor.submit(worker.run, job, body, files)
        except BaseException:  # the pool is closed
            release()
            raise
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)


async def open_text(files: Files, base: str, texts: TextPool | None) -> BaseText:
    """Returns the text side of a base after rendering one short chat: inline, or in a worker if the
    template exceeds the event loop's budget. Raises UnsupportedModelError."""
    text = await asyncio.to_thread(BaseText.from_files, files)
    try:
        await asyncio.to_thread(text.probe)
    except TemplateBudgetError as error:
        if texts is None:
            raise UnsupportedModelError(str(error)) from None
        await texts.probe(base, files)
    return text


class _WorkerProcess:
    """One worker process and the thread that waits for it."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="text-worker")
        self.num_jobs = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._bases: set[str] = set()  # digests of the bases whose tokenizers it holds

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def run(self, job: Job, body: list[bytes], files: Files | None) -> JobResult:
        """Runs a job and blocks until its end. Pops the body, the only item of the list. Raises the
        error that the worker returned, or that its death stands for."""
        raw = body.pop()
        if self._process is not None and self._process.poll() is not None:
            # No request is to blame: the kernel was out of memory, or an operator killed it.
            status = self._end()
            logger.warning("an idle text worker ended with status %d; starting another", status)
        if job.base and job.base not in self._bases:
            if len(self._bases) >= _MAX_BASES:
                self._end()
            self._exchange(Job("load", "", job.base), msgspec.msgpack.encode(files))
            self._bases.add(job.base)
        return self._exchange(job, raw)

    def close(self) -> None:
        """Ends the worker; the request in it fails."""
        process = self._process
        if process is not None:
            process.kill()
        self.executor.shutdown(cancel_futures=True)
        self._end()

    def _exchange(self, job: Job, raw: bytes) -> JobResult:
        try:
            process = self._process or self._start()
        except OSError as error:
            logger.warning("a text worker cannot be started: %s", error)
            raise ServiceUnavailableError(
                "Long requests cannot be tokenized at the moment.", 5
            ) from None
        assert isinstance(process.stdin, BufferedIOBase)
        assert isinstance(process.stdout, BufferedIOBase)
        try:
            send(process.stdin, msgspec.msgpack.encode(job), raw)
            result: JobResult | JobFailure = _decode(receive(process.stdout, 1)[0])
        except (OSError, EOFError, ValueError):
            raise _error_of_exit(self._end(), job) from None
        if isinstance(result, JobFailure):
            raise _error_of(result)
        # After a load the size is not checked: the job that follows needs the loaded tokenizer.
        if job.kind != "load" and result.resident_bytes > _MAX_RESIDENT_BYTES:
            self._end()
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", _COMMAND]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        return self._process

    def _end(self) -> int:
        """Ends the worker and returns its exit status; the next job starts another one."""
        process, self._process = self._process, None
        self._bases.clear()
        if process is None:
            return 0
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # the worker cannot read the buffered bytes any more
                    stream.close()
        status = process.poll()
        if status is None:
            process.kill()
            status = process.wait()
        return status


def _ids(data: bytes) -> tuple[int, ...]:
    ids = array("I")
    ids.frombytes(data)
    return tuple(ids)


def _error_of(failure: JobFailure) -> Exception:
    if failure.kind == "api":
        return ApiError(failure.status, failure.message, param=failure.param, code=failure.code)
    if failure.kind == "unsupported":
        return UnsupportedModelError(failure.message)
    kind = ContextLengthError if failure.kind == "context" else InvalidRequestError
    return kind(failure.message, failure.param)


def _error_of_exit(status: int, job: Job) -> Exception:
    """Returns the error of the request whose job ended its worker. Only exits by the worker's own
    limits are the request's fault; SIGABRT is one, from an allocation that failed in a library."""
    logger.warning("a text worker ended with status %d during a %s job", status, job.kind)
    if status == -RENDER_SIGNAL:
        return InvalidRequestError(
            "The model's chat template cannot render these messages: it runs for more than "
            f"{RENDER_CPU_S:g} s",
            "messages",
        )
    if status == -JOB_SIGNAL:
        return InvalidRequestError(f"{job.subject} needs more than {JOB_CPU_S:g} s to be read.")
    if status == -signal.SIGABRT:
        return InvalidRequestError(out_of_memory(job))
    return ServiceUnavailableError("The worker process for this request ended; send it again.", 1)
