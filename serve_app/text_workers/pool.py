"""The worker processes of one ingress replica for large bodies: jobs out, results back.

A body of 16 MiB costs seconds of processor time and more than a gigabyte to read and tokenize;
`tokenizers` holds the interpreter's lock for 1.3 s a megabyte. Here all of that happens in
processes of lower priority that the kernel limits, and that are replaced when they die or have
grown. The queues before them are bounded in bytes, and bodies of more than a megabyte have a worker
of their own, so that they delay nobody else. Ignorant of HTTP.
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
from serve_app.openai.logprobs_parts import Lists, LogprobsPart
from serve_app.text.base_text import BaseText
from serve_app.text.template_guard import TooDearError
from serve_app.text_workers.worker import (
    JOB_CPU_S,
    JOB_SIGNAL,
    RENDER_CPU_S,
    RENDER_SIGNAL,
    Body,
    Done,
    Failure,
    Job,
    out_of_memory,
    receive,
    send,
)

logger = logging.getLogger(__name__)

_LARGE_BYTES = 1024**2  # such bodies have one worker together
_MAX_WAITING_BYTES = 256 * 1024**2
_MAX_RESIDENT_BYTES = 512 * 1024**2  # a worker that has more after a job is replaced
_MAX_BASES = 4  # that one worker holds the tokenizers of
_ROOT = str(Path(__file__).resolve().parents[2])
_COMMAND = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); "
    "from serve_app.text_workers.worker import main; main()"
)

# Stand in for the texts, which only the workers see.
_PLACEHOLDERS: Mapping[str, object] = {
    "ChatRequest": {"messages": [{"role": "user", "content": ""}]},
    "CompletionRequest": {"prompt": ""},
    "TokenizeRequest": {"prompt": ""},
    "DetokenizeRequest": {"tokens": []},
}
_decode = msgspec.msgpack.Decoder(Done | Failure).decode

B = TypeVar("B", bound=Body)
Files = Mapping[str, bytes]


class TextPool:
    def __init__(self, num_workers: int) -> None:
        """Processes start with the first job of each; at least two, one of them for bodies of more
        than a megabyte."""
        self._lanes = tuple(_Lane() for _ in range(max(2, num_workers)))
        self._lock = threading.Lock()  # a job's end is counted on its worker's thread
        self._waiting_bytes = 0

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(lane.pid for lane in self._lanes if lane.pid is not None)

    async def parse(self, kind: type[B], raw: bytes) -> B:
        """A checked body without its texts: those are placeholders."""
        done = await self._run(Job("parse", kind.__name__), raw)
        short = msgspec.json.decode(done.body, type=dict[str, object])
        stand_ins = _PLACEHOLDERS[kind.__name__]
        assert isinstance(stand_ins, dict)
        return parse_body(kind, msgspec.json.encode(short | stand_ins))

    async def prompts(
        self, kind: type[Body], raw: bytes, base: str, files: Files, limits: EngineLimits
    ) -> tuple[Prompt, ...]:
        """As `params.read_prompts`; a text is kept only where the answer repeats it. `base`: its
        digest; `files`: its text files."""
        done = await self._run(Job("prompts", kind.__name__, base, limits), raw, files)
        return tuple(
            Prompt(_ids(ids), text) for ids, text in zip(done.ids, done.texts, strict=True)
        )

    async def tokenize(
        self, kind: type[Body], raw: bytes, base: str, files: Files, limits: EngineLimits
    ) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
        """Ids, and their texts where the body asks for them."""
        done = await self._run(Job("tokenize", kind.__name__, base, limits), raw, files)
        return _ids(done.ids[0]), done.texts

    async def detokenize(
        self, kind: type[Body], raw: bytes, base: str, files: Files, limits: EngineLimits
    ) -> str:
        done = await self._run(Job("detokenize", kind.__name__, base, limits), raw, files)
        return done.texts[0] or ""

    async def logprobs(self, part: LogprobsPart, base: str, files: Files) -> Lists:
        """Never refused for those that wait: it belongs to an answer that is there already."""
        raw = msgspec.msgpack.encode(part)
        return (await self._run(Job("logprobs", "", base), raw, files)).lists

    async def probe(self, base: str, files: Files) -> None:
        """Raises UnsupportedModelError where the shortest chat is beyond a worker's limits."""
        try:
            await self._run(Job("probe", "", base), b"", files)
        except InvalidRequestError as error:
            raise UnsupportedModelError(error.message) from None

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    async def _run(self, job: Job, raw: bytes, files: Files | None = None) -> Done:
        """The body counts until nothing here holds it any more: until the job's end, though nobody
        waits for that, or until a job that has not begun is cancelled."""
        size, body = len(raw), [raw]
        lanes = self._lanes[:1] if size > _LARGE_BYTES else self._lanes[1:]
        lane = min(lanes, key=lambda one: one.num_jobs)
        with self._lock:
            has_room = self._waiting_bytes + size <= _MAX_WAITING_BYTES
            if not has_room and job.kind != "logprobs":
                raise OverloadedError("Too many long requests wait to be read.", 5)
            self._waiting_bytes += size
            lane.num_jobs += 1

        def leave(_: object = None) -> None:
            body.clear()  # the executor's queue keeps a cancelled job until its turn
            with self._lock:
                self._waiting_bytes -= size
                lane.num_jobs -= 1

        try:
            job_done = lane.executor.submit(lane.do, job, body, files)
        except BaseException:  # a pool that is closed
            leave()
            raise
        job_done.add_done_callback(leave)
        return await asyncio.wrap_future(job_done)


