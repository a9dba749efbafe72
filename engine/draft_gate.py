"""Chooses how many tokens of the drafts a step verifies: as many as are expected to save time.

Two things are learned. The share of draft tokens that are drawn, by the length of the match before
them: for each source of drafts, and for each sequence in relation to its source. It is learned from
drafts that no step verified, too, so a gate that is closed costs nothing and opens by itself. And
the duration of steps, by their sequences and draft tokens; by the size of their graph, where steps
are padded to one: up to its size rows are free, and a larger graph may cost much more (32 sequences
of Llama-3-8B on an H200 take 6.9 ms in 128 rows, 7.7 in 160). The choice is the number of draft
tokens with the most expected tokens per second, as in "TurboSpec" (Liu et al., arXiv 2406.14066).
Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from engine.drafts import Draft

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

_BUCKETS = 7  # of lengths in powers of two
_KEEP = 0.98  # factor on earlier trials of a source at each new one of the same bucket
_OWN_KEEP = 0.9  # the same of a sequence: the text changes
_OWN_WEIGHT = 3.0  # hits by which a sequence is taken for an average one at first
_PRIOR = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # before the first trials: as of the demo
_PRIOR_WEIGHT = 2.0
_MOST_SOURCES = 4096
_MOST = 0.98  # of a probability
_GAIN = 1.03  # a draft that is expected to save less is left out
_NEWEST = 0.1  # share of a new step in the mean of its kind
_FIRST = 2  # steps of a kind of which the shortest counts
_FAR = 4.0  # times its mean: an exception, such as a step that compiles
_STALE = 128  # steps after which the steps without drafts are measured again
_LEAST = 0.05  # probability of a token that is worth its row, be it almost free
_BOLD = 8.0  # times the largest measured number of draft tokens
# Steps for each measurement, and at most, after which a mean does not keep drafts out any more: one
# slow step, perhaps the host's, must not do so for long.
_TRUSTED, _FORGOTTEN = 32, 512


def _bucket(count: int) -> int:
    return min(count.bit_length(), _BUCKETS - 1)


@dataclass(slots=True)
class Acceptance:
    """The trials of one source of drafts, by the length of the match."""

    hits: list[float] = field(default_factory=lambda: [_PRIOR_WEIGHT * p for p in _PRIOR])
    trials: list[float] = field(default_factory=lambda: [_PRIOR_WEIGHT] * _BUCKETS)
    shares: list[float] = field(default_factory=lambda: [*_PRIOR])  # hits / trials

    def observe(self, match_length: int, *, is_hit: bool) -> None:
        bucket = _bucket(match_length)
        self.hits[bucket] = _KEEP * self.hits[bucket] + is_hit
        self.trials[bucket] = _KEEP * self.trials[bucket] + 1.0
        self.shares[bucket] = self.hits[bucket] / self.trials[bucket]

    def probability(self, match_length: int) -> float:
        return self.shares[_bucket(match_length)]


@dataclass(slots=True)
class OwnAcceptance:
    """The trials of one sequence, in relation to the expectation from its source."""

    source: Acceptance
    hits: float = _OWN_WEIGHT
    expected: float = _OWN_WEIGHT

    def observe(self, draft: Draft, token_ids: Sequence[int]) -> None:
        """Compares a draft, verified or not, with the tokens that came."""
        for index, (guess, token_id) in enumerate(zip(draft.token_ids, token_ids, strict=False)):
            length, is_hit = draft.match_length + index, guess == token_id
            self.hits = _OWN_KEEP * self.hits + is_hit
            self.expected = _OWN_KEEP * self.expected + self.source.probability(length)
            self.source.observe(length, is_hit=is_hit)
            if not is_hit:
                break

    def survivals(self, draft: Draft) -> list[float]:
        """Returns the probability of each token of the draft that it and all before it are drawn,
        without tokens that no step is worth. The device waits for it."""
        ratio = (self.hits + _OWN_WEIGHT) / (self.expected + _OWN_WEIGHT)
        survival, found, shares = 1.0, [], self.source.shares
        for length in range(draft.match_length, draft.match_length + len(draft.token_ids)):
            bits = length.bit_length()
            share = ratio * (shares[bits] if bits < _BUCKETS else shares[-1])
            survival *= share if share < _MOST else _MOST
            if survival < _LEAST:
                break
            found.append(survival)
        return found


class Acceptances:
    """The acceptance of each source, of a bounded number of them."""

    def __init__(self) -> None:
        self._sources: OrderedDict[Hashable, Acceptance] = OrderedDict()

    def of_sequence(self, source: Hashable) -> OwnAcceptance:
        found = self._sources.setdefault(source, Acceptance())
        self._sources.move_to_end(source)
        if len(self._sources) > _MOST_SOURCES:
            self._sources.popitem(last=False)
        return OwnAcceptance(found)


@dataclass(slots=True)
class _Mean:
    """The mean of recent steps of one kind."""

    num_sequences: float
    num_drafted: float
    seconds: float
    last_step: int
    num_steps: int = 1

    @property
    def trusted(self) -> int:
        """The steps for which the mean counts after its newest step."""
        return min(_TRUSTED * self.num_steps, _FORGOTTEN)

    def add(self, num_sequences: int, num_drafted: int, seconds: float, step: int) -> None:
        self.num_steps += 1
        share = max(_NEWEST, 1.0 / self.num_steps)
        seconds = min(seconds, _FAR * self.seconds)
        self.num_sequences += share * (num_sequences - self.num_sequences)
        self.num_drafted += share * (num_drafted - self.num_drafted)
        if self.num_steps <= _FIRST:  # a first step may be an exception
            self.seconds = min(seconds, self.seconds)
        else:
            self.seconds += share * (seconds - self.seconds)
        self.last_step = step


class DraftGate:
    def __init__(self, graph_sizes: Sequence[int] = ()) -> None:
        """`graph_sizes`: the rows to which steps are padded, ascending; (): they are not."""
        self._sizes = np.array(graph_sizes, dtype=np.int64)
        # Steps without prompt tokens, by sequences in powers of two, and then by the rows with
        # padding or by draft tokens in powers of two; 0: no drafts.
        self._means: dict[tuple[int, int], _Mean] = {}
        self._step = 0
        # As `_expected_s` returns it, with the step and the arguments of its call.
        self._expected: tuple[tuple[int, int, float, int], float, Floats] | None = None

    def observe(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Records a step without prompt tokens."""
        self._step += 1
        kind = num_drafted.bit_length()
        if num_drafted and len(self._sizes):
            kind = int(self._graph_of(num_sequences + num_drafted))
        key = num_sequences.bit_length(), kind
        mean = self._means.get(key)
        if mean is None or self._step - mean.last_step > _FORGOTTEN:
            self._means[key] = _Mean(num_sequences, num_drafted, seconds, self._step)
        else:
            mean.add(num_sequences, num_drafted, seconds, self._step)

    def is_stale(self, num_sequences: int) -> bool:
        """Returns True if a step without drafts has to be measured."""
        return self._size_of(num_sequences) is None

    def _size_of(self, num_sequences: int) -> int | None:
        """Returns the size of the steps that stand for steps of so many sequences: the nearest size
        whose steps without drafts were measured lately. A batch of 32 has 31 for one step each time
        that a request ends, too few to be measured at all."""
        size = num_sequences.bit_length()
        for one in (size, size + 1, size - 1):
            plain = self._means.get((one, 0))
            if plain is not None and self._step - plain.last_step <= _STALE:
                return one
        return None

    def choose(
        self,
        num_sequences: int,
        survivals: Sequence[Sequence[float]],
        row_s: float,
        num_others: int = 0,
    ) -> list[int]:
        """Returns the number of draft tokens to verify of each draft, from the `survivals` of its
        tokens. `row_s`: the fitted seconds of one more sequence, which stand for those of a row
        where a step of fewer draft tokens than any measured one is estimated. `num_others`: draft
        tokens of the step that have no gate, rows of the same graph."""
        counts = [0] * len(survivals)
        if self.is_stale(num_sequences):
            return counts
        plain_s, seconds = self._expected_s(num_sequences, row_s, num_others)
        values = np.array(list(chain.from_iterable(survivals)))
        # Survivals fall along a draft: the best ones of all drafts are beginnings of each.
        best = (-values).argsort(kind="stable")[: len(seconds)]
        found = values[best]
        rates = (num_sequences + found.cumsum()) / seconds[: len(best)]
        rates = rates[: np.count_nonzero(found >= _LEAST)]
        most = int(rates.argmax()) if len(rates) else 0
        if not len(rates) or rates[most] <= _GAIN * num_sequences / plain_s:
            return counts
        owners = np.arange(len(survivals)).repeat([len(one) for one in survivals])
        chosen: list[int] = np.bincount(owners[best[: most + 1]], minlength=len(survivals)).tolist()
        return chosen

    def prepare(self, num_sequences: int, row_s: float) -> None:
        """Computes a part of the next `choose` with these arguments, while no device waits."""
        if not self.is_stale(num_sequences):
            self._expected_s(num_sequences, row_s)

    def _expected_s(
        self, num_sequences: int, row_s: float, num_others: int = 0
    ) -> tuple[float, Floats]:
        """Returns the expected duration of a step without drafts, and of steps with 1, 2 and more
        draft tokens, up to the most that may be tried."""
        key = self._step, num_sequences, row_s, num_others
        if self._expected is None or self._expected[0] != key:
            (_, plain_s), *points = self._points(num_sequences, row_s, num_others)
            # Unknown sizes are tried from small ones on: a wrong guess then costs little.
            most = int(_BOLD * points[-1][0]) + 1 if points else max(2, num_sequences // 8)
            num_rows = num_sequences + num_others
            most = int(self._room(num_rows, most))
            room = self._room(num_rows, np.arange(1, most + 1))
            seconds = _seconds(most, plain_s, points, row_s)[room - 1]
            self._expected = key, plain_s, seconds
        return self._expected[1:]

    def _room(self, num_rows: int, num_drafted: Any) -> Any:
        """Returns the most draft tokens beside these rows in the graph of so many, one number or
        an array."""
        if not len(self._sizes):
            return num_drafted
        return np.maximum(self._graph_of(num_rows + num_drafted) - num_rows, 1)

    def _graph_of(self, num_rows: Any) -> Any:
        """Returns the size of the graph of so many rows, one number or an array; the largest one
        where none is large enough."""
        return self._sizes[self._sizes[:-1].searchsorted(num_rows)]

    def _points(
        self, num_sequences: int, row_s: float, num_others: int
    ) -> list[tuple[float, float]]:
        """Returns the (draft tokens, seconds) of measured steps of about so many sequences, by
        their draft tokens."""
        size = self._size_of(num_sequences)
        assert size is not None
        points = []
        for (of_size, kind), mean in sorted(self._means.items()):
            if of_size != size or (kind and self._step - mean.last_step > mean.trusted):
                continue
            num_drafted = mean.num_drafted
            if kind and len(self._sizes):
                num_drafted = kind - num_sequences - num_others
                if num_drafted < 1:
                    continue
            seconds = mean.seconds + row_s * (num_sequences - mean.num_sequences)
            points.append((num_drafted, max(0.5 * mean.seconds, seconds)))
        return points


def _seconds(
    most: int, plain_s: float, points: Sequence[tuple[float, float]], row_s: float
) -> Floats:
    """Returns the expected durations of steps with 1 to `most` draft tokens. `points`: of steps
    with drafts; a part of their cost may be the same for any number of draft tokens, as where only
    steps without drafts run ahead. Beyond the only point more rows are taken to be free, as they
    are on a GPU that reads its weights, and beyond the last of several to cost half of the rows
    before: where they cost more, the first step of that size shows it."""
    if not points:
        return np.full(most, plain_s)
    counts = np.arange(1.0, most + 1)
    (begin, begin_s), *others = points
    seconds = np.maximum(plain_s, begin_s - row_s * (begin - counts))
    slope = 0.0
    for end, end_s in others:
        slope = max(0.0, end_s - begin_s) / max(1.0, end - begin)
        first = int(begin)  # the place of the first count above it
        seconds[first:] = begin_s + slope * (counts[first:] - begin)
        begin, begin_s = end, end_s
    first = int(begin)
    seconds[first:] = begin_s + 0.5 * slope * (counts[first:] - begin)
    return seconds
