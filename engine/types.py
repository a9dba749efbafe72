"""The engine's vocabulary: requests, step decisions and step results.

Free of tensors, HTTP and MLflow. An adapter is known here only by its content digest, and the
adapters of a request by their key (`lora.adapter_key`). Of the parts and the samples of a step,
which the device may wait for, many are made: they are tuples, made in a fourth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from engine.adapter_store import AdapterStore as AdapterStore
from engine.host_blocks import NO_KV_HOST, BlockCopier, KVHostLoad
from engine.kv_layout import KVLayout
from lora.adapter_key import WeightedAdapter as WeightedAdapter
from lora.adapter_key import adapter_key as adapter_key
from lora.adapter_key import key_digests as key_digests
from lora.blocks import Resident as Resident

if TYPE_CHECKING:
    from engine.grammar_state import GrammarState

FinishReason = Literal["stop", "length", "abort", "error"]
# Errors of a TokenOutput that callers distinguish from all others.
NOT_FINITE = "the model's logits are not finite"
NO_MEMORY = "the device has no memory for a step of this request"
# The cost of an output token in prompt tokens, and the part that a rank row of the adapter adds to
# each kind of token; measured, see `serve_app.admission.cost`.
OUTPUT_TOKEN = 2.0
PROMPT_RANK, OUTPUT_RANK = 0.054 / 16, 0.16 / 16


GrammarKind = Literal["json_schema", "regex", "lark", "gbnf"]
# Drafts: none, as long as they match, or only where they are expected to save time.
SpeculationMode = Literal["off", "suffix", "auto"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """The language to which the output of a choice belongs. The source travels, never a compiled
    object: every engine compiles it, once per source."""

    kind: GrammarKind
    source: str  # a schema as JSON text, an expression, or a grammar of llguidance or llama.cpp
    # If set, the tokens up to and including the first of this id are free: the end of thinking.
    starts_after: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of token sampling. Defaults are those of the OpenAI API; 0 switches `top_k`
    and `min_p` off.

    Stop strings are text and therefore absent here: the caller watches the text and aborts.
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
    logprobs: int | None = None  # None: none; k: of the drawn token and the k most likely
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    # None: as in the engine's configuration. It changes no token, only the number of steps.
    speculation: SpeculationMode | None = None

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """A choice that continues where another engine left it: the next token has the offset
    `len(token_ids)`; its random numbers and penalties are those of an undisturbed run."""

    choice: int
    token_ids: tuple[int, ...]  # its output so far


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str  # unique in the engine; the caller makes it, a client's id is never used
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: str | None = None  # key of loaded adapters
    cache_salt: str = ""  # requests with different salts never share KV blocks
    arrival_s: float = 0.0  # time.time() at the front, for queue-time metrics only
    adapter_rank: int = 0  # of all its adapters; for the shares of a step's time only
    # Set by the engine if its adapter has invocation tokens: the first position where it is active
    active_from: int | None = None
    # If set, only these of the `params.n` choices are generated; otherwise all, from the start.
    resumed: tuple[ResumedChoice, ...] = ()

    @property
    def choices(self) -> tuple[int, ...]:
        """The choices to generate, in order."""
        resumed = tuple(sorted(choice.choice for choice in self.resumed))
        return resumed or tuple(range(self.params.n))

    @property
    def num_tokens(self) -> int:
        """The tokens to compute before the next token: the prompt once, shared by its choices, and
        the outputs of resumed choices, which each choice computes again."""
        again = sum(len(choice.token_ids) for choice in self.resumed)
        return len(self.prompt_token_ids) + again

    @property
    def has_output(self) -> bool:
        """True if the client had received tokens of this request before it came to this engine."""
        return any(choice.token_ids for choice in self.resumed)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, before temperature and filters."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...]  # most likely first


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """The tokens that one step adds to one choice. `offset` is the number of output tokens before
    them."""

    request_id: str
    choice: int
    offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if requested
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with the first output
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop id (not EOS) that ended it
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    queued_s: float = 0.0  # with the first output: from submission to the first step with it
    error: str | None = None  # with finish_reason "error"
    engine_s: float = 0.0  # its share of the engine's time since the choice's last output


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's state after a step, for routers and metrics."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_adapter: int = 0
    queued_tokens: int = 0  # tokens still to prefill, running and waiting
    # Of these, the tokens of sequences that wait for room for their adapter: others overtake them
    queued_tokens_for_adapter: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # includes cached blocks without references
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
    # The duration of a step, fitted to recent steps; all 0 while unknown:
    # step_fixed_s + step_token_s * prompt tokens + step_sequence_s * decoding sequences.
    step_fixed_s: float = 0.0
    step_token_s: float = 0.0
    step_sequence_s: float = 0.0
    adapter_copy_s: float = 0.0  # host to device, until usable; 0: unknown
    adapter_room_s: float = 0.0  # mean recent wait for room for an adapter on the device; 0: none
    # The most prompt tokens of a step beside the sequences that run now; 0: unknown
    step_prompt_tokens: int = 0
    # The expected seconds of the step that the device has just begun; 0 if an engine that does not
    # plan ahead plans its next step only now, or without work
    in_flight_s: float = 0.0
    num_late_compilations: int = 0  # of kernels, since the engine was ready; each is a fault
    # Counts of speculation, since start: sequences with a draft in a step, and tokens of drafts.
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # tokens accepted at each place of drafts
    kv_host: KVHostLoad = NO_KV_HOST

    @property
    def kv_usage(self) -> float:
        """The share of KV blocks in use, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class StepOutput:
    outputs: tuple[TokenOutput, ...]
    load: EngineLoad
    # Changes of the prefix cache, by the names of `engine.prefix_digests`.
    cached_prefixes: tuple[int, ...] = ()
    evicted_prefixes: tuple[int, ...] = ()
    preempted: tuple[str, ...] = ()  # request ids, one per preempted sequence


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice being generated. Mutable, owned by the scheduler."""

    request: Request
    choice: int
    seed: int  # of the request; the random numbers are a function of (seed, choice, position)
    token_ids: list[int]  # prompt, then output
    num_computed_tokens: int = 0  # tokens whose KV is in the blocks
    num_scheduled_tokens: int = 0  # the same, with the tokens of steps in flight
    num_tokens_in_flight: int = 0  # drawn by steps in flight; their ids are on the device alone
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at first admission
    num_host_tokens: int = 0  # of its prefix, loaded from the host
    # For the first group of layers of `engine.kv_layout`, and for the second, if there are two.
    block_table: list[int] = field(default_factory=list)
    window_table: list[int] = field(default_factory=list)
    num_dropped: int = 0  # first entries of the windowed group's table: their blocks are freed
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    ordinal: int = 0  # age: the lower, the older
    block_hashes: list[bytes] = field(default_factory=list)  # chain over its full blocks, so far
    prefix_digests: list[int] = field(default_factory=list)  # of its full chunks, so far
    num_refusals: int = 0  # steps in which its adapter found no room or was being copied
    num_overtaken: int = 0  # younger sequences admitted while it waited for its adapter
    added_s: float = 0.0  # on the scheduler's clock
    queued_s: float = 0.0  # until its first admission; 0 again once reported
    grammar_state: GrammarState | None = None  # of a request with a grammar
    engine_s: float = 0.0  # share of the time of steps; 0 again once reported
    output_weight: float = 0.0  # of a row with one token in the shares of a step
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.output_weight = OUTPUT_TOKEN * (1.0 + OUTPUT_RANK * self.request.adapter_rank)
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output, with the tokens that steps in flight will add."""
        return len(self.token_ids) + self.num_tokens_in_flight


