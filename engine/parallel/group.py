"""The other ranks of an engine, as the first one sees them: processes, messages, and their end.

    engine thread --message--> each follower: its start; an adapter: keep, write, land, drop;
                                              a step: step or launch, draw, prompts
    engine thread <--exchanges of the model--> each follower

Followers are children of the process that owns the engine, so that all ranks share a host, see the
same devices and end together. They have no scheduler: they compute the steps that they receive. A
rank that dies or hangs ends the group: nothing but an end of the process frees one that waits in an
exchange for a rank that is gone.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineDeadError, EngineError
from engine.inputs import StepArrays
from engine.memory_plan import DeviceUse
from engine.parallel.channel import Link, StepSegment
from engine.step_buffers import Words
from engine.step_layout import StepLayout
from kernels.collective import SOLO, Collective
from kernels.exchange_environment import set_environment

logger = logging.getLogger(__name__)

BEAT_S = 0.5
_SILENCE_S = 9.0  # with the time to notice and to end the group: within 12 s
# The limit until all ranks serve. A rank imports its libraries in 3 s, in 20 s on a busy machine,
# and in minutes from a cold disk elsewhere.
_START_SILENCE_S = 180.0
# On CUDA: from the death of a rank to the end of this process, if it hangs and nobody closes it.
_LAST_RESORT_S = 30.0
_EXIT_CODE = 70
_LATE_S = 0.5  # this process was paused, the others perhaps, too
_EXIT_S = 5.0
_LAUNCHES = ("launch", "prompts")
_SLOT_POLL_S = 50e-6
_NOTICE_S = 2.0  # from an exchange that failed to the exit of the process that is the cause
# The path of this process's modules is not that of an interpreter which begins.
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from engine.parallel.follower import main; main(int(sys.argv[2]))"
)


@dataclass(frozen=True, slots=True)
class _Follower:
    rank: int
    process: subprocess.Popen[bytes]
    link: Link

    def has_answered(self, within_s: float) -> bool:
        """Returns True if it has sent something, or has ended."""
        poll = select.poll()
        poll.register(self.link.fileno(), select.POLLIN)
        return bool(poll.poll(1000 * within_s))

    def answer(self) -> dict[str, Any] | None:
        """Returns its next message; None: it has ended."""
        try:
            return self.link.receive()[0]
        except (EOFError, OSError):
            return None


class Group:
    """Owned by the first rank. One thread calls it, except for `close`."""

    def __init__(
        self,
        config: EngineConfig,
        slot_ints: int,
        num_threads: int,
        *,
        is_cuda: bool = False,
    ) -> None:
        """Starts the other ranks, which begin to read their weights. `num_threads`: torch threads
        of each."""
        if is_cuda:
            set_environment()
        self._is_cuda = is_cuda
        self._ranks: Collective = SOLO
        self._silence_s = _START_SILENCE_S
        self.size = size = config.tensor_parallel_size
        self._last_resort: threading.Timer | None = None
        self._death: EngineDeadError | None = None
        self._is_closing = False
        self._on_death: Callable[[EngineDeadError], None] | None = None
        self._lock = threading.Lock()  # guards the four above
        self._folder = TemporaryDirectory(prefix="loraplex-ranks-")
        self._store = Path(self._folder.name) / "store"
        self._segment = StepSegment(slot_ints)
        self.num_steps = 0  # that all ranks compute, so far
        self.num_launches = 0  # of work that reads adapters
        self._followers: list[_Follower] = []
        self._watcher = threading.Thread(target=self._watch, name="watch-ranks", daemon=True)
        try:
            for rank in range(1, size):
                self._followers.append(_start(rank))
            for follower in self._followers:
                message = {
                    "config": asdict(config),
                    "rank": follower.rank,
                    "slot_ints": slot_ints,
                    "store": str(self._store),
                    "num_threads": num_threads,
                }
                follower.link.send(message, self._segment.file)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(follower.process.pid for follower in self._followers)

    def meet(self, join: Callable[[Path], Collective]) -> Collective:
        """Returns the exchanges, once every rank has its weights. `join`: meets the ranks that name
        the same file. Raises EngineError with a rank's reason, or if a rank hangs."""
        self._await_all("read its weights")
        self._watcher.start()
        self.send({"do": "meet"})  # only now: a rank waits for the others in vain after a minute
        # In a thread: nothing else leaves a rank's wait for one that is gone before that minute.
        joined: Future[Collective] = Future()
        threading.Thread(
            target=_settle, args=(joined, join, self._store), name="meet-ranks", daemon=True
        ).start()
        while not wait([joined], BEAT_S).done:
            self.check()
        try:
            self._ranks = joined.result()
        except Exception as error:
            reason = self._cause() or f"{self.size} ranks could not meet: {error}"
            raise self._fail(reason) from error
        return self._ranks

    @contextmanager
    def start_together(self, message: Mapping[str, object], what: str) -> Iterator[None]:
        """Has the other ranks do a part of the start while the caller does the same, with exchanges
        in between. Raises EngineError with the reason of a rank that cannot. An error of the caller
        stays what it is: it closes the group."""
        self.send(message)
        try:
            yield
        except EngineError:
            raise
        except Exception:
            if self._cause(_NOTICE_S) is not None or self._death is not None:
                self._await_all(what)  # the exchange failed because another rank did
            raise
        self._await_all(what)

    def receive_uses(self) -> list[DeviceUse]:
        """Returns the memory that every other rank measures, without an exchange."""
        return [DeviceUse(**answer["use"]) for answer in self._await_all("measure")]

    def serve(self) -> None:
        """Returns when every rank has its memory and waits for steps."""
        self._await_all("make its memory")
        if not self._is_cuda:  # NCCL may read its store later
            self._folder.cleanup()
        self._silence_s = _SILENCE_S

    def watch(self, on_death: Callable[[EngineDeadError], None]) -> None:
        """Calls back once, from any thread, when a rank has died or hangs."""
        with self._lock:
            self._on_death = on_death
            death = self._death
        if death is not None:
            on_death(death)

    def send(self, message: Mapping[str, object], file: int | None = None) -> None:
        """Sends a message to every rank, in the order of the calls and of the steps."""
        self.check()
        try:
            for follower in self._followers:
                follower.link.send(message, file)
        except OSError as error:
            raise self._fail(self._cause() or f"a rank does not listen: {error}") from error

    def launch_arrays(self, step: StepArrays) -> AbstractContextManager[None]:
        """Has all ranks compute a step of the reference backend, as `together`."""
        slot = self._free_slot()
        self._segment.write(slot, step)
        self.num_steps += 1
        return self.together({"do": "step", "slot": slot})

    def launch(self, layout: StepLayout, words: Words) -> AbstractContextManager[None]:
        """Has all ranks launch a step of a device, as `together`."""
        slot, number = self._free_slot(), self.num_steps
        self._segment.write_words(slot, words)
        self.num_steps += 1  # not before: a step without room is refused, and no rank takes it
        message = {"do": "launch", "slot": slot, "num_words": len(words), "number": number}
        # `asdict` takes 27 us, a hundredth of a step of one sequence on two H200s.
        return self.together(message | {"layout": msgspec.to_builtins(layout)})

    @contextmanager
    def together(self, message: Mapping[str, object]) -> Iterator[None]:
        """Has the other ranks follow the message while the caller does the same. An error in
        between leaves ranks waiting in an exchange: it ends the group, as EngineDeadError. So does
        the death of a rank meanwhile: `Collective.abort` lets the caller end, with any numbers."""
        self.send(message)
        self.num_launches += message["do"] in _LAUNCHES
        try:
            yield
        except BaseException as error:
            reason = self._cause(_NOTICE_S) or f"a step of {self.size} ranks failed: {error}"
            raise self._fail(reason) from error
        self.check()

    def check(self) -> None:
        """Raises EngineDeadError if a rank has died or hangs."""
        if self._death is not None:
            raise self._death

    def _free_slot(self) -> int:
        """Returns the slot of the next step, once every rank has taken the step before last out of
        it: at once but after steps that failed."""
        while any(self._segment.num_taken[1 : self.size] < self.num_steps - 1):
            self.check()
            time.sleep(_SLOT_POLL_S)
        return self.num_steps % 2

    def close(self) -> None:
        """Ends the other ranks. Any thread but the watcher may call it, and again."""
        with self._lock:
            self._is_closing = True
            if self._last_resort is not None:
                self._last_resort.cancel()
        for follower in self._followers:
            follower.link.shut_down()
        ends_s = time.monotonic() + _EXIT_S
        for follower in self._followers:
            try:
                follower.process.wait(max(0.0, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        if self._watcher.is_alive():
            self._watcher.join()
        if self._death is None:  # otherwise `_fail` has
            self._ranks.abort()
        for follower in self._followers:
            follower.link.close()
        self._folder.cleanup()

    def _await_all(self, what: str) -> list[dict[str, Any]]:
        answers = []
        for follower in self._followers:
            self._await_answer(follower, what)
            answer = follower.answer()
            if answer is None or "error" in answer:
                raise self._start_error(what, follower, answer)
            answers.append(answer)
        return answers

    def _start_error(
        self, what: str, follower: _Follower, answer: dict[str, Any] | None
    ) -> EngineError:
        """Returns the error of a rank that refuses, or has ended without an answer. The watcher
        kills all ranks for the fault of a single rank, and in an exchange they fail with it: the
        answers of the ranks behind this one are read, too."""
        found = [(follower, answer)]
        ends_s = time.monotonic() + _NOTICE_S
        for other in self._followers[follower.rank :]:
            if other.has_answered(max(0.0, ends_s - time.monotonic())):
                found.append((other, other.answer()))
        refused = [(one, said) for one, said in found if said is not None and "error" in said]
        if refused:
            one, said = max(refused, key=lambda pair: bool(pair[1]["is_cause"]))
            return EngineError(f"rank {one.rank} of {self.size} could not {what}: {said['error']}")
        code = follower.process.wait(_EXIT_S)
        own = f"rank {follower.rank} of {self.size} died with exit code {code}"
        return EngineError(f"{own if self._death is None else self._death} before it could {what}")

    def _await_answer(self, follower: _Follower, what: str) -> None:
        """Returns when the rank has sent something, or has ended."""
        began_s = polled_s = time.monotonic()
        while not follower.has_answered(BEAT_S):
            hang = self._hang(follower, polled_s, began_s, _START_SILENCE_S)
            if hang is not None:
                raise EngineError(f"{hang} before it could {what}")
            polled_s = time.monotonic()

    def _hang(
        self, follower: _Follower, polled_s: float, since_s: float, limit_s: float
    ) -> str | None:
        """Returns the words about a rank that shows no sign of life for longer than the limit, from
        a time on that is no earlier than `since_s`. `polled_s`: before the last wait of `BEAT_S`: a
        longer wait is a pause of this process."""
        now_s = time.monotonic()
        silent_s = now_s - max(since_s, self._segment.beats_s[follower.rank])
        if silent_s <= limit_s or now_s - polled_s >= BEAT_S + _LATE_S:
            return None
        return f"rank {follower.rank} of {self.size} hangs for {silent_s:.1f} s"

    def _watch(self) -> None:
        """Runs until the group ends."""
        poll = select.poll()
        for follower in self._followers:
            poll.register(follower.link.fileno(), 0)  # ends only
        while self._death is None and not self._is_closing:
            polled_s = time.monotonic()
            ended = poll.poll(1000 * BEAT_S)
            if self._is_closing:
                return
            if ended:
                self._fail(self._cause(_NOTICE_S) or "a rank closed its connection")
                continue
            for follower in self._followers:
                if (hang := self._hang(follower, polled_s, 0.0, self._silence_s)) is not None:
                    self._fail(hang)
                    return

    def _cause(self, within_s: float = 0.0) -> str | None:
        """Returns which rank has exited, perhaps only soon."""
        ends_s = time.monotonic() + within_s
        while self._death is None:
            for follower in self._followers:
                code = follower.process.poll()
                if code is not None:
                    return f"rank {follower.rank} of {self.size} died with exit code {code}"
            if time.monotonic() >= ends_s:
                break
            time.sleep(0.01)
        return None

    def _fail(self, reason: str) -> EngineDeadError:
        """Ends the group. Returns the first error."""
        with self._lock:
            if self._death is not None:
                return self._death
            self._death = death = EngineDeadError(reason)
            on_death, is_closing = self._on_death, self._is_closing
        if not is_closing:
            logger.error("%s, the engine ends", reason)
        for follower in self._followers:
            follower.process.kill()
        if self._is_cuda and not is_closing:
            self._free_this_rank()
        if on_death is not None:
            on_death(death)
        return death

    def _free_this_rank(self) -> None:
        """Ends the exchanges in which this rank's device waits for one that is gone. If that does
        not help, nothing but the end of the process does."""
        with self._lock:
            if not self._is_closing:  # otherwise nothing would cancel it
                self._last_resort = threading.Timer(_LAST_RESORT_S, os._exit, (_EXIT_CODE,))
                self._last_resort.daemon = True
                self._last_resort.start()
        # Not in this thread: the libraries may wait for the device, too.
        threading.Thread(target=self._ranks.abort, name="abort-exchanges", daemon=True).start()


def _settle(joined: Future[Collective], join: Callable[[Path], Collective], store: Path) -> None:
    try:
        joined.set_result(join(store))
    except BaseException as error:
        joined.set_exception(error)


def _start(rank: int) -> _Follower:
    own, other = socket.socketpair()
    with other:
        process = subprocess.Popen(
            # -P: no module of the working directory takes the place of one of Python's own.
            [sys.executable, "-P", "-c", _MAIN, json.dumps(sys.path), str(other.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(other.fileno(),),
        )
    return _Follower(rank, process, Link(own))
