"""The engine's vocabulary: what a caller hands in, what a step decides, what a step gives back.

Ignorant of tensors, HTTP and MLflow. An adapter is known here only by its content digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lora.resident import Resident as Resident

FinishReason = Literal["stop", "length", "abort", "error"]
# Errors of a TokenOutput that are told from all others.
NOT_FINITE = "the model's logits are not finite"
NO_MEMORY = "the device has no memory for a step of this request"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens. Defaults are those of the OpenAI API; 0 switches `top_k`, `min_p` off.

    Stop strings are text and therefore not known here: the caller watches the text and aborts.
    """

    max_tokens: int = 16
    min_tokens: int = 0  # neither EOS nor a stop id can be drawn before this many tokens
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over output tokens, as OpenAI
    frequency_penalty: float = 0.0  # over output tokens, as OpenAI
    repetition_penalty: float = 1.0  # over prompt and output tokens, as Hugging Face
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None: the engine draws one per request
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the drawn token's and those of the k most likely
    prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """A choice that goes on where another engine left it: the next token has the offset
    `len(token_ids)`, its random numbers and penalties are those of an undisturbed run."""

    choice: int
    token_ids: tuple[int, ...]  # its output so far


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str  # unique in the engine; the caller makes it, a client's id is never used
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: str | None = None  # content digest of a loaded adapter
    cache_salt: str = ""  # requests with different salts never share KV blocks
    arrival_s: float = 0.0  # time.time() at the front, for queue-time metrics only
    # Only these of the `params.n` choices are generated; empty: all, from their beginning.
    resumed: tuple[ResumedChoice, ...] = ()

    @property
    def choices(self) -> tuple[int, ...]:
        """Those that are generated, in order."""
        resumed = tuple(sorted(one.choice for one in self.resumed))
        return resumed or tuple(range(self.params.n))

    @property
    def num_tokens(self) -> int:
        """To compute before the next token: the prompt once, its choices share it, and the outputs
        of resumed ones, which each computes again."""
        again = sum(len(one.token_ids) for one in self.resumed)
        return len(self.prompt_token_ids) + again

    @property
    def has_output(self) -> bool:
        """Its client has read tokens of it before it came here."""
        return any(one.token_ids for one in self.resumed)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, before temperature and filters."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...]  # most likely first


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step adds to one choice. `offset` is the number of output tokens before these."""

    request_id: str
    choice: int
    offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, when asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with the first output
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop id (not EOS) that ended it
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    queued_s: float = 0.0  # with the first output: from the submit to the first step with it
    error: str | None = None  # with finish_reason "error"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's state after a step: what a router and the metrics need."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_adapter: int = 0
    queued_tokens: int = 0  # tokens still to prefill, running and waiting
    num_blocks: int = 0
    num_free_blocks: int = 0  # cached blocks that nobody holds count as free
    num_preemptions: int = 0  # since start
    prefix_queries: int = 0  # tokens looked up, since start
    prefix_hits: int = 0  # tokens found, since start
    num_steps: int = 0  # since start
    num_missed_wakeups: int = 0  # since start; each is a fault of the engine's loop
    adapters_on_device: tuple[str, ...] = ()  # digests
    adapters_on_host: tuple[str, ...] = ()
    adapter_device_bytes: int = 0
    adapter_host_bytes: int = 0
    num_pinned_adapters: int = 0
    num_adapter_copies: int = 0  # from the host to the device, since start
    # What a step takes, fitted to the newest ones; all 0 while unknown:
    # step_fixed_s + step_token_s * prompt tokens + step_sequence_s * decoding sequences.
    step_fixed_s: float = 0.0
    step_token_s: float = 0.0
    step_sequence_s: float = 0.0
    adapter_copy_s: float = 0.0  # from the host to the device, until it can be used; 0: unknown

    @property
    def kv_usage(self) -> float:
        """Of the KV blocks, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class StepOutput:
    outputs: tuple[TokenOutput, ...]
    load: EngineLoad
    # Changes of what the prefix cache holds, as `engine.prefix_digests` names it.
    cached_prefixes: tuple[int, ...] = ()
    evicted_prefixes: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice being generated. Mutable, owned by the scheduler."""

    request: Request
    choice: int
    seed: int  # of the request; the random numbers are a function of (seed, choice, position)
    token_ids: list[int]  # prompt, then output
    num_computed_tokens: int = 0  # tokens whose KV is in the blocks
    num_scheduled_tokens: int = 0  # the same, with those of steps that are under way
    num_tokens_in_flight: int = 0  # drawn by steps under way; their ids are on the device alone
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at first admission
    block_table: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    ordinal: int = 0  # age: the lower, the older
    block_hashes: list[bytes] = field(default_factory=list)  # chain over its full blocks, so far
    prefix_digests: list[int] = field(default_factory=list)  # of its full chunks, so far
    num_overtaken: int = 0  # younger ones admitted while it waited for its adapter
    added_s: float = 0.0  # on the scheduler's clock
    queued_s: float = 0.0  # until it was first admitted; 0 again once that was told

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output, with what steps under way will add."""
        return len(self.token_ids) + self.num_tokens_in_flight


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Positions [start, end) of one sequence are computed in this step.

    The token at `end - 1` may be in flight: then it lies past `sequence.token_ids`, and the step
    takes it from where the step before drew it.
    """

    sequence: Sequence
    start: int
    end: int
    samples: bool  # the last position is the newest token: its logits give the next one


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(s.end - s.start for s in self.sequences)

    @property
    def num_decoding(self) -> int:
        """Sequences with one token, which gives the next one."""
        return sum(s.samples and s.end - s.start == 1 for s in self.sequences)


@dataclass(frozen=True, slots=True)
class Sample:
    """A runner's answer for one scheduled sequence, in the order of the batch."""

    token_id: int | None  # None: the sequence did not sample in this step
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for positions [start + 1, end] of the prompt
    is_finite: bool = True  # False: the logits held NaN or infinity, token_id is None


