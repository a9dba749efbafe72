"""A small real HTTP server that speaks OpenAI's streams, well and badly, for tests of clients."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODELS = (("tiny", None), ("pirate", "tiny"), ("cut", None), ("endless", None))
WORDS = ("Arr", ", ", "matey", "!\x1b[2J")


@dataclass
class OpenAIServer:
    """The model's name picks the behaviour: `cut`, `no-done`, `error`, `endless` and `unknown` do
    what they say, all others answer.
    """

    url: str = ""
    bodies: list[dict[str, object]] = field(default_factory=list)
    on_endless: Callable[[], None] = lambda: None  # called when such a stream is well under way

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        data = [{"id": name, "object": "model", "parent": parent} for name, parent in MODELS]
        return JSONResponse({"object": "list", "data": data})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        model = str(body["model"]).rpartition(":")[2]
        if model == "unknown":
            error = {"message": "no model is named 'unknown'", "code": 404}
            return JSONResponse({"error": error}, 404)
        if body.get("stream"):
            return StreamingResponse(self.events(model), media_type="text/event-stream")
        choice = {"index": 0, "message": {"content": "".join(WORDS)}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 7, "completion_tokens": len(WORDS)}
        return JSONResponse({"choices": [choice], "usage": usage})

    async def events(self, model: str) -> AsyncIterator[str]:
        for word in WORDS:
            yield event({"choices": [{"index": 0, "delta": {"content": word}}]})
        if model == "cut":
            return
        if model == "endless":
            self.on_endless()
        while model == "endless":
            await asyncio.sleep(0.01)
            yield event({"choices": [{"index": 0, "delta": {"content": " more"}}]})
        if model == "error":
            yield event({"error": {"message": "the engine died", "code": 500}})
        else:
            yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if model != "no-done":
            usage = {"prompt_tokens": 7, "completion_tokens": len(WORDS)}
            yield event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"


def event(chunk: dict[str, object]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


@contextmanager
def openai_server() -> Iterator[OpenAIServer]:
    served = OpenAIServer()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        served.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(served.app(), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield served
        finally:
            server.should_exit = True
            thread.join()
