"""A base model's tokenizer: text to ids, ids to text, and the exact bytes of every single token.

Reads `tokenizer.json` through the `tokenizers` library and, once at load, builds a table of the
text of each id, so streaming costs one look-up per token. Two families of decoders are supported,
byte-level BPE (Llama 3, Qwen, SmolLM2, Mistral Tekken) and SentencePiece with byte fallback (Llama
2, Mistral). The table is checked against the library; other tokenizers are refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from engine.errors import UnsupportedModelError
from serve_app.text.added_tokens import AddedToken, extend
from serve_app.text.detokenize import ByteDetokenizer, Detokenizer, PieceDetokenizer

_SHORT_CHARS = 16 * 1024
_NUM_CHECKS = 64  # random sequences compared with the library at load, about 3 ms


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's printable placeholders: character -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTES_OF_CHARACTER = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The text of each token, by id; empty for ids that the vocabulary skips."""

    raw: tuple[bytes, ...]  # for log-probabilities: a special token has its name as text
    special: frozenset[int]
    pieces: tuple[str | int | None, ...] | None  # SentencePiece only
    num_strip: int = 0


class TextTokenizer:
    """Stateless after loading and thread-safe; encode long texts off the event loop."""

    def __init__(self, tokenizer: Tokenizer, bos_token: str | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._bos_token = bos_token
        bos = None if bos_token is None else self.token_id(bos_token)
        added: list[int] = tokenizer.encode("", add_special_tokens=True).ids
        # A text that begins with it must not get a second one; None if the tokenizer adds none.
        self._own_bos = bos_token if bos is not None and added[:1] == [bos] else None
        self._table = table = _read_table(tokenizer)
        # The same without the texts of special tokens.
        self._visible_raw = tuple(
            b"" if i in table.special else token for i, token in enumerate(table.raw)
        )
        self._visible_pieces = tuple(
            None if i in table.special else piece for i, piece in enumerate(table.pieces or ())
        )
        self.vocab_size = len(table.raw)
        self.max_token_chars = max(len(token.decode("utf-8", "replace")) for token in table.raw)
        self._check_table()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= _SHORT_CHARS:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:  # computes no offsets, which halves the time, and releases the interpreter's lock
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids: list[int] = encoding.ids
        if add_special_tokens and self._own_bos and text.startswith(self._own_bos):
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, *, skip_special_tokens: bool = True, at_start: bool = True
    ) -> Detokenizer:
        """Returns a new detokenizer. Pass `at_start` False if the text continues a prompt, so that
        a leading space is part of it."""
        if self._table.pieces is None:
            return ByteDetokenizer(self._visible_raw if skip_special_tokens else self._table.raw)
        pieces = self._visible_pieces if skip_special_tokens else self._table.pieces
        return PieceDetokenizer(pieces, self._table.num_strip if at_start else 0)

    def with_tokens(self, added: tuple[AddedToken, ...]) -> TextTokenizer:
        """Returns a tokenizer with these tokens, too. Raises UnsupportedModelError."""
        return TextTokenizer(extend(self._tokenizer, added), self._bos_token)

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Returns True for control tokens, which `decode` leaves out by default."""
        return token_id in self._table.special

    def special_ids(self) -> dict[str, int]:
        """Returns the ids of the control tokens by their text."""
        return {self.token_text(token_id): token_id for token_id in sorted(self._table.special)}

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the token's bytes, which need not be whole characters; empty beyond the table."""
        return self._table.raw[token_id] if token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def min_tokens(self, text: str) -> int:
        """Returns a lower bound of the number of tokens, without tokenizing."""
        # A normalizer may compose characters (NFC: at most 4 to 1 in practice, Hangul 3 to 1).
        shrink = 1 if self._tokenizer.normalizer is None else 4
        return -(-len(text) // (self.max_token_chars * shrink))

    def min_tokens_by_prefixes(self, text: str, limit: int) -> int:
        """Returns a lower bound of the number of tokens if that exceeds `limit`, otherwise 0.

        Tokenizes prefixes of the text, each twice as long as the previous, until the bound exceeds
        `limit`: a text that is far too long costs no more than a text at the limit. The words of a
        prefix equal those of the whole text, except for its last word and for an added token that
        the cut splits.
        """
        size = 4 * limit + 4096
        while size < len(text):
            # A batch releases the interpreter's lock; `encode_batch_fast` returns no words.
            batch = self._tokenizer.encode_batch([text[:size]], add_special_tokens=False)
            words: list[int | None] = batch[0].word_ids
            last = words[-1] if words else None
            num_whole = len(words)
            while num_whole and words[num_whole - 1] == last:
                num_whole -= 1
            if num_whole - 4 * self.max_token_chars > limit:
                return num_whole - 4 * self.max_token_chars
            size *= 2
        return 0

    def _check_table(self) -> None:
        draw = random.Random(0)
        ids = [i for i, token in enumerate(self._table.raw) if token]
        for index in range(_NUM_CHECKS):
            sample = draw.choices(ids, k=12)
            skip = index % 2 == 0
            stream = self.detokenizer(skip_special_tokens=skip)
            ours = "".join(map(stream.push, sample)) + stream.finish()
            theirs = self.decode(sample, skip_special_tokens=skip)
            if ours != theirs:
                raise UnsupportedModelError(
                    f"tokenizer.json: token ids {sample} decode to {theirs!r}, expected {ours!r}: "
                    "its decoder is neither byte-level BPE nor SentencePiece with byte fallback"
                )


def _read_table(tokenizer: Tokenizer) -> TokenTable:
    tokens = _tokens_by_id(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenTable(tuple(map(_byte_level, tokens)), special, None)
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        pieces = tuple(map(_piece, tokens))
        strip = sum(int(step.get("start", 0)) for step in steps if step["type"] == "Strip")
        return TokenTable(tuple(map(_piece_bytes, pieces)), special, pieces, strip)
    raise UnsupportedModelError(
        f"tokenizer.json: decoder {kinds} is not supported, only ByteLevel and SentencePiece's "
        "Replace, ByteFallback, Fuse, Strip"
    )


def _tokens_by_id(tokenizer: Tokenizer) -> list[str | None]:
    """Returns the tokens, with None for ids that the vocabulary skips."""
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise UnsupportedModelError("tokenizer.json: the vocabulary is empty")
    tokens: list[str | None] = [None] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        tokens[token_id] = token
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        tokens[token_id] = added.content
    return tokens


def _byte_level(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes(map(_BYTES_OF_CHARACTER.__getitem__, token))
    except KeyError:  # an added token, which is not byte-encoded
        return token.encode("utf-8")


def _piece_bytes(piece: str | int | None) -> bytes:
    return bytes((piece,)) if isinstance(piece, int) else (piece or "").encode("utf-8")


def _piece(token: str | None) -> str | int | None:
    if token is None:
        return None
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return int(token[3:5], 16)
    return token.replace("\u2581", " ")
