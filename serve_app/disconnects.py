"""The resources of an HTTP request until its answer ends, and the watch for clients that leave."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from starlette.types import Receive

from serve_app.tasks import spawn


async def call_when_gone(receive: Receive, callback: Callable[[], object]) -> None:
    """Calls `callback` when the client disconnects; for a task that runs while the answer is made.
    The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    callback()


class RequestScope(ExitStack):
    """Owns everything that must be released when a request ends, however it ends.

    Releases each callback once, the newest first. A completion adds, in this order: the hold that
    keeps its base awake, its place in the queue, its generation with the record of its arm, the
    watch for its client. `pop_all().close` hands all of them to a streamed response.
    """

    def watch_client(self, receive: Receive, on_gone: Callable[[], object]) -> None:
        """Calls `on_gone` when the client disconnects while this scope is open."""
        self.callback(spawn(call_when_gone(receive, on_gone), "watch-client").cancel)
