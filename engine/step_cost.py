"""The duration of a step, fitted to recent steps: fixed + token * prompt tokens + sequence *
decoding.

Recursive least squares with forgetting, in information form. Steps with and without prompt tokens
forget only their own kind: a thousand decode steps must not wear off the cost of a prompt token. A
weak anchor at the last fit decides where steps carry no information (always the same number of
sequences). An exception, such as a step that compiles, has little weight where the fit is more
certain, and is forgotten once a later step shows that it was an exception. Numbers only.

Next to the fit, `LongestSteps` bounds the duration of a step that is not hung.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

Vector = tuple[float, float, float]

_TOKENS, _SEQUENCES = 1024.0, 64.0  # units that make the three terms alike in size
_KEEP = 0.98  # factor on a kind's weight at each new step of it: about the newest 50 count
_ANCHOR = 0.01  # weight of the last fit, in steps
_FAR = 4.0  # times the expected duration, or a part of it
_KNOWS = 0.5  # leverage below which the fit is more certain than one step
_DISCOUNT = 0.01  # factor on all earlier steps once a step shows an exception among them
_LEAST_WEIGHT = 1e-4
_SKIPPED = 2  # steps at a process's beginning
_ALL, _EVERY = 64, 4  # later every fourth step without prompt tokens is enough: 25 us each
_FADES = 0.98  # factor on a longest step at each new step of its size
_NEW = 32  # steps
_NEWEST = 0.1  # share of a new step in the mean of its size
_RECENT = 0.9  # factor on the time that prompt tokens added, at each new step with some
_SIZES = 16  # of decoding sequences, in powers of two
TILE = 128  # tokens: the sizes by which steps with prompts are remembered
_REMEMBERED = 128  # steps with prompt tokens
_BLIND = 4  # steps with prompts, after which one without is due
_ALIKE = 0.25  # of the time that prompts add: hardly more
_QUICKER = 1.1  # times the prompt tokens per second: more than noise
_LEAST: Vector = (1e-6, 1e-9 * _TOKENS, 0.0)  # 0 would mean unknown


class StepCost:
    """The fitted cost. All three terms are 0 before the first step, `token_s` before the first step
    with prompt tokens."""

    def __init__(self) -> None:
        self._decoding, self._prompts = _Kind(), _Kind()
        self._fit: Vector = (0.0, 0.0, 0.0)
        self._num_steps = 0
        # Recent prompt tokens, and the seconds that they added to steps of the same decoding
        # sequences; the largest recent step's prompt tokens.
        self._prompt_tokens, self._prompt_s = 0.0, 0.0
        self.largest_prompt = 0.0
        # By the decoding sequences in powers of two, and the tiles of all tokens of a step.
        self._added: list[dict[int, _Added]] = [{} for _ in range(_SIZES)]
        self._num_prompt_steps = 0
        # Means of recent steps without prompts, by their sequences in powers of two:
        # (sequences, seconds)
        self._decode_steps = [(0.0, 0.0)] * _SIZES

    @property
    def fixed_s(self) -> float:
        return self._fit[0]

    @property
    def token_s(self) -> float:
        return self._fit[1] / _TOKENS

    @property
    def sequence_s(self) -> float:
        return self._fit[2] / _SEQUENCES

    @property
    def added_token_s(self) -> float:
        """The seconds that a prompt token adds to a step of the same decoding sequences; 0 while
        unknown. `token_s` cannot replace it: while all steps have the same number of tokens, the
        fit does not show which part of them the prompts need (on an H200 40 us instead of 18)."""
        if not self._prompt_tokens or not any(seconds for _, seconds in self._decode_steps):
            return 0.0
        return max(_LEAST[1] / _TOKENS, self._prompt_s / self._prompt_tokens)

    def seconds(self, num_prompt_tokens: int, num_decoding: int) -> float:
        """Returns the expected duration of a step; 0 while unknown."""
        return _dot(self._fit, (1.0, num_prompt_tokens / _TOKENS, num_decoding / _SEQUENCES))

    def decode_s(self, num_decoding: int) -> float:
        """Returns the seconds of a step that only decodes, from steps of a similar number of
        sequences. From steps of fewer, a sequence more costs a prompt token, since the fit does
        not reach from five sequences to hundreds."""
        size = _size(num_decoding)
        for smaller in range(size, -1, -1):
            num_seen, seconds = self._decode_steps[smaller]
            if seconds:
                return seconds + max(0.0, num_decoding - num_seen) * self.added_token_s
        return next((seconds for _, seconds in self._decode_steps if seconds), 0.0)

    @property
    def lacks_decode_steps(self) -> bool:
        """Returns True if steps with prompts were measured beside decoding sequences, and none
        without: in the first burst of a process none would come before its last prompt."""
        return self._num_prompt_steps >= _BLIND and not any(s for _, s in self._decode_steps)

    @property
    def weights_s(self) -> float:
        """The seconds of a step that reads the weights for next to nothing else; 0 while unknown.

        Steps of one sequence are rare in a busy engine, and slow: most of them end a burst, with
        nothing launched beside them (5.2 instead of 4.3 ms on an H200). Hence the shortest step of
        any size. From the smallest size a prompt token's cost is taken off for each sequence beyond
        the first, but not more than half of it, because that cost is an estimate."""
        known = [(num_seen, seconds) for num_seen, seconds in self._decode_steps if seconds]
        if not known:
            return 0.0
        num_seen, seconds = known[0]
        beyond_s = max(0.0, num_seen - 1.0) * self.added_token_s
        return min([max(seconds / 2, seconds - beyond_s), *(other_s for _, other_s in known[1:])])

    def fitting_tokens(self, num_tokens: int, num_decoding: int, added_s: float) -> int:
        """Returns the tokens of the largest step, `num_decoding` of them decoding, to which prompts
        are known to add no more than `added_s`, or hardly more than to one of `num_tokens`; or one
        tile more if that is unknown. Fewer than `num_tokens` if prompts are known to add much more
        to such a step, or to be computed faster in smaller ones; `num_tokens` themselves if it is
        unknown.

        The host's time to launch a step with prompts does not depend on its size. Where it is
        longer than the device's, smaller steps are no shorter. Steps that are no graphs may last
        twice as long as ones that are hardly smaller."""
        known = self._recently_added(num_decoding)
        tile = num_tokens // TILE
        own = known.get(tile)
        if own is None:
            return num_tokens
        fitting = {
            other: one
            for other, one in known.items()
            if one.added_s <= added_s
            or (one.num_prompt > own.num_prompt and self._is_as_quick(one, own))
        }
        if own.added_s <= (1 + _ALIKE) * added_s:
            fitting[tile] = own
        if not fitting:
            return num_tokens
        largest, quickest = max(fitting), self._quickest(fitting, num_decoding)
        if quickest != largest:
            return quickest * TILE
        if own.added_s > added_s and largest <= tile:
            return num_tokens if largest == tile else largest * TILE
        return (largest if largest + 1 in known else largest + 1) * TILE

    def _quickest(self, fitting: Mapping[int, _Added], num_decoding: int) -> int:
        """Returns the tiles of the largest step, or of a smaller one if prompts are computed faster
        in many such steps: the larger one is beyond the largest graph."""
        decode_s = self.decode_s(num_decoding)
        rates = {
            tile: max(0, tile * TILE - num_decoding) / (decode_s + one.added_s)
            for tile, one in fitting.items()
        }
        largest, quickest = max(rates), max(rates, key=rates.__getitem__)
        return quickest if rates[quickest] > _QUICKER * rates[largest] else largest

    @staticmethod
    def _is_as_quick(larger: _Added, smaller: _Added) -> bool:
        longer = larger.added_s / smaller.added_s - 1.0
        return longer < min(_ALIKE, (larger.num_prompt / smaller.num_prompt - 1.0) / 2)

    def _recently_added(self, num_decoding: int) -> dict[int, _Added]:
        """Returns the means of recent steps with prompts beside a similar number of decoding
        sequences, by the tiles of all their tokens."""
        oldest = self._num_prompt_steps - _REMEMBERED
        of_size = self._added[_size(num_decoding)].items()
        return {tile: one for tile, one in of_size if one.newest > oldest}

    def _observe_added(self, num_prompt: int, num_decoding: int, added_s: float) -> None:
        self._num_prompt_steps += 1
        tile, added_s = (num_prompt + num_decoding) // TILE, max(added_s, 1e-9)
        mean = self._recently_added(num_decoding).get(tile)
        if mean is None:
            mean = self._added[_size(num_decoding)][tile] = _Added(added_s, num_prompt)
        mean.added_s += _NEWEST * (min(added_s, _FAR * mean.added_s) - mean.added_s)
        mean.num_prompt += _NEWEST * (num_prompt - mean.num_prompt)
        mean.newest = self._num_prompt_steps

    def observe(self, num_prompt_tokens: int, num_decoding: int, seconds: float) -> None:
        self._num_steps += 1
        if self._num_steps <= _SKIPPED:
            return
        is_spared = self._num_steps > _ALL and self._num_steps % _EVERY
        if not num_prompt_tokens and is_spared and not self.lacks_decode_steps:
            return
        seconds = max(seconds, 1e-9)
        if num_prompt_tokens:
            added_s = max(0.0, seconds - self.decode_s(num_decoding))
            self._prompt_tokens = _RECENT * self._prompt_tokens + num_prompt_tokens
            self._prompt_s = _RECENT * self._prompt_s + added_s
            if num_decoding:
                self._observe_added(num_prompt_tokens, num_decoding, added_s)
            self.largest_prompt = max(num_prompt_tokens, _FADES * self.largest_prompt)
        else:
            self._observe_decode(num_decoding, seconds)
        x = (1.0, num_prompt_tokens / _TOKENS, num_decoding / _SEQUENCES)
        expected = _dot(self._fit, x)
        # Errors grow with the step: a long step must not drown the information of short ones.
        usual = self._fit[0] + self._fit[2]
        size = min(expected, seconds) if expected else seconds
        weight = max(_LEAST_WEIGHT, min(1.0, (usual / size) ** 2)) if usual else 1.0
        if seconds > _FAR * expected and weight * self._leverage(x) < _KNOWS:
            seconds = _FAR * expected
        elif seconds < expected / _FAR:
            self._decoding.forget(_DISCOUNT)
            self._prompts.forget(_DISCOUNT)
            self._fit = (0.0, 0.0, 0.0)  # no anchor
        kind = self._prompts if num_prompt_tokens else self._decoding
        kind.add(x, seconds, weight)
        self._solve()

    def _observe_decode(self, num_decoding: int, seconds: float) -> None:
        size = _size(num_decoding)
        mean, mean_s = self._decode_steps[size]
        share = _NEWEST if mean_s else 1.0
        if mean_s:  # an exception, such as a step that compiles, moves the mean little
            seconds = min(seconds, _FAR * mean_s)
        self._decode_steps[size] = (
            mean + share * (num_decoding - mean),
            mean_s + share * (seconds - mean_s),
        )

    def _information(self) -> list[list[float]]:
        a, b = self._decoding.squares, self._prompts.squares
        matrix = [[a[i][j] + b[i][j] for j in range(3)] for i in range(3)]
        for i in range(3):
            matrix[i][i] += _ANCHOR
        return matrix

    def _leverage(self, x: Vector) -> float:
        """Returns the distance of a step from the recorded steps: near 0 among many like it."""
        return _dot(x, _solved(self._information(), list(x), (0, 1, 2)))

    def _solve(self) -> None:
        """Returns the best fit without negative terms."""
        matrix = self._information()
        target = [
            self._decoding.products[i] + self._prompts.products[i] + _ANCHOR * self._fit[i]
            for i in range(3)
        ]
        best, best_loss = (0.0, 0.0, 0.0), 0.0
        for count in (3, 2, 1):
            for used in combinations(range(3), count):
                found = _solved(matrix, target, used)
                if min(found) >= 0.0 and (loss := -_dot(found, target)) < best_loss:
                    best, best_loss = found, loss  # at a minimum the loss is -found*target/2
            if count == 3 and best_loss < 0.0:
                break
        least = _LEAST if self._prompts.squares[0][0] else (_LEAST[0], 0.0, 0.0)
        self._fit = (max(best[0], least[0]), max(best[1], least[1]), max(best[2], least[2]))


@dataclass(slots=True)
class _Added:
    """The mean of steps with prompts of a similar size."""

    added_s: float  # by the prompts
    num_prompt: float  # tokens
    newest: int = 0  # the number of the newest of these steps


class LongestSteps:
    """The longest recent steps, by their number of prompt tokens in powers of two."""

    def __init__(self) -> None:
        self._longest_s = [0.0] * 32  # 0: none yet
        self._num_steps = 0

    def observe(self, num_prompt_tokens: int, seconds: float) -> None:
        self._num_steps += 1
        size = min(num_prompt_tokens.bit_length(), 31)
        self._longest_s[size] = max(seconds, _FADES * self._longest_s[size])

    def expect(self, num_prompt_tokens: int) -> float:
        """Returns seconds. If no step of this size came, they follow from smaller steps in
        proportion, otherwise from larger ones. Infinite at a process's beginning, when kernels may
        have to be compiled."""
        if self._num_steps < _NEW:
            return math.inf
        size = min(num_prompt_tokens.bit_length(), 31)
        for smaller in range(size, -1, -1):
            if self._longest_s[smaller]:
                return self._longest_s[smaller] * 2.0 ** (size - smaller)
        return next((longest_s for longest_s in self._longest_s if longest_s), math.inf)


class _Kind:
    """Sums over the steps of one kind, the newest with weight 1."""

    def __init__(self) -> None:
        self.squares = [[0.0] * 3 for _ in range(3)]
        self.products = [0.0] * 3

    def forget(self, keep: float) -> None:
        self.squares = [[keep * value for value in row] for row in self.squares]
        self.products = [keep * value for value in self.products]

    def add(self, x: Vector, seconds: float, weight: float) -> None:
        for i in range(3):
            row, xi = self.squares[i], x[i] * weight
            for j in range(3):
                row[j] = row[j] * _KEEP + xi * x[j]
            self.products[i] = self.products[i] * _KEEP + xi * seconds


def _size(num_decoding: int) -> int:
    return min(num_decoding.bit_length(), _SIZES - 1)


def _dot(a: Vector, b: Vector | list[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _solved(matrix: list[list[float]], target: list[float], used: tuple[int, ...]) -> Vector:
    """Solves a positive definite matrix in the variables `used`; the others are 0."""
    rows = [[matrix[i][j] for j in used] + [target[i]] for i in used]
    size = len(used)
    for k in range(size):
        pivot = rows[k]
        for row in rows[k + 1 :]:
            factor = row[k] / pivot[k]
            for j in range(k, size + 1):
                row[j] -= factor * pivot[j]
    found = [0.0, 0.0, 0.0]
    for k in reversed(range(size)):
        row = rows[k]
        known = sum(row[j] * found[used[j]] for j in range(k + 1, size))
        found[used[k]] = (row[size] - known) / row[k]
    return found[0], found[1], found[2]