class ScheduledSequence(NamedTuple):
    """Positions [start, end) of one sequence are computed in this step.

    The token at `end - 1` may be in flight: it then lies past `sequence.token_ids`, and the step
    reads it from where the step before drew it. A draft is the tokens of the last positions, which
    are guessed: the step draws a token after the newest one and after each of the draft.
    """

    sequence: Sequence
    start: int
    end: int
    # The last position before the draft is the newest token: its logits give the next.
    samples: bool
    draft: tuple[int, ...] = ()  # only of a part that samples and whose tokens are all known

    @property
    def known_end(self) -> int:
        """The end of the positions before the draft."""
        return self.end - len(self.draft)

    @property
    def rows(self) -> tuple[ScheduledSequence, ...]:
        """One part for each draw of this part, in order: the draw's position is its `end`, and its
        draft the guessed tokens before it. Together they compute the positions of this part: the
        first the positions up to the newest token, each other the position of a guessed token."""
        assert self.samples
        sequence, end = self.sequence, self.known_end
        first = ScheduledSequence(sequence, self.start, end, True)
        return first, *(
            ScheduledSequence(sequence, end + count - 1, end + count, True, self.draft[:count])
            for count in range(1, len(self.draft) + 1)
        )

    def without_draft(self) -> ScheduledSequence:
        if not self.draft:
            return self
        return ScheduledSequence(self.sequence, self.start, self.known_end, self.samples)


