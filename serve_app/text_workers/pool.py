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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from engine.admission import EngineLimits
from engine.errors import InvalidRequestError, UnsupportedModelError
from serve_app.errors import OverloadedError, ServiceUnavailableError
from serve_app.messages import BaseDescription
from serve_app.openai.json_body import check_fields, parse_body
from serve_app.openai.logprobs import Lists, LogprobsPart
from serve_app.text.base_text import BaseText
from serve_app.text.template_guard import TemplateBudgetError
from serve_app.text_workers.worker import (
    FAILURES,
    JOB_CPU_S,
    JOB_SIGNAL,
    RENDER_CPU_S,
    RENDER_SIGNAL,
    TEXT_JOBS,
    Job,
    JobFailure,
    JobResult,
    RequestBody,
    out_of_memory,
    receive,
    send,
)

logger = logging.getLogger(__name__)

# Shorter bodies need 20 ms at most, and mostly less than the hand-over to a worker (0.5 ms).
INLINE_BODY_BYTES = 16 * 1024
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
_PLACEHOLDERS: Mapping[str, dict[str, object]] = {
    "ChatRequest": {"messages": [{"role": "user", "content": ""}]},
    "CompletionRequest": {"prompt": ""},
    "TokenizeRequest": {"prompt": ""},
    "DetokenizeRequest": {"tokens": []},
}
_RESULT_TYPES = {name: get_type_hints(job)["return"] for name, job in TEXT_JOBS.items()}
_decode = msgspec.msgpack.Decoder(JobResult | JobFailure).decode

B = TypeVar("B", bound=RequestBody)
R = TypeVar("R")


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
        """Returns a checked body; of a long one with placeholders in place of its texts."""
        if len(raw) <= INLINE_BODY_BYTES:
            return parse_body(kind, raw)
        fields = await self._run(Job("parse", kind.__name__), raw, None, bytes)
        short_fields = msgspec.json.decode(fields, type=dict[str, object])
        placeholders = next(
            _PLACEHOLDERS[base.__name__] for base in kind.__mro__ if base.__name__ in _PLACEHOLDERS
        )
        return check_fields(kind, short_fields | placeholders)

    async def run(
        self,
        function: Callable[[B, BaseText, EngineLimits], R],
        body: B,
        raw: bytes,
        text: BaseText,
        description: BaseDescription,
    ) -> R:
        """Returns the result of one of TEXT_JOBS for a `body` that `parse` returned for `raw`: a
        worker computes it for a long body, or if the template needs long."""
        limits = description.limits
        if len(raw) <= INLINE_BODY_BYTES:
            try:
                return function(body, text, limits)
            except TemplateBudgetError:
                pass
        name = function.__name__
        job = Job(name, type(body).__name__, description.digest, limits, description.own)
        result: R = await self._run(job, raw, description, _RESULT_TYPES[name])
        return result

    async def logprobs(self, part: LogprobsPart, description: BaseDescription) -> Lists:
        """Renders a part. Never refused for a full queue: the tokens are generated already."""
        own = description.own
        raw, job = msgspec.msgpack.encode(part), Job("logprobs", "", description.digest, None, own)
        lists: Lists = await self._run(job, raw, description, Lists)
        return lists

    async def probe(self, description: BaseDescription) -> None:
        """Raises UnsupportedModelError if the shortest chat exceeds a worker's limits."""
        try:
            await self._run(Job("probe", "", description.digest), b"", description, type(None))
        except InvalidRequestError as error:
            raise UnsupportedModelError(error.message) from None

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    async def _run(
        self, job: Job, raw: bytes, description: BaseDescription | None, kind: Any
    ) -> Any:
        """Returns the value, of the type `kind`, of a job that the least busy worker runs.
        `description`: of the job's base, if it has one. The body is counted while the pool holds
        it: until the job ends, even if the caller was cancelled, or until a job in the queue is
        cancelled."""
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
            future = worker.executor.submit(worker.run, job, body, description)
        except BaseException:  # the pool is closed
            release()
            raise
        future.add_done_callback(release)
        value = await asyncio.wrap_future(future)
        return msgspec.msgpack.decode(value, type=kind)


async def open_text(description: BaseDescription, texts: TextPool | None) -> BaseText:
    """Returns the text side of a base after rendering one short chat: inline, or in a worker if the
    template exceeds the event loop's budget. Raises UnsupportedModelError."""
    text = await asyncio.to_thread(BaseText.from_files, description.files)
    try:
        await asyncio.to_thread(text.probe)
    except TemplateBudgetError as error:
        if texts is None:
            raise UnsupportedModelError(str(error)) from None
        await texts.probe(description)
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

    def run(self, job: Job, body: list[bytes], description: BaseDescription | None) -> msgspec.Raw:
        """Blocks until the end of a job and returns its value as msgpack. Pops the body, the only
        item of the list. Raises the error that the worker returned, or that its death stands for.
        """
        raw = body.pop()
        if self._process is not None and self._process.poll() is not None:
            # No request is to blame: the kernel was out of memory, or an operator killed it.
            status = self._end()
            logger.warning("an idle text worker ended with status %d; starting another", status)
        if description is not None and job.base not in self._bases:
            if len(self._bases) >= _MAX_BASES:
                self._end()
            self._exchange(Job("load", "", job.base), msgspec.msgpack.encode(description.files))
            self._bases.add(job.base)
        return self._exchange(job, raw)

    def close(self) -> None:
        """Ends the worker; the request in it fails."""
        process = self._process
        if process is not None:
            process.kill()
        self.executor.shutdown(cancel_futures=True)
        self._end()

    def _exchange(self, job: Job, raw: bytes) -> msgspec.Raw:
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
            raise FAILURES.get(result.kind, RuntimeError)(*result.args)
        # After a load the size is not checked: the job that follows needs the loaded tokenizer.
        if job.kind != "load" and result.resident_bytes > _MAX_RESIDENT_BYTES:
            self._end()
        return result.value

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


def _error_of_exit(status: int, job: Job) -> Exception:
    """Returns the error of the request whose job ended its worker. Only exits by the worker's own
    limits and crashes, which another worker would repeat, are the request's fault; SIGABRT is a
    limit, from an allocation that failed in a library."""
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
    if status == -signal.SIGSEGV:  # a template that overflows the stack, for instance
        return InvalidRequestError(f"{job.subject} crashes the process that reads it.")
    return ServiceUnavailableError("The worker process for this request ended; send it again.", 1)
