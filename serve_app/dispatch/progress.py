"""The progress of a submit call's choices: everything that another engine needs to continue.

Each engine gets the requests under new ids, so that late tokens of the engine before match no
request; readers see the first ids. The last token of a choice comes together with its finish
reason, so a choice that is open here has not ended anywhere. Pure: ignorant of engines, streams and
text.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import replace

from engine.types import Request, ResumedChoice, TokenOutput


class Progress:
    def __init__(self, requests: Sequence[Request]) -> None:
        seeded = [_with_seed(request) for request in requests]
        self._requests = {request.request_id: request for request in seeded}
        # Output tokens so far of the open choices, by (request id, choice).
        self._open: dict[tuple[str, int], list[int]] = {
            (request.request_id, choice): []
            for request in requests
            for choice in range(request.params.n)
        }
        self._num_cached: dict[tuple[str, int], int] = {}
        self._has_prompt_logprobs: set[str] = set()
        # Request id -> its id at the present engine, and back; both empty at the first engine.
        self._engine_ids: dict[str, str] = {}
        self._originals: dict[str, str] = {}

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests for the first engine, each with a seed, so that a second engine draws the
        same tokens."""
        return tuple(self._requests.values())

    @property
    def open_requests(self) -> set[str]:
        """The present engine's ids of the requests that have open choices."""
        return {self.engine_id(request_id) for request_id, _ in self._open}

    def engine_id(self, request_id: str) -> str:
        return self._engine_ids.get(request_id, request_id)

    def is_open(self, request_id: str, choice: int) -> bool:
        return (request_id, choice) in self._open

    def end(self, request_id: str, choice: int) -> int:
        """Closes the choice and returns its number of output tokens."""
        return len(self._open.pop((request_id, choice), ()))

    def end_all(self) -> None:
        self._open.clear()

    def record(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Records outputs of the present engine and returns them under the first ids."""
        if self._originals:
            outputs = [
                self._renamed(output, original)
                for output in outputs
                if (original := self._originals.get(output.request_id)) is not None
            ]
        for output in outputs:
            self._record(output)
        return outputs

    def resume(self) -> tuple[Request, ...]:
        """Returns the open requests for the next engine, under new ids, which `record` expects
        from now on."""
        self._engine_ids, self._originals = {}, {}
        resumed = []
        for request_id, request in self._requests.items():
            choices = tuple(
                ResumedChoice(choice, tuple(token_ids))
                for (open_id, choice), token_ids in self._open.items()
                if open_id == request_id
            )
            if not choices:
                continue
            is_untouched = len(choices) == request.params.n and not any(
                choice.token_ids for choice in choices
            )
            params = request.params
            if request_id in self._has_prompt_logprobs:  # the client has them
                params = replace(params, prompt_logprobs=None)
            engine_id = uuid.uuid4().hex
            self._engine_ids[request_id] = engine_id
            self._originals[engine_id] = request_id
            resumed.append(
                replace(
                    request,
                    request_id=engine_id,
                    params=params,
                    resumed=() if is_untouched else choices,
                )
            )
        return tuple(resumed)

    def _record(self, output: TokenOutput) -> None:
        key = (output.request_id, output.choice)
        token_ids = self._open.get(key)
        if token_ids is None:
            return
        if not output.offset:
            self._num_cached[key] = output.num_cached_tokens
            if output.prompt_logprobs:
                self._has_prompt_logprobs.add(output.request_id)
        num_known = len(token_ids) - output.offset
        token_ids.extend(output.token_ids[num_known:] if num_known > 0 else output.token_ids)
        if output.finish_reason is not None:
            del self._open[key]

    def _renamed(self, output: TokenOutput, request_id: str) -> TokenOutput:
        """Returns the output under the first id, with the first engine's count of cached prompt
        tokens: this engine may have found cached output tokens as well."""
        num_cached = self._num_cached.get((request_id, output.choice))
        if num_cached is None:
            prompt = self._requests[request_id].prompt_token_ids
            num_cached = min(output.num_cached_tokens, len(prompt))
        return replace(output, request_id=request_id, num_cached_tokens=num_cached)


def _with_seed(request: Request) -> Request:
    if request.params.seed is not None:
        return request
    return replace(request, params=replace(request.params, seed=secrets.randbits(64)))
