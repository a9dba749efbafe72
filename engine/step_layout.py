"""The shape of a step: all that its launch reads beside the numbers in its buffers.

The first rank of a tensor-parallel group sends it to the others, which then launch the same step on
their copy of the numbers. Values only.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.inputs import LoraReach
from kernels.lora_plan import LoraPlanCounts
from kernels.paged_plan import WorkCounts

Runs = tuple[tuple[str | None, int], ...]  # adapter key and number of tokens, in order


@dataclass(frozen=True, slots=True)
class StepLayout:
    is_decode: bool  # in the buffers of decode graphs; False: in those of all other steps
    size: int | None  # of the graph, of mixed steps in tokens; None: launched kernel by kernel
    reach: LoraReach
    num_tokens: int  # without padding
    num_sequences: int  # with that of a graph's size
    width: int  # of the block tables
    work: WorkCounts
    num_samples: int
    num_logit_rows: int = 0  # the rows that sample, then prompt rows; 0 in a graph
    lora: LoraPlanCounts | None = None  # None also in graphs: these have bounds instead
    head: LoraPlanCounts | None = None
    prompt_rows: tuple[int, ...] = ()  # of each sequence that has some, how many of logit_rows
    prompt_runs: Runs | None = None  # of all tokens, for prompt rows whose adapters have the head
    # False: the first rank draws, from logits that it alone changes or later than the launch, and
    # sends its tokens to the others. True: every rank draws, from the same bits.
    all_draw: bool = True
