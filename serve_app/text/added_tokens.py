"""The tokens that an adapter's tokenizer adds to its base's, and the comparison that finds them.

Training libraries store the whole tokenizer next to an adapter, usually equal to the base's but for
padding and truncation, or written by another version of the library. Equal content in another form
is equal here: merges as pairs or as strings, and fields with their default values. A tokenizer that
splits texts in another way is refused, because prefix caches and detokenization are the base's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgspec
from tokenizers import Tokenizer

from engine.errors import UnsupportedModelError
from serve_app.field_problems import decoding_problem

FILE = "tokenizer.json"
MAX_ADDED_TOKENS = 1024
MAX_TOKEN_CHARS = 256
_REMEDY = "; to serve the adapter with the base's tokenizer, remove the file from its folder"
# A pretty-printed file has several times the bytes of the same content on one line.
_SIZE_FACTOR = 6
_FREE_BYTES = 1 << 20
_FREE_COMMAS = 1 << 14
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_NULL = msgspec.Raw(b"null")
T = TypeVar("T")


class AddedToken(msgspec.Struct, frozen=True):
    """An entry of `added_tokens` in tokenizer.json."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    model: msgspec.Raw
    added_tokens: list[AddedToken] | None = None
    normalizer: msgspec.Raw = _NULL
    pre_tokenizer: msgspec.Raw = _NULL
    post_processor: msgspec.Raw = _NULL
    decoder: msgspec.Raw = _NULL


def added_by_tokenizer(base: bytes, own: bytes) -> tuple[AddedToken, ...]:
    """Returns the entries of `own`, a tokenizer.json, that the `base` lacks or has with other
    flags. Raises UnsupportedModelError if anything else differs."""
    if own == base:
        return ()
    # Each element of the parsed file has a comma: `own` never needs much more memory than `base`.
    if len(own) > _SIZE_FACTOR * len(base) + _FREE_BYTES or (
        own.count(b",") > 2 * base.count(b",") + _FREE_COMMAS
    ):
        _refuse(f"it is much larger than the base's ({len(own)} bytes, the base's {len(base)})")
    there = _read(base, _TokenizerFile, "the base's file")
    here = _read(own, _TokenizerFile, "it")
    _compare_models(there.model, here.model)
    for part in _PARTS:
        before, after = getattr(there, part), getattr(here, part)
        if bytes(before) != bytes(after) and _canonical(part, before) != _canonical(part, after):
            _refuse(f"its {part} differs from the base's")
    known = {token.content: token for token in there.added_tokens or ()}
    found = {token.content: token for token in here.added_tokens or ()}
    if missing := sorted(known.keys() - found.keys()):
        _refuse(f"it lacks the base's token {missing[0]!r} (id {known[missing[0]].id})")
    return tuple(token for content, token in found.items() if token != known.get(content))


def check_added_tokens(
    tokens: tuple[AddedToken, ...], base: Mapping[str, int], num_rows: int, where: str
) -> None:
    """Raises UnsupportedModelError, with the token and its id, unless the base can serve the
    tokens. `base`: its whole vocabulary; `num_rows`: rows of its embedding, which may be more than
    its tokens; `where`: the file that adds them."""
    if len(tokens) > MAX_ADDED_TOKENS:
        _refuse(f"it adds {len(tokens)} tokens, at most {MAX_ADDED_TOKENS} are allowed", where)
    by_id = {token_id: content for content, token_id in base.items()}
    for token in sorted(tokens, key=lambda token: token.id):
        shown = f"token {token.content[:100]!r} with id {token.id}"
        if not 0 < len(token.content) <= MAX_TOKEN_CHARS:
            _refuse(f"{shown}: a token has 1 to {MAX_TOKEN_CHARS} characters", where)
        known = base.get(token.content)
        if known is not None and known != token.id:
            _refuse(f"it has {shown}, in the base it has id {known}", where)
        if by_id.get(token.id, token.content) != token.content:
            _refuse(f"it adds {shown}, which is the base's token {by_id[token.id]!r}", where)
        if not 0 <= token.id < num_rows:
            _refuse(f"it adds {shown}, but the base has {num_rows} embedding rows", where)
        by_id[token.id] = token.content


def extend(library: Tokenizer, tokens: tuple[AddedToken, ...]) -> Tokenizer:
    """Returns a copy of a tokenizer with these tokens too; blocks as long as loading it does.
    Raises UnsupportedModelError if the library gives a token another id: it numbers new tokens
    without gaps."""
    document = msgspec.json.decode(library.to_str().encode(), type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(document["added_tokens"], type=list[AddedToken])
    entries = {token.content: token for token in (*added, *tokens)}
    ordered = sorted(entries.values(), key=lambda token: token.id)
    document["added_tokens"] = msgspec.Raw(msgspec.json.encode(ordered))
    extended = Tokenizer.from_str(msgspec.json.encode(document).decode())
    for token in tokens:
        if (token_id := extended.token_to_id(token.content)) != token.id:
            _refuse(
                f"it adds token {token.content[:100]!r} with id {token.id}, but the next free id "
                f"is {token_id}: added tokens follow the base's without gaps"
            )
    return extended


def _read(file: bytes | msgspec.Raw, kind: type[T], name: str) -> T:
    try:
        return msgspec.json.decode(file, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse(f"{name} cannot be read: {decoding_problem(error)}")


def _compare_models(there: msgspec.Raw, here: msgspec.Raw) -> None:
    if bytes(there) == bytes(here):
        return
    before, after = (_read(raw, dict[str, Any], "its model") for raw in (there, here))
    old, new = before.pop("vocab", None), after.pop("vocab", None)
    if old != new:
        _refuse(f"its vocabulary differs from the base's{_first_difference(old, new)}")
    if _merges(before.pop("merges", None)) != _merges(after.pop("merges", None)):
        _refuse("its merges differ from the base's")
    for key in sorted(before.keys() | after.keys()):
        # The library writes the defaults of some versions and leaves them out in others.
        if (before.get(key) or None) != (after.get(key) or None) and key != "type":
            _refuse(f"its model's {key} differs from the base's")


def _merges(value: object) -> object:
    """Returns merges as strings: newer versions of the library write pairs."""
    if not isinstance(value, list):
        return value
    return [" ".join(map(str, pair)) if isinstance(pair, list) else pair for pair in value]


def _first_difference(old: object, new: object) -> str:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return ""
    for token, token_id in new.items():
        if old.get(token) != token_id:
            there = f"id {old[token]}" if token in old else "no such token"
            return f": token {str(token)[:100]!r} has id {token_id}, the base has {there}"
    token = next(iter(old.keys() - new.keys()))
    return f": it lacks token {str(token)[:100]!r} (id {old[token]})"


def _canonical(part: str, value: msgspec.Raw) -> object:
    """Returns a part of tokenizer.json as the library itself writes it."""
    file = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
    parts = {name: None for name in _PARTS}
    try:
        parsed = msgspec.json.decode(value)
        document = file | {"added_tokens": []} | parts | {part: parsed}
        written: dict[str, object] = json.loads(Tokenizer.from_str(json.dumps(document)).to_str())
    # The library raises a bare Exception for a part that it cannot read.
    except Exception as error:
        _refuse(f"its {part} cannot be read: {error}")
    return written[part]


def _refuse(reason: str, where: str = FILE) -> NoReturn:
    raise UnsupportedModelError(f"{where}: {reason}{_REMEDY}")