async def open_text(files: Files, base: str, texts: TextPool | None) -> BaseText:
    """The text side of a base, its chat template tried once: on the spot, and by a worker where it
    is beyond the event loop's budget. Raises UnsupportedModelError."""
    text = await asyncio.to_thread(BaseText.from_files, files)
    try:
        await asyncio.to_thread(text.probe)
    except TooDearError as error:
        if texts is None:
            raise UnsupportedModelError(str(error)) from None
        await texts.probe(base, files)
    return text


class _Lane:
    """One worker process and the thread that waits for it."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="text-worker")
        self.num_jobs = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._bases: set[str] = set()  # that it holds the tokenizers of

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def do(self, job: Job, body: list[bytes], files: Files | None) -> Done:
        """Blocks. Takes the one body out of the list. Raises what the worker answered, or what its
        death means."""
        raw = body.pop()
        if self._process is not None and self._process.poll() is not None:
            # Nobody's request: the kernel had no memory, or an operator ended it.
            status = self._end()
            logger.warning("an idle text worker ended with status %d", status)
        if job.base and job.base not in self._bases:
            if len(self._bases) >= _MAX_BASES:
                self._end()
            self._exchange(Job("load", "", job.base), msgspec.msgpack.encode(files))
            self._bases.add(job.base)
        return self._exchange(job, raw)

    def close(self) -> None:
        """The request that a worker is at fails."""
        process = self._process
        if process is not None:
            process.kill()
        self.executor.shutdown(cancel_futures=True)
        self._end()

    def _exchange(self, job: Job, raw: bytes) -> Done:
        try:
            process = self._process or self._start()
        except OSError as error:
            logger.warning("a text worker cannot be started: %s", error)
            raise ServiceUnavailableError(
                "Long requests cannot be read at the moment.", 5
            ) from None
        assert isinstance(process.stdin, BufferedIOBase)
        assert isinstance(process.stdout, BufferedIOBase)
        try:
            send(process.stdin, msgspec.msgpack.encode(job), raw)
            answer: Done | Failure = _decode(receive(process.stdout, 1)[0])
        except (OSError, EOFError, ValueError):
            raise _cause(self._end(), job) from None
        if isinstance(answer, Failure):
            raise _raised(answer)
        # The job that a load is for needs it; the size counts after that one.
        if job.kind != "load" and answer.resident_bytes > _MAX_RESIDENT_BYTES:
            self._end()
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", _COMMAND]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        return self._process

    def _end(self) -> int:
        """The exit status of the worker; the next job starts another one."""
        process, self._process = self._process, None
        self._bases.clear()
        if process is None:
            return 0
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # bytes that nobody reads any more
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


def _raised(failure: Failure) -> Exception:
    if failure.kind == "api":
        return ApiError(failure.status, failure.message, param=failure.param, code=failure.code)
    if failure.kind == "unsupported":
        return UnsupportedModelError(failure.message)
    kind = ContextLengthError if failure.kind == "context" else InvalidRequestError
    return kind(failure.message, failure.param)


def _cause(status: int, job: Job) -> Exception:
    """The death of a worker as an error of the request that it worked on; only the deaths that its
    own limits cause are the request's fault. An allocation that fails in a library aborts."""
    logger.warning("a text worker ended with status %d at a %s job", status, job.kind)
    if status == -RENDER_SIGNAL:
        words = f"it runs for more than {RENDER_CPU_S:g} s"
        return InvalidRequestError(
            f"The model's chat template cannot render these messages: {words}", "messages"
        )
    if status == -JOB_SIGNAL:
        what = "model's tokenizer or chat template" if job.kind == "load" else "text"
        return InvalidRequestError(f"The {what} takes more than {JOB_CPU_S:g} s to read.")
    if status == -signal.SIGABRT:
        return InvalidRequestError(out_of_memory(job))
    return ServiceUnavailableError("The process that read this request ended.", 1)
