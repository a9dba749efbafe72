"""A request on its way through the simulated service: what it asks for, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Call:
    index: int
    arrived_s: float
    num_prompt: int
    num_output: int
    adapter: str | None = None
    rank: int = 16
    prefixes: tuple[int, ...] = ()  # of the prompt, as `engine.prefix_digests` would name them
    prefixes_after: tuple[int, ...] = ()  # with its output: what a next turn can find
    session: str | None = None
    tenant: str = ""
    # What became of it:
    call_id: str = ""
    ingress: int = 0
    placed_s: float = 0.0  # a replica was chosen
    expected_s: float = 0.0  # the router's expectation then
    replica: int = -1
    replica_id: str = ""
    found_in: str = ""  # the adapter's tier where it went
    entered_s: float = 0.0  # the engine had it, its adapter on the host
    first_s: float = 0.0  # the first token left the engine
    ended_s: float = 0.0
    num_cached: int = 0  # prompt tokens found at its first admission
    num_preemptions: int = 0
    # The engine's own:
    ordinal: int = 0
    remaining: int = 0  # prompt tokens to schedule
    num_hits: int = 0  # tokens found at its newest admission
    num_done: int = 0  # output tokens that it had when it was preempted
    first_step: int = 0  # the step of its first token since its newest admission
    last_step: int = 0  # the step of its last token
    num_overtaken: int = 0
    is_published: bool = False
    is_running: bool = False