@dataclass(frozen=True)  # without slots: some numbers are kept
class ScheduledBatch:
    sequences: tuple[ScheduledSequence, ...]

    @cached_property
    def num_tokens(self) -> int:
        return sum([end - start for _, start, end, _, _ in self.sequences])

    @cached_property
    def num_decoding(self) -> int:
        """The number of sequences that compute one token, beside a draft, and sample the next."""
        parts = self.sequences
        return [end - start - len(draft) for _, start, end, draws, draft in parts if draws].count(1)

    @cached_property
    def num_draft_tokens(self) -> int:
        return sum([len(draft) for _, _, _, _, draft in self.sequences])

    @cached_property
    def rows(self) -> tuple[ScheduledSequence, ...]:
        """One part for each draw, as `ScheduledSequence.rows`."""
        drawn = tuple(s for s in self.sequences if s.samples)
        if not any(s.draft for s in drawn):
            return drawn
        return tuple(row for s in drawn for row in s.rows)


class Sample(NamedTuple):
    """The runner's result for one scheduled sequence, in the order of the batch."""

    token_id: int | None  # None: the sequence did not sample in this step
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for positions [start + 1, end] of the prompt
    is_finite: bool = True  # False: the logits held NaN or infinity, token_id is None
    # The draws after each token of the draft, in order, up to the first token that was not drawn.
    after_draft: tuple[Sample, ...] = ()
    # Of a draft whose draws have no log-probabilities, instead of `after_draft`: the kept draws
    # (`engine.outputs.kept_draws`), the first one included.
    kept: tuple[int, ...] = ()


class LaunchedStep(Protocol):
    def draw(self) -> None:
        """Draws the tokens that need the host's newest token: those of rows with a grammar or
        penalties. Called once, after the step before was collected and committed, and before this
        step is collected or the next one is launched. Nothing is left to do if `launch` drew all.
        """
        ...

    def collect(self) -> tuple[Sample, ...]:
        """Waits for the device. Called in the order of the launches, and once, or again if the
        first call ran out of memory."""
        ...


class ModelFacts(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class Runner(Protocol):
    """The owner of the device, and the seam between policy (integers) and mechanism (tensors)."""

    num_blocks: int
    kv_layout: KVLayout
    max_model_len: int
    runs_ahead: bool  # `launch` returns while the device works: the next step can be planned
    max_draws: int  # tokens drawn in a step, at most: of sequences and of drafts
    graph_sizes: tuple[int, ...]  # rows to which decodes are padded, ascending; (): they are not
    kv_copies: BlockCopier | None  # None: KV has no host tier

    @property
    def model_config(self) -> ModelFacts: ...
    @property
    def adapters(self) -> AdapterStore: ...
    @property
    def num_late_compilations(self) -> int: ...

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Starts one forward pass and one draw for each sequence that samples. At most one earlier
        step is still uncollected. An exception leaves the runner as usable as before."""
        ...

    def is_out_of_memory(self, error: Exception) -> bool:
        """Returns True if an error of `launch` or `collect` means that the same step may succeed
        with fewer tokens."""
        ...

    def free_cache(self) -> None:
        """Frees the allocator's memory that is not in use. Waits for the device."""
        ...

    def close(self) -> None:
        """Ends the processes that help with steps."""
        ...
