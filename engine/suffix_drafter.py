"""Drafts from earlier text: the tokens behind the last occurrence of the newest tokens.

As prompt lookup (Saxena, 2023) and SuffixDecoding (Oliaro et al., arXiv 2411.04975), without a
tree: an index of the n-grams of three lengths, longest first, in the prompts and outputs of one
adapter key and cache salt. Texts of another tenant or adapter are never read. An entry leads to the
latest occurrence; the tokens before it give the length of the match. On answers of the demo's
adapters it gives 1.43 (sql), 1.88 (extract) and 2.91 (tools) tokens a step, and the longest suffix
with its most frequent continuation 1.41, 1.81 and 2.89.

The index of a source consists of segments of a bounded number of tokens; the oldest segments of all
sources are dropped. The tokens of a step are added after the next launch: until then only their own
sequence finds them. Free of tensors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.drafts import Draft
from engine.types import Sequence

_LENGTHS = (4, 2, 1)  # of the n-grams
_LONGEST = 32  # tokens of a match that are counted
# For a token in the index and its text: measured 330 to 460, by the fill of the dictionaries.
TOKEN_BYTES = 512
# Tokens of a text that the index keeps without their n-grams, for the memory of one with them: a
# pointer and an integer each.
_TEXT_ONLY = TOKEN_BYTES // 36
_NUM_SEGMENTS = 8  # of the whole index: the part that is dropped at a time
# Tokens of the index for the memory of a segment without any: some 400 bytes, and as much for its
# source.
_SEGMENT_TOKENS = 2
_MOST_AT_ONCE = 4096  # tokens of a long prompt that one step adds: 3 ms
_FEW = 32  # tokens, as of a step: they are added one by one, after the next launch
_PLACE_BITS = 32

_Source = tuple[str | None, str]  # adapter key, cache salt


@dataclass(slots=True, eq=False)
class _Segment:
    source: _Source
    places: dict[int, int] = field(default_factory=dict)  # hash of an n-gram -> text and position
    texts: list[list[int]] = field(default_factory=list)  # of sequences; they only grow
    num_tokens: int = 0
    # For itself and the rest of texts that have ended, in tokens of the index.
    num_kept: int = _SEGMENT_TOKENS


@dataclass(slots=True, eq=False)
class _Text:
    """A running sequence's part of the index."""

    num_indexed: int  # the n-grams that end before this position
    segment: _Segment | None = None  # of its newest n-grams
    number: int = 0  # in the segment's texts
    first: int = 0  # its first position there


