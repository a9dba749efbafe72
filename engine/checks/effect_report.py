"""The results of a check of an adapter's effect, and the verdict: plain values and words.

    refused     the engine would not load it
    none        it changes nothing
    non_finite  with it the model gives NaN or infinity
    changes     it changes the logits of the probe prompts
    unprobed    it should change something, but the base was not run

Free of tensors, of the registry and of text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.types import OUTPUT_RANK, PROMPT_RANK

Verdict = Literal["refused", "none", "non_finite", "changes", "unprobed"]

# Below both, a greedy output equals the base's, but for ties.
_FAINT_KL = 1e-6
_FAINT_LOGIT = 1e-2
_LARGE_RATIO = 1.0  # a delta as large as the weight itself; trained ones have 0.001 to 0.2
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ModuleNorm:
    module: str
    site: str
    rank: int
    delta: float  # Frobenius norm of the adapter's addition to the weight
    base: float | None  # of the weight itself; None if the base was not loaded

    @property
    def ratio(self) -> float | None:
        return self.delta / self.base if self.base else None


@dataclass(frozen=True, slots=True)
class LogitChange:
    """The adapter against the base, at every position of every probe prompt."""

    num_prompts: int
    num_positions: int
    num_non_finite: int  # positions with non-finite logits under the adapter; left out of the rest
    max_delta: float  # largest change of any logit
    mean_delta: float  # of the absolute changes
    mean_kl: float  # of the base's distribution to the adapter's, in nats
    max_kl: float
    argmax_changed: float  # share of positions
    # Largest change between two runs of the base itself; None: the change is too large to be noise
    noise: float | None = None


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The cost of this one adapter, from its files to the pool that serving reads."""

    device: str
    dtype: str
    num_pages: int  # of 16 rank rows
    device_bytes: int
    host_bytes: int  # kept in host memory
    read_s: float  # read from disk, checked and packed
    copy_s: float  # to the device
    peak_host_bytes: int | None  # None if this system does not report it


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """The device on which the base would run, and whether it fits."""

    device: Literal["cpu", "cuda"]
    dtype: str
    num_parameters: int
    needed_bytes: int
    available_bytes: int

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes

    def words(self) -> str:
        return (
            f"the base has {self.num_parameters / 1e9:.2f} billion parameters, in {self.dtype} "
            f"{self.needed_bytes / 1024**3:.1f} GiB, of which this machine's {self.device} has "
            f"{self.available_bytes / 1024**3:.1f} free"
        )


@dataclass(frozen=True, slots=True)
class Parity:
    """The engine on the CPU against transformers and PEFT, both in float32: the logits at every
    position of some prompts, each given its own tokens (teacher forcing)."""

    max_difference: float  # of any logit; infinite if one of the two is not finite
    num_other_tokens: int  # positions with different greedy tokens
    num_positions: int
    num_prompts: int
    bound: float  # of max_difference
    versions: str  # of both libraries

    @property
    def is_within(self) -> bool:
        return self.max_difference <= self.bound

    @property
    def words(self) -> str:
        greedy = f"all {self.num_positions} greedy tokens equal"
        if self.num_other_tokens:
            greedy = f"{self.num_other_tokens} of {self.num_positions} greedy tokens differ"
        return f"logits within {self.max_difference:.1e} of PEFT's, {greedy} ({self.versions})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectReport:
    verdict: Verdict
    reason: str  # of the verdict, in words
    num_matched: int  # tensors of the file
    unmatched: tuple[str, ...]  # the reason for each other tensor
    num_targets: int  # modules of the base that could be adapted
    norms: tuple[ModuleNorm, ...] = ()
    logits: LogitChange | None = None
    load: LoadCost | None = None
    probe: ProbePlan | None = None  # how the logits were computed; None without them
    seconds: float  # duration of the check, the base's loading included
    brings: tuple[str, ...] = ()  # the parts of its own text side, such as "chat template"
    kind: str = ""  # LoRA or DoRA, with or without biases, in words; empty: refused before
    parity: Parity | None = None  # None: not compared
    invocation: tuple[int, ...] = ()  # aLoRA: it is active from these tokens on; (): always

    @property
    def delta_norm(self) -> float:
        return math.hypot(*(norm.delta for norm in self.norms))

    @property
    def ratio(self) -> float | None:
        """The norm of the whole delta relative to all weights it changes."""
        weights = [norm.base for norm in self.norms if norm.base is not None]
        return self.delta_norm / math.hypot(*weights) if any(weights) else None

    @property
    def sites(self) -> dict[str, float]:
        """Returns the norm of the delta of each site: its modules are adjacent."""
        found: dict[str, float] = {}
        for norm in self.norms:
            found[norm.site] = math.hypot(found.get(norm.site, 0.0), norm.delta)
        return found

    @property
    def cost(self) -> str:
        """Returns the charge of its tokens in words; empty if the engine refuses it."""
        if self.load is None or not self.norms:
            return ""
        rank = max(norm.rank for norm in self.norms)
        words = (
            f"rank {rank}: a prompt token is charged {PROMPT_RANK * rank:.1%} more than the "
            f"base's, an output token {OUTPUT_RANK * rank:.1%}"
        )
        if self.invocation:
            words += (
                ", from its invocation on; the tokens before are the base's and share its KV blocks"
            )
        return words

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(_warnings(self))


def judge(
    norms: tuple[ModuleNorm, ...], logits: LogitChange | None, why_unprobed: str
) -> tuple[Verdict, str]:
    if not any(norm.delta for norm in norms):
        return "none", "it changes nothing: in every module lora_B times lora_A is zero"
    if logits is None:
        return "unprobed", why_unprobed
    where = f"{logits.num_positions} positions of {logits.num_prompts} prompts"
    if logits.num_non_finite:
        return (
            "non_finite",
            f"with it logits are NaN or infinite at {logits.num_non_finite} of {where}",
        )
    if logits.noise is not None and logits.max_delta <= logits.noise:
        same = "are the base's, bit by bit" if logits.noise == 0 else "differ by no more than noise"
        return "none", f"it changes nothing: the logits at {where} {same}"
    return "changes", f"it changes the logits at {where}"


def _warnings(report: EffectReport) -> Iterator[str]:
    logits = report.logits
    if report.verdict == "changes" and logits is not None:
        is_faint = logits.mean_kl < _FAINT_KL or logits.max_delta < _FAINT_LOGIT
        if is_faint and logits.argmax_changed == 0:
            yield (
                f"the effect is faint: no logit changes by more than {logits.max_delta:.2g}, no "
                "greedy token changes; is it trained, and lora_alpha right?"
            )
    zero = [norm.module for norm in report.norms if norm.delta == 0]
    if zero and len(zero) < len(report.norms):
        yield f"no change in {len(zero)} of {len(report.norms)} modules: {_some(zero)}"
    large = [n.module for n in report.norms if n.ratio is not None and n.ratio >= _LARGE_RATIO]
    if large:
        yield (
            f"in {len(large)} of {len(report.norms)} modules the change is larger than the weight "
            f"itself ({_some(large)}); is lora_alpha right?"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