class LaunchedStep(Protocol):
    def collect(self) -> tuple[Sample, ...]:
        """Waits for the device. In the order of the launches, and once, unless it found no memory:
        then again."""
        ...


class ModelFacts(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class AdapterStore(Protocol):
    """Which adapters are on the device. `lora.pool.AdapterPool` implements it."""

    def has(self, digest: str) -> bool:
        """False: never loaded, removed, or dropped when the host tier was full."""
        ...

    def land_copies(self) -> None:
        """Adapters whose copies have ended can be acquired from now on; those whose copies end
        later, after the next call."""
        ...

    def acquire(self, digest: str) -> bool:
        """Makes the adapter resident if room allows, and takes a reference. False: not now, for
        all pages are in use or the copy to the device is under way."""
        ...

    def prefetch(self, digests: Iterable[str]) -> None:
        """Those that will be acquired next, the most urgent first: copies begin where there is
        room."""
        ...

    def has_pending_copies(self) -> bool:
        """Some copy has not landed: what was refused may be had after the next `land_copies`."""
        ...

    def wait_pending(self) -> None:
        """Until one more adapter can be acquired. Some milliseconds at most."""
        ...

    def release(self, digest: str) -> None:
        """Gives the reference of one `acquire` back."""
        ...

    def on_device(self) -> tuple[str, ...]: ...
    def on_host(self) -> tuple[str, ...]: ...
    @property
    def device_bytes_used(self) -> int: ...
    @property
    def host_bytes_used(self) -> int: ...
    @property
    def num_pinned(self) -> int: ...
    @property
    def num_copied_to_device(self) -> int: ...
    @property
    def copy_s(self) -> float: ...
    def residents(self) -> tuple[Resident, ...]: ...
    def is_pinned(self, digest: str) -> bool: ...
    def spare(self, digests: Iterable[str]) -> None: ...
    def pin(self, digest: str) -> None: ...
    def unpin(self, digest: str) -> None: ...
    def remove(self, digest: str) -> bool:
        """False: still referenced."""
        ...


class Runner(Protocol):
    """Owns the device. The one seam between policy (integers) and mechanism (tensors)."""

    num_blocks: int
    max_model_len: int
    runs_ahead: bool  # `launch` returns while the device works: the next step can be planned

    @property
    def model_config(self) -> ModelFacts: ...
    @property
    def adapters(self) -> AdapterStore: ...

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """One forward pass and one draw for each sequence that samples. At most one step that was
        launched before is not collected yet. What it raises leaves the runner as fit as before."""
        ...

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error of `launch` or `collect` means that the same step may pass with fewer
        tokens."""
        ...

    def free_cache(self) -> None:
        """Gives back what the allocator keeps beyond what is in use. Waits for the device."""
        ...
