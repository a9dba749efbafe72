"""All ingresses that an engine is connected to: dials each once and sends it every step.

Dial rule: the first submit or attend that names an ingress dials its link, which lives until the
connection ends; then its requests are aborted (`on_lost`), and only the next submit or attend dials
again. Ignorant of Ray and of requests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping

from engine.types import EngineLoad, StepOutput, TokenOutput
from serve_app.messages import StreamAddress
from serve_app.stream.client import IngressLink
from serve_app.stream.snapshot import EngineSnapshot
from serve_app.stream.wire import Abort, StreamError
from serve_app.tasks import share


class IngressLinks:
    def __init__(
        self,
        engine_id: str,
        on_abort: Callable[[IngressLink, Abort], None],
        on_lost: Callable[[IngressLink], None],
    ) -> None:
        self.snapshot = EngineSnapshot()
        self._engine_id = engine_id
        self._engine_key = secrets.token_urlsafe(32)
        self._on_abort = on_abort
        self._on_lost = on_lost
        self._links: dict[str, IngressLink] = {}  # by ingress id
        self._dialling: dict[str, asyncio.Task[IngressLink]] = {}
        self._is_closed = False

    async def open(self, address: StreamAddress) -> IngressLink:
        """Returns an open link; concurrent callers share the dialling. Raises StreamError if the
        ingress cannot be reached, or closed the link before this caller resumed."""
        link = self._links.get(address.ingress_id)
        if link is not None and link.is_open:
            return link
        task = self._dialling.get(address.ingress_id)
        if task is None:
            task = share(self._dial(address), "dial-ingress")
            self._dialling[address.ingress_id] = task
            task.add_done_callback(lambda _: self._dialling.pop(address.ingress_id, None))
        link = await asyncio.shield(task)
        if not link.is_open:  # its end was reported before the caller had a request there
            raise StreamError(f"ingress {address.ingress_id} closed the connection at once")
        return link

    async def attend(self, address: StreamAddress) -> None:
        """Sends the ingress the full state now, and every step from now on."""
        link = self._links.get(address.ingress_id)
        if link is not None and link.is_open:
            link.send_full_state()
        else:
            await self.open(address)

    def send(self, step: StepOutput, outputs: Mapping[IngressLink, list[TokenOutput]]) -> None:
        """Sends a step to every ingress. `outputs`: the step's outputs by their link."""
        self.snapshot.observe(step)
        for link in tuple(self._links.values()):
            link.send(outputs.get(link, ()))

    def heartbeat(self, load: EngineLoad, stall: float = 0.0) -> None:
        """Sends the load after the newest step to every ingress. `stall`: see `Step.stall`."""
        self.snapshot.observe(StepOutput((), load), stall)
        for link in tuple(self._links.values()):
            link.send(is_step=False)

    def close(self) -> None:
        self._is_closed = True
        for link in tuple(self._links.values()):
            link.close()

    async def _dial(self, address: StreamAddress) -> IngressLink:
        link = IngressLink(
            address, self._engine_id, self._engine_key, self.snapshot, self._on_abort, self._forget
        )
        await link.dial()
        if self._is_closed:
            link.close()
            raise StreamError("the engine was stopped")
        self._links[address.ingress_id] = link
        link.send_full_state()
        return link

    def _forget(self, link: IngressLink) -> None:
        if self._links.get(link.address.ingress_id) is link:
            del self._links[link.address.ingress_id]
        self._on_lost(link)