class SuffixDrafter:
    """Implements `drafts.Drafter`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_tokens = max(_NUM_SEGMENTS, max_bytes // TOKEN_BYTES)
        self.num_tokens = 0  # in the index
        self._num_kept = 0  # as `_Segment.num_kept`, of all
        self._sources: dict[_Source, list[_Segment]] = {}  # oldest first
        self._segments: deque[_Segment] = deque()  # of all sources, oldest first
        self._running: dict[Sequence, _Text] = {}
        self._grown: list[Sequence] = []  # by a few tokens, which `learn` adds

    def propose(self, sequence: Sequence, limit: int) -> Draft | None:
        token_ids = sequence.token_ids
        stop, ends = len(token_ids) - 1, list[int]()
        text = self._running.get(sequence)
        if text is None or stop - text.num_indexed > _FEW:
            self._index(sequence)
        else:
            # Adding them takes longer than a look at them, and the device waits.
            self._grown.append(sequence)
            if token_ids[-1] in token_ids[text.num_indexed : stop]:
                places = range(stop, text.num_indexed, -1)
                ends = [end for end in places if token_ids[end - 1] == token_ids[-1]]
        segments = self._sources.get(_source(sequence), ())
        for length in _LENGTHS:
            if len(token_ids) < length:
                continue
            newest = token_ids[-length:]
            for end in ends:
                if end >= length and token_ids[end - length : end] == newest:
                    return _draft(token_ids, token_ids, end, length, limit)
            key = hash(tuple(newest))
            for segment in reversed(segments):
                place = segment.places.get(key)
                if place is None:
                    continue
                other = segment.texts[place >> _PLACE_BITS]
                end = (place & (1 << _PLACE_BITS) - 1) + 1
                if other[end - length : end] == newest:  # otherwise another n-gram of this hash
                    return _draft(token_ids, other, end, length, limit)
        return None

    def learn(self) -> None:
        for sequence in self._grown:
            if sequence in self._running:
                self._index(sequence)
        self._grown.clear()

    def end(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._index(sequence)
            self._keep(sequence, self._running.pop(sequence))

    def _index(self, sequence: Sequence) -> None:
        """Adds the n-grams that have a token after them by now."""
        text = self._running.get(sequence)
        if text is None:
            # The choices of a request share its prompt.
            is_first = sequence.choice == sequence.request.choices[0]
            text = _Text(0 if is_first else sequence.num_prompt_tokens)
            self._running[sequence] = text
        most = min(_MOST_AT_ONCE, max(1, self.max_tokens // _NUM_SEGMENTS))
        first, stop = text.num_indexed, min(len(sequence.token_ids) - 1, text.num_indexed + most)
        if stop <= first:
            return
        segment = self._open_segment(_source(sequence), stop - first)
        if text.segment is not segment:
            text.segment, text.number, text.first = segment, len(segment.texts), first
            segment.texts.append(sequence.token_ids)
        _add(segment.places, sequence.token_ids, first, stop, text.number << _PLACE_BITS)
        segment.num_tokens += stop - first
        self.num_tokens += stop - first
        text.num_indexed = stop

    def _keep(self, sequence: Sequence, text: _Text) -> None:
        """Counts the rest of an ended sequence's text: only the index keeps it from now on. The
        choices of a request have its prompt each."""
        segment = text.segment
        if segment is None or segment not in self._sources.get(segment.source, ()):
            return
        count = len(sequence.token_ids) - (text.num_indexed - text.first)
        segment.num_kept += count // _TEXT_ONLY
        self._num_kept += count // _TEXT_ONLY
        self._make_room(0)

    def _make_room(self, count: int) -> None:
        """Drops the oldest segments until there is room for so many tokens."""
        while self.num_tokens + self._num_kept + count > self.max_tokens and self._segments:
            oldest = self._segments.popleft()
            self.num_tokens -= oldest.num_tokens
            self._num_kept -= oldest.num_kept
            # A sequence refers to the segment of its newest n-grams, also one that waits for long.
            oldest.places.clear()
            oldest.texts.clear()
            self._sources[oldest.source].remove(oldest)
            if not self._sources[oldest.source]:
                del self._sources[oldest.source]

    def _open_segment(self, source: _Source, count: int) -> _Segment:
        """Returns the source's newest segment, or a new one if that is full. Drops others until
        there is room for so many tokens."""
        self._make_room(count + _SEGMENT_TOKENS)
        segments = self._sources.setdefault(source, [])
        if not segments or segments[-1].num_tokens + count > self.max_tokens // _NUM_SEGMENTS:
            segments.append(_Segment(source))
            self._segments.append(segments[-1])
            self._num_kept += _SEGMENT_TOKENS
        return segments[-1]


def _source(sequence: Sequence) -> _Source:
    return sequence.request.adapter, sequence.request.cache_salt


def _add(places: dict[int, int], token_ids: list[int], first: int, stop: int, base: int) -> None:
    """Adds the n-grams whose last tokens are at [first, stop)."""
    if stop - first <= _FEW and first >= _LENGTHS[0]:
        for end in range(first + 1, stop + 1):
            for length in _LENGTHS:
                places[hash(tuple(token_ids[end - length : end]))] = base + end - 1
        return
    for length in _LENGTHS:
        begin = max(first, length - 1)
        if begin < stop:
            window = token_ids[begin - length + 1 : stop]
            keys = map(hash, zip(*(window[i:] for i in range(length)), strict=False))
            places.update(zip(keys, range(base + begin, base + stop), strict=True))


def _draft(
    token_ids: list[int], text: list[int], end: int, length: int, limit: int
) -> Draft | None:
    """Returns the tokens from `end` of a text on, before which `length` tokens or more match."""
    longest = min(_LONGEST, len(token_ids), end)
    while length < longest and token_ids[-length - 1] == text[end - length - 1]:
        length += 1
    following = text[end : end + limit]
    if text is token_ids and following:  # a repetition goes on
        while len(following) < limit:
            following += following[: limit - len(following)]
    return Draft(tuple(following), length) if following else None
