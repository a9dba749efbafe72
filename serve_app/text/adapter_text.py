"""The text files that an adapter brings beside its weights, as far as they differ from its base's.

Training libraries store the tokenizer and the chat template next to an adapter. `own_files`
compares them with the base's and returns the small part that differs, or refuses the adapter:
registration calls it, and so does the engine replica that sends the files to an ingress.
`AdapterTexts` builds the text sides and keeps the latest. All of it comes from less trusted people
than the base does, so every file has a limit, and templates run in the guard only.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Set
from itertools import islice
from pathlib import Path

import msgspec
from jinja2 import Environment, TemplateSyntaxError

from engine.errors import UnsupportedModelError
from registry.entities import ADAPTER_TEXT_FILES
from serve_app.field_problems import decoding_problem
from serve_app.text import generation_defaults
from serve_app.text.added_tokens import FILE as TOKENIZER
from serve_app.text.added_tokens import AddedToken, added_by_tokenizer, check_added_tokens
from serve_app.text.base_text import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    RESPONSE_TEMPLATE,
    SPECIAL_TOKENS,
    BaseText,
    read_files,
    read_object,
    response_spec,
    special_tokens,
    template_source,
)
from serve_app.text.response_template import load_template
from serve_app.text.template_guard import MAX_SOURCE_CHARS, TemplateBudgetError
from serve_app.text.tokenizer import TextTokenizer

CONFIG = "tokenizer_config.json"
GENERATION = generation_defaults.FILE
MAX_CONFIG_BYTES = 1 << 20  # of each file but the tokenizer; some list 1,000 reserved tokens
MAX_TOKENIZER_BYTES = 64 * 1024**2
# Compiling costs 70 us a token, in a thread of the ingress. A template of 5 KB has about 1,400.
MAX_TEMPLATE_TOKENS = 8192
MAX_RESPONSE_TEMPLATE_BYTES = 64 * 1024
MAX_OWN_BYTES = 192 * 1024  # of all own files of an adapter; an ingress keeps hundreds of adapters
# Own files in words, for users.
BROUGHT = {
    CHAT_TEMPLATE: "chat template",
    RESPONSE_TEMPLATE: "response template",
    GENERATION: "generation defaults",
    SPECIAL_TOKENS: "special tokens",
    ADDED_TOKENS: "added tokens",
}

Key = tuple[str, tuple[tuple[str, bytes], ...]]  # digest of the base, own files


def own_files(base: Mapping[str, bytes], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the part of an adapter's text files that differs from the `base`'s, in the names of
    `BROUGHT`; empty if there is none. Raises UnsupportedModelError with the reason if the base
    cannot serve it. Blocks: reading another form of a large tokenizer lasts a second."""
    own: dict[str, bytes] = {}
    source = template_source(files)
    if source is not None and source != template_source(base):
        _check_template_size(source)
        own[CHAT_TEMPLATE] = source.encode("utf-8", "replace")
    _add_response_template(own, base, files)
    num_rows = _num_rows(base)
    added = _added_tokens(base, files)
    special = _changed_special_tokens(base, files)
    ids = _vocabulary(base) if added or special else {}
    if added:
        check_added_tokens(added, ids, num_rows, TOKENIZER if TOKENIZER in files else ADDED_TOKENS)
        own[ADDED_TOKENS] = msgspec.json.encode(added)
    if special:
        _check_special_tokens(special, ids.keys() | {token.content for token in added})
        own[SPECIAL_TOKENS] = json.dumps(special).encode()
    if GENERATION in files:
        kept = generation_defaults.own_generation_config(
            read_object(base, GENERATION), read_object(files, GENERATION), num_rows
        )
        if kept:
            own[GENERATION] = json.dumps(kept).encode()
    if (size := sum(map(len, own.values()))) > MAX_OWN_BYTES:
        raise UnsupportedModelError(
            f"its {', '.join(brought(own))} have {size} bytes together, at most {MAX_OWN_BYTES} "
            "are allowed"
        )
    return own


def check_adapter_text(base_folder: Path, folder: Path) -> tuple[str, ...]:
    """Checks an adapter's text files as a whole, as an ingress opens them, for registration.
    Returns the parts that it brings, in words. Raises UnsupportedModelError."""
    base = read_files(base_folder)
    own = own_files(base, read_adapter_files(folder))
    if own:
        open_adapter_text(BaseText.from_files(base), own)
    return brought(own)


