"""Incremental detokenizing and stop strings against the library's result for the whole text."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.errors import UnsupportedModelError
from serve_app.text.detokenize import MAX_HELD_BYTES, Detokenizer, StopMatcher, build_stop_table
from serve_app.text.tokenizer import TextTokenizer
from tests.text_factory import byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = TextTokenizer(byte_level_tokenizer(), "<s>")
PIECES = TextTokenizer(sentencepiece_tokenizer(), "<s>")
TEXTS = ["👩‍👩‍👧‍👦 family", "ภาษาไทย สวัสดี", "e\u0301 naïve", "🏳️‍🌈", "plain", "日本語"]


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join(map(detokenizer.push, ids)) + detokenizer.finish()


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PIECES], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False], ids=["skip-special", "keep-special"])
def test_streamed_text_is_the_text_of_all_ids(tokenizer: TextTokenizer, skip: bool) -> None:
    draw = random.Random(7)
    for _ in range(5_000):  # 20,000 over the four cases
        ids = draw.choices(range(tokenizer.vocab_size), k=draw.randrange(1, 25))
        text = stream(tokenizer.detokenizer(skip_special_tokens=skip), ids)
        assert text == tokenizer.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("text", TEXTS)
def test_no_replacement_character_in_whole_text(text: str) -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    deltas = [detokenizer.push(i) for i in BYTE_LEVEL.encode(text, add_special_tokens=False)]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == text
    assert detokenizer.finish() == ""


def test_character_comes_with_its_last_byte() -> None:
    ids = [BYTE_LEVEL.token_id(c) for c in "ðŁĺĢ"]  # the four bytes of a smiley
    detokenizer = BYTE_LEVEL.detokenizer()
    assert [detokenizer.push(i) for i in ids if i is not None] == ["", "", "", "😀"]


def test_character_that_never_completes_is_replaced_at_the_end() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    first = BYTE_LEVEL.token_id("ð")
    assert first is not None
    assert detokenizer.push(first) == ""
    assert detokenizer.finish() == "\ufffd"


def test_output_that_begins_inside_a_character_shows_nothing_of_the_prompt() -> None:
    ids = [BYTE_LEVEL.token_id(c) for c in "ĺĢa"]
    assert stream(BYTE_LEVEL.detokenizer(), [i for i in ids if i is not None]) == "\ufffd\ufffda"


def test_endless_run_of_byte_tokens_is_not_withheld() -> None:
    detokenizer = PIECES.detokenizer()
    ids = [3 + byte for byte in ("ไ" * 20).encode()]
    deltas = [detokenizer.push(i) for i in ids]
    assert "".join(deltas) + detokenizer.finish() == "ไ" * 20
    assert len("".join(deltas[: MAX_HELD_BYTES + 1])) == (MAX_HELD_BYTES + 1) // 3


def test_first_space_is_kept_when_the_text_goes_on_from_a_prompt() -> None:
    world = PIECES.token_id("▁world")
    assert world is not None
    assert stream(PIECES.detokenizer(), [world]) == "world"
    assert stream(PIECES.detokenizer(at_start=False), [world]) == " world"


def test_ids_beyond_the_table_leave_no_text() -> None:
    for tokenizer in (BYTE_LEVEL, PIECES):
        assert stream(tokenizer.detokenizer(), [tokenizer.vocab_size + 7]) == ""
        assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""


def test_token_bytes_are_exact_for_parts_of_characters() -> None:
    token = BYTE_LEVEL.token_id("ð")
    assert token is not None
    assert BYTE_LEVEL.token_bytes(token) == b"\xf0"
    assert BYTE_LEVEL.token_text(token) == "\ufffd"
    assert PIECES.token_bytes(3 + 0xE0) == b"\xe0"


def test_tokenizer_with_an_unknown_decoder_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b</w>": 1}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    with pytest.raises(UnsupportedModelError, match="BPEDecoder"):
        TextTokenizer(tokenizer)


def test_beginning_of_text_is_never_doubled() -> None:
    once = BYTE_LEVEL.encode("fox", add_special_tokens=True)
    assert once[0] == 0
    assert BYTE_LEVEL.encode("<s>fox", add_special_tokens=True) == once
    # A tokenizer that adds no token encodes the text as it is.
    assert PIECES.encode("<s><s>a", add_special_tokens=True)[:2] == [1, 1]


@given(st.text(max_size=200))
def test_lower_bound_of_the_token_count_holds(text: str) -> None:
    num_tokens = len(BYTE_LEVEL.encode(text, add_special_tokens=False))
    assert BYTE_LEVEL.min_tokens(text) <= num_tokens


def cut_by_definition(text: str, stops: Sequence[str], first_end: int, include: bool) -> str:
    """Returns the text up to the stop string that ends first, the longest of several. Ends up to
    `first_end` do not count."""
    for end in range(first_end + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - max(map(len, found))]
    return text


@settings(max_examples=600, deadline=None)
@given(
    pieces=st.lists(st.text("abc\n", max_size=4), max_size=12),
    stops=st.lists(st.text("abc\n", min_size=1, max_size=5), min_size=1, max_size=4),
    min_pieces=st.integers(0, 4),
    include=st.booleans(),
)
@example(pieces=["ab", "c"], stops=["abc", "b"], min_pieces=1, include=False)
def test_streamed_stops_equal_the_definition(
    pieces: list[str], stops: list[str], min_pieces: int, include: bool
) -> None:
    matcher = StopMatcher(build_stop_table(stops), include_stop=include)
    given_out = ""
    expected = cut_by_definition("".join(pieces), stops, len("".join(pieces[:min_pieces])), include)
    for index, piece in enumerate(pieces):
        given_out += matcher.push(piece, may_stop=index >= min_pieces)
        assert expected.startswith(given_out), "a part of a stop string was given out"
        if matcher.stop is not None:
            break
    else:
        given_out += matcher.finish()
    assert given_out == expected


def test_only_a_possible_beginning_of_a_stop_is_held_back() -> None:
    matcher = StopMatcher(build_stop_table(["User:"]), include_stop=False)
    assert [matcher.push(text) for text in ("Hello", " Us", "ed", " U", "ser", ":x")] == [
        "Hello",
        " ",
        "Used",
        " ",
        "",
        "",
    ]
    assert matcher.stop == "User:"


def test_largest_allowed_stop_table_is_built() -> None:
    stops = [chr(97 + i) * 255 + "!" for i in range(16)]
    table = build_stop_table(stops)
    assert len(table.depth) == 16 * 256 + 1
    matcher = StopMatcher(table, include_stop=False)
    assert matcher.push("a" * 300 + "!" + "tail") == "a" * 45
    assert matcher.stop == stops[0]
