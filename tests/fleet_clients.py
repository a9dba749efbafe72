"""The clients of a fleet: how they send bodies, read and leave, and whether their answers are right
to the letter.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import ray.serve.context
from starlette.types import Message

from serve_app.tally import ArmOutcome
from serve_app.tenancy.caller import Caller, KeyPolicy
from tests.fleet_engine import letter
from tests.fleet_ingress import FleetIngress
from tests.fleet_wishes import Wish
from tests.virtual_loop import VirtualLoop

_DONE = b"data: [DONE]\n\n"
# High limits of each kind: requests are never refused, but charged.
_POLICY = KeyPolicy(
    requests_per_minute=10**6,
    tokens_per_minute=10**9,
    max_parallel_requests=10**4,
    tokens_per_day=10**9,
)


@dataclass(eq=False)
class Client:
    loop: VirtualLoop
    number: int
    ingress: FleetIngress
    wish: Wish
    has_begun: bool = False  # False: it was cancelled before the application was called
    has_left: bool = False
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    num_starts: int = 0
    num_ends: int = 0
    ended_s: float = 0.0

    def start(self) -> None:
        self._gone = asyncio.Event()
        self._parts = self._cut_body()
        self.began_s = self.loop.time()
        self.task = self.ingress.process.task(self._run())
        self.task.add_done_callback(self._note_end)
        if self.wish.leaving is not None:
            self.loop.at_iteration(self.loop.iteration + self.wish.leaves_after, self.leave)

    def _note_end(self, task: object) -> None:
        self.ended_s = self.loop.time()

    def leave(self) -> None:
        if self.task.done() or self.has_left:
            return
        self.has_left = True
        if self.wish.leaving == "cancel":
            self.task.cancel()
        else:
            self.loop.call_soon(self._gone.set)

    def __str__(self) -> str:
        """Returns how the request ended."""
        if self.has_left:
            return "left"
        if not self.task.done():
            return f"open, status {self.status}"
        return "well" if self.has_ended_well else str(self.code)

    @property
    def request_id(self) -> str:
        """Serve's name of the request in the ingress."""
        return f"request {self.number}"

    @property
    def outcome(self) -> ArmOutcome | None:
        """The outcome that an arm has to count; None if the client left, maybe after its end."""
        if self.has_left:
            return None
        if self.has_ended_well:
            return "ok" if any(self._read()[0].values()) else "empty"
        is_ours = self.status in (200, 503) or self.code == "adapter_unsupported"
        is_ours = is_ours and self.code not in ("overloaded", "request_quarantined")
        return "error" if is_ours else "refused"

    @property
    def usage(self) -> dict[str, Any] | None:
        """The token counts that it received."""
        return self._read()[2]

    @property
    def reasons(self) -> list[str]:
        """The finish reasons of its choices."""
        return list(self._read()[1].values())

    @property
    def has_ended_well(self) -> bool:
        if self.status != 200 or not self.is_whole:
            return False
        return not self.wish.is_stream or (self.code is None and self.body.endswith(_DONE))

    @property
    def code(self) -> str | None:
        """The code of the error that the client received, or None."""
        if self.status == 200 and not self.wish.is_stream:
            return None
        if self.status == 200:
            cut = [event for event in self._events() if "error" in event]
            return str(cut[-1]["error"]["code"]) if cut else None
        if not self.body:
            return None
        return str(json.loads(self.body)["error"]["code"])

    def faults(self, seeds: dict[str, set[int]], digests: dict[str, str]) -> list[str]:
        """Returns every fault of its answer. `seeds`: see `StepEngine`; `digests`: of adapters, by
        `name@version`."""
        if not self.task.done():
            return ["it never ended"]
        if self.task.cancelled():
            return [] if self.has_left else ["it was cancelled by nobody"]
        if (error := self.task.exception()) is not None:
            return [f"the application raised {error!r}"]
        if self.num_starts > 1 or self.num_ends > 1:
            return ["it was answered twice"]
        if not self.is_whole and not self.has_left:
            return [f"its answer, status {self.status}, has no end"]
        if self.status == 500 or (self.code == "internal"):
            return [f"status {self.status}: {self.body[-300:]!r}"]
        if self.status != 200:
            return []
        if self.wish.is_stream and self.is_whole and not self.body.endswith(_DONE):
            return [f"its stream has no end: {self.body[-200:]!r}"]
        version = self.headers["x-loraplex-version"]
        try:
            wrong = self._compared(seeds, digests.get(version))
        except (ValueError, KeyError, IndexError) as error:
            return [f"its answer cannot be read: {error!r}: {self.body[-200:]!r}"]
        return wrong

    def _compared(self, seeds: dict[str, set[int]], adapter: str | None) -> list[str]:
        wish, wrong = self.wish, []
        is_whole = self.has_ended_well
        texts, reasons, usage = self._read()
        num_tokens = 0
        for place, prompt in enumerate(wish.engine_prompts):
            known: set[int] = set() if wish.seed is None else {wish.seed}
            if wish.seed is None:
                known = seeds.get(f"{prompt}/{adapter}", set())
            if len(known) != 1:
                if texts:
                    wrong.append(f"prompt {place} was sent with {len(known)} seeds")
                continue
            for choice in range(wish.n):
                index = place * wish.n + choice
                want, reason, count = self._wanted(prompt, adapter, next(iter(known)), choice)
                num_tokens += count
                got = texts.get(index, "")
                is_right = got == want if index in reasons else want.startswith(got)
                if not is_right:
                    wrong.append(f"choice {index} is {got!r}, not {want!r}")
                if index in reasons and reasons[index] != reason:
                    wrong.append(f"choice {index} ended by {reasons[index]}, not {reason}")
                if is_whole and index not in reasons:
                    wrong.append(f"choice {index} has no end")
        if is_whole and usage is not None:
            prompt_tokens = sum(len(prompt) for prompt in wish.engine_prompts)
            counted = usage["prompt_tokens"], usage["completion_tokens"]
            if counted != (prompt_tokens, num_tokens):
                wrong.append(f"the usage is {counted}, not {(prompt_tokens, num_tokens)}")
        elif is_whole:
            wrong.append("it has no usage")
        return wrong

    def _wanted(
        self, prompt: str, adapter: str | None, seed: int, choice: int
    ) -> tuple[str, str, int]:
        """Returns text, finish reason and number of tokens."""
        wish = self.wish
        text = "".join(
            letter(prompt, adapter, seed, choice, position) for position in range(wish.max_tokens)
        )
        if wish.stop and (found := text.find(wish.stop)) >= 0:
            return text[:found], "stop", found + len(wish.stop)
        return text, "length", wish.max_tokens

    def _read(self) -> tuple[dict[int, str], dict[int, str], dict[str, int] | None]:
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        usage: dict[str, int] | None = None
        if not self.wish.is_stream:
            events = [json.loads(self.body)] if self.is_whole else []
        else:
            events = self._events()
        for event in events:
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                index = choice["index"]
                if index in reasons:
                    raise ValueError(f"choice {index} went on after its end")
                message = choice.get("message") or choice.get("delta") or {}
                part = choice.get("text") or message.get("content") or ""
                texts[index] = texts.get(index, "") + part
                if choice["finish_reason"] is not None:
                    reasons[index] = choice["finish_reason"]
        return texts, reasons, usage

    def _events(self) -> list[dict[str, Any]]:
        found = []
        whole = self.body.decode().split("\n\n")
        lines = [line for event in whole for line in event.split("\n") if line.startswith("data: ")]
        for line in lines:
            if line != "data: [DONE]":
                found.append(json.loads(line.removeprefix("data: ")))
        return found

    async def _run(self) -> None:
        """Calls the application and cancels its tasks, as Serve's replica does."""
        request_id = self.request_id
        context = ray.serve.context._RequestContext(
            request_id=request_id, _internal_request_id=request_id
        )
        ray.serve.context._serve_request_context.set(context)  # type: ignore[arg-type]
        self.has_begun = True
        try:
            await self.ingress.app(self._scope(), self._receive, self._send)
        except asyncio.CancelledError:
            begun = ray.serve.context._get_requests_pending_assignment(request_id)
            for task in tuple(begun.values()):
                task.cancel()
            raise

    def _scope(self) -> dict[str, object]:
        path = "/v1/chat/completions" if self.wish.is_chat else "/v1/completions"
        headers = {
            "host": "testserver",
            "content-type": "application/json",
            "content-length": str(len(self.wish.body())),
            "x-tenant-id": self.wish.tenant,
        }
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("testserver", 80),
            "state": {"caller": Caller(self.request_id, _POLICY)},
        }

    def _cut_body(self) -> list[bytes]:
        body = self.wish.body()
        count = 3 if self.wish.body_s else 1
        size = -(-len(body) // count)
        return [body[start : start + size] for start in range(0, len(body), size)]

    async def _receive(self) -> Message:
        if self._parts and not self._gone.is_set():
            if self.wish.body_s:
                await asyncio.sleep(self.wish.body_s)
            if not self._gone.is_set():
                part = self._parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.num_starts += 1
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                self.num_ends += 1
                self.is_whole = True
        if self.wish.read_s:
            await asyncio.sleep(self.wish.read_s)