def brought(own: Mapping[str, bytes]) -> tuple[str, ...]:
    return tuple(words for name, words in BROUGHT.items() if name in own)


def read_adapter_files(folder: Path) -> dict[str, bytes]:
    """Reads the text files of an adapter's folder. Raises UnsupportedModelError for a file beyond
    its limit, before it is read."""
    found = {}
    for name in sorted(ADAPTER_TEXT_FILES):
        path = folder / name
        if path.is_file():
            limit = MAX_TOKENIZER_BYTES if name == TOKENIZER else MAX_CONFIG_BYTES
            if (size := path.stat().st_size) > limit:
                raise UnsupportedModelError(
                    f"{name}: it has {size} bytes, at most {limit} are allowed"
                )
            found[name] = path.read_bytes()
    return found


def open_adapter_text(
    base: BaseText, own: Mapping[str, bytes], tokenizer: TextTokenizer | None = None
) -> BaseText:
    """Returns an adapter's text side after rendering one short chat. Raises UnsupportedModelError,
    also if the template exceeds the event loop's budget: only a base may do that."""
    text = base.with_adapter(own, tokenizer)
    if CHAT_TEMPLATE in own:
        try:
            text.probe()
        except TemplateBudgetError as error:
            raise UnsupportedModelError(f"chat template: {error}") from None
    return text


class AdapterTexts:
    """The text sides of adapters of any base, the most recently used; equal files share one, and
    equal added tokens a tokenizer. Any thread may call it; two may build the same text at once."""

    def __init__(
        self, *, max_bytes: int = 8 * 1024**2, max_tokenizers: int = 4, is_guarded: bool = True
    ) -> None:
        """`max_bytes`: of own files; a compiled template has about ten times its source.
        `max_tokenizers`: of adapters with added tokens, about 100 MB each for 128,000 tokens."""
        self._max_bytes = max_bytes
        self._max_tokenizers = max_tokenizers
        self._is_guarded = is_guarded
        self._texts: OrderedDict[Key, BaseText] = OrderedDict()  # the oldest first
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, key: Key) -> BaseText | None:
        with self._lock:
            text = self._texts.get(key)
            if text is not None:
                self._texts.move_to_end(key)
            return text

    def open(self, key: Key, base: BaseText) -> BaseText:
        """Returns the text side of `key`, built if it is not kept. Blocks: use a thread. Raises
        UnsupportedModelError."""
        if (known := self.find(key)) is not None:
            return known
        own = dict(key[1])
        tokenizer = self._shared_tokenizer(key[0], own.get(ADDED_TOKENS))
        if self._is_guarded:
            text = open_adapter_text(base, own, tokenizer)
        else:
            text = base.with_adapter(own, tokenizer, is_guarded=False)
        with self._lock:
            if key not in self._texts:
                self._texts[key] = text
                self._num_bytes += _size(key)
                self._evict()
        return text

    def _shared_tokenizer(self, base: str, added: bytes | None) -> TextTokenizer | None:
        with self._lock:
            for (digest, files), text in self._texts.items():
                if added is not None and digest == base and dict(files).get(ADDED_TOKENS) == added:
                    return text.tokenizer
        return None

    def _evict(self) -> None:
        """Drops the oldest texts beyond a limit, but never the newest text."""
        while len(self._texts) > 1 and self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._texts)))
        while len({id(self._texts[key].tokenizer) for key in self._extended()}) > (
            self._max_tokenizers
        ):
            oldest = self._texts[self._extended()[0]].tokenizer
            for key in self._extended():
                if self._texts[key].tokenizer is oldest:
                    self._drop(key)

    def _extended(self) -> list[Key]:
        return [key for key in self._texts if ADDED_TOKENS in dict(key[1])]

    def _drop(self, key: Key) -> None:
        del self._texts[key]
        self._num_bytes -= _size(key)


def key_of(base_digest: str, own: Mapping[str, bytes]) -> Key:
    return base_digest, tuple(sorted(own.items()))


def _size(key: Key) -> int:
    return sum(len(content) for _, content in key[1])


def _check_template_size(source: str) -> None:
    if len(source) > MAX_SOURCE_CHARS:
        raise UnsupportedModelError(
            f"chat template: it has {len(source)} characters, at most {MAX_SOURCE_CHARS} are "
            "allowed"
        )
    try:
        num_tokens = sum(1 for _ in islice(Environment().lex(source), MAX_TEMPLATE_TOKENS + 1))
    except TemplateSyntaxError as error:
        raise UnsupportedModelError(f"chat template: {error}") from error
    if num_tokens > MAX_TEMPLATE_TOKENS:
        raise UnsupportedModelError(
            f"chat template: it has more than {MAX_TEMPLATE_TOKENS} words and signs of code"
        )


def _add_response_template(
    own: dict[str, bytes], base: Mapping[str, bytes], files: Mapping[str, bytes]
) -> None:
    value = read_object(files, CONFIG).get("response_template")
    if value is None or value == response_spec(base):
        return
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{CONFIG}: response_template is not an object")
    encoded = json.dumps(value).encode()
    if len(encoded) > MAX_RESPONSE_TEMPLATE_BYTES:
        raise UnsupportedModelError(
            f"{CONFIG}: response_template has {len(encoded)} bytes, at most "
            f"{MAX_RESPONSE_TEMPLATE_BYTES} are allowed"
        )
    load_template(value)
    own[RESPONSE_TEMPLATE] = encoded


def _changed_special_tokens(
    base: Mapping[str, bytes], files: Mapping[str, bytes]
) -> dict[str, str]:
    """Returns the special tokens that differ from the base's and have an effect here: training
    scripts set the padding token, which no template writes."""
    before = special_tokens(base)
    source = template_source(files) or template_source(base) or ""
    return {
        name: text
        for name, text in special_tokens(files).items()
        if before.get(name) != text and (name == "eos_token" or name in source)
    }


def _check_special_tokens(changed: Mapping[str, str], tokens: Set[str]) -> None:
    for name, text in changed.items():
        if text not in tokens:
            raise UnsupportedModelError(
                f"{name} is {text[:100]!r}, which is no token of the base and no added token"
            )


def _added_tokens(base: Mapping[str, bytes], files: Mapping[str, bytes]) -> tuple[AddedToken, ...]:
    """Returns the tokens that the adapter adds. tokenizer.json has them with their flags; older
    libraries write the ids alone into added_tokens.json, and the flags into the configuration."""
    if TOKENIZER in files:
        return added_by_tokenizer(base[TOKENIZER], files[TOKENIZER])
    decoder = read_object(files, CONFIG).get("added_tokens_decoder")
    flags: dict[str, AddedToken] = {}
    for token_id, entry in decoder.items() if isinstance(decoder, dict) else ():
        token = _token(token_id, entry)
        flags[token.content] = token
    listed = read_object(files, ADDED_TOKENS)
    special = set(special_tokens(files).values())
    for content, token_id in listed.items():
        if content not in flags:
            flags[content] = _token(token_id, {"content": content, "special": content in special})
    known = _vocabulary(base) if flags else {}
    return tuple(token for content, token in flags.items() if known.get(content) != token.id)


def _token(token_id: object, entry: object) -> AddedToken:
    try:
        assert isinstance(entry, dict)
        return msgspec.convert({**entry, "id": int(str(token_id))}, AddedToken)
    except msgspec.ValidationError as error:
        why = decoding_problem(error)
        raise UnsupportedModelError(f"an added token cannot be read: {why}") from None
    except (AssertionError, ValueError):
        why = f"{ascii(entry)[:100]} with the id {ascii(token_id)[:100]} is none"
        raise UnsupportedModelError(f"an added token cannot be read: {why}") from None


def _vocabulary(base: Mapping[str, bytes]) -> dict[str, int]:
    """Returns the id of every token of a base's tokenizer.json."""
    parsed = msgspec.json.decode(base[TOKENIZER], type=_Vocabulary)
    vocab = parsed.model.vocab
    ids = vocab if isinstance(vocab, dict) else {str(one[0]): i for i, one in enumerate(vocab)}
    return {**ids, **{token.content: token.id for token in parsed.added_tokens or ()}}


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[list[object]]


class _Vocabulary(msgspec.Struct):
    model: _Model
    added_tokens: list[AddedToken] | None = None


def _num_rows(base: Mapping[str, bytes]) -> int:
    """Returns the rows of the base's embedding."""
    rows = read_object(base, "config.json").get("vocab_size")
    if type(rows) is int:
        return rows
    return 1 + max(_vocabulary(base).values(), default=-1)
