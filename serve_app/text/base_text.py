"""The text side of a model: tokenizer, chat template, response template and end-of-text token ids.

Built from the model's small files, which may come from a folder or over the network, so an ingress
needs neither the weights nor transformers. An adapter's own files change its base's text side
(`with_adapter`). Stateless after loading; encode long texts off the event loop.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, Unpack

import msgspec
from tokenizers import Tokenizer

from engine.errors import InvalidRequestError, UnsupportedModelError
from serve_app.text.added_tokens import AddedToken
from serve_app.text.message_tools import needs_message_tools, with_message_tools
from serve_app.text.response_template import ResponseTemplate, choose_template
from serve_app.text.template import ChatMessage, ChatOptions, ChatTemplate
from serve_app.text.template_guard import TemplateBudgetError
from serve_app.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

CHAT_TEMPLATE, PROCESSOR_TEMPLATE = "chat_template.jinja", "chat_template.json"
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *(CHAT_TEMPLATE, PROCESSOR_TEMPLATE),
    "config.json",
    "generation_config.json",
)

# The names of an adapter's own files where they differ from the files of training libraries.
SPECIAL_TOKENS = "special_tokens_map.json"
RESPONSE_TEMPLATE = "response_template.json"
ADDED_TOKENS = "added_tokens.json"

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")


class BaseText:
    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None,
        special_tokens: Mapping[str, str],
        eos_token_ids: frozenset[int],
        *,
        response_spec: object = None,
        source: str | None = None,
        base: BaseText | None = None,
        own_eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`response_spec`: see `choose_template`, whose errors it raises; `source`: the source of
        `template`; `base`: the base of which this is an adapter's text side; `own_eos_token_ids`:
        the ids of a base that its engine lacks."""
        self.tokenizer = tokenizer
        self.template = template
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = eos_token_ids
        self.response_spec = response_spec
        self.response_template = _response_template(response_spec, source, is_base=base is None)
        self.source = source
        # The engine ends sequences at the ids of the base's configuration by itself.
        own = own_eos_token_ids
        if base is not None:
            own = (eos_token_ids - base.eos_token_ids).union(base.own_eos_token_ids)
        self.own_eos_token_ids: tuple[int, ...] = tuple(sorted(own))

    @classmethod
    def from_folder(cls, folder: Path) -> BaseText:
        return cls.from_files(read_files(folder))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], *, is_guarded: bool = True) -> BaseText:
        """Builds from the TEXT_FILES that the model has. `is_guarded`: see `ChatTemplate`. Blocks
        for a second: use a thread."""
        if "tokenizer.json" not in files:
            raise UnsupportedModelError(
                "tokenizer.json is missing: the base needs a fast tokenizer"
            )
        special = special_tokens(files)
        try:
            library = Tokenizer.from_buffer(files["tokenizer.json"])
        # The library raises a bare Exception for a file that it cannot read.
        except Exception as error:
            raise UnsupportedModelError(f"tokenizer.json: {error}") from error
        tokenizer = TextTokenizer(library, special.get("bos_token"))
        source = template_source(files)
        template = None if source is None else ChatTemplate(source, special, is_guarded=is_guarded)
        return cls(
            tokenizer,
            template,
            special,
            _eos_token_ids(files, tokenizer, special),
            response_spec=response_spec(files),
            source=source,
            own_eos_token_ids=_unknown_eos_token_ids(files, tokenizer, special),
        )

    def with_adapter(
        self,
        own: Mapping[str, bytes],
        tokenizer: TextTokenizer | None = None,
        *,
        is_guarded: bool = True,
    ) -> Self:
        """Returns the text side of an adapter of this base. `own`: see `adapter_text.own_files`;
        `tokenizer`: one with its added tokens, if there is one. Blocks: use a thread."""
        tokenizer = tokenizer or self.tokenizer
        if ADDED_TOKENS in own and tokenizer is self.tokenizer:
            added = msgspec.json.decode(own[ADDED_TOKENS], type=tuple[AddedToken, ...])
            tokenizer = tokenizer.with_tokens(added)
        special = {**self.special_tokens, **special_tokens(own)}
        source = template_source(own)
        template = self.template
        if source is not None:
            template = ChatTemplate(source, special, is_guarded=is_guarded)
        elif self.source is not None and special != self.special_tokens:
            template = ChatTemplate(self.source, special, is_guarded=is_guarded)
        spec = response_spec(own)
        return type(self)(
            tokenizer,
            template,
            special,
            self.eos_token_ids | _eos_token_ids(own, tokenizer, special),
            response_spec=self.response_spec if spec is None else spec,
            source=self.source if source is None else source,
            base=self,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def probe(self) -> None:
        """Raises TemplateBudgetError if even the shortest chat exceeds the limits of rendering."""
        if self.template is None:
            return
        try:
            self.render_chat([{"role": "user", "content": "Hello"}])
        except TemplateBudgetError:
            raise
        except InvalidRequestError:
            return  # the template requires another form of chat

    def render_chat(self, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> str:
        if self.template is None:
            raise InvalidRequestError(
                "This model has no chat template; send the prompt to /v1/completions instead.",
                "messages",
            )
        if needs_message_tools(self.source):
            messages = with_message_tools(messages, options.pop("tools", ()))
        return self.template.render(messages, **options)


def read_files(folder: Path) -> dict[str, bytes]:
    """Returns the text files of a base's folder."""
    return {name: (folder / name).read_bytes() for name in TEXT_FILES if (folder / name).is_file()}


def read_object(files: Mapping[str, bytes], name: str) -> dict[str, object]:
    """Returns the JSON object of a file; {} without the file. Raises UnsupportedModelError, also
    for a text with half of a surrogate pair, which no tokenizer and no response takes."""
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UnsupportedModelError(
            f"{name}: a text has half of a surrogate pair, which is no character"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{name}: not a JSON object")
    return value


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    config = {
        **read_object(files, SPECIAL_TOKENS),
        **read_object(files, "tokenizer_config.json"),
    }
    tokens = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):  # an AddedToken
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def template_source(files: Mapping[str, bytes]) -> str | None:
    """Returns the template of the first file that has one, in transformers' order: the file of its
    older processors, the template's own file, the tokenizer's configuration."""
    if PROCESSOR_TEMPLATE in files:
        source = _template_in(files, PROCESSOR_TEMPLATE)
        if source is None:
            raise UnsupportedModelError(f"{PROCESSOR_TEMPLATE}: chat_template is not a text")
        return source
    if CHAT_TEMPLATE in files:
        try:
            return files[CHAT_TEMPLATE].decode("utf-8")
        except UnicodeDecodeError as error:
            raise UnsupportedModelError(f"{CHAT_TEMPLATE}: {error}") from error
    return _template_in(files, "tokenizer_config.json")


def _template_in(files: Mapping[str, bytes], name: str) -> str | None:
    """Returns the template of a JSON file; of several templates, "default"."""
    source = read_object(files, name).get("chat_template")
    if isinstance(source, list):
        named = [one for one in source if isinstance(one, dict) and one.get("name") == "default"]
        source = named[-1].get("template") if named else None
    return source if isinstance(source, str) else None


def response_spec(files: Mapping[str, bytes]) -> object:
    """Returns the template for parsing answers, or the name of a family of templates: of an
    adapter's own file, or of the configuration; None if there is none."""
    if RESPONSE_TEMPLATE in files:
        return read_object(files, RESPONSE_TEMPLATE)
    return read_object(files, "tokenizer_config.json").get("response_template")


def with_response_template(files: Mapping[str, bytes], family: str) -> dict[str, bytes]:
    """Returns the files of a base whose response template is that of a family."""
    config = read_object(files, "tokenizer_config.json") | {"response_template": family}
    return {**files, "tokenizer_config.json": json.dumps(config).encode()}


def _response_template(
    spec: object, source: str | None, *, is_base: bool
) -> ResponseTemplate | None:
    """Returns the template by which answers are read. A base whose own template is invalid, or of a
    later version of the format, answers in text; an adapter is refused."""
    try:
        return choose_template(spec, source)
    except UnsupportedModelError as error:
        if not is_base:
            raise
        logger.warning("tool calls and reasoning of this base stay text: %s", error)
        return None


def _eos_token_ids(
    files: Mapping[str, bytes], tokenizer: TextTokenizer, special: Mapping[str, str]
) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_object(files, name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids.update(i for i in values if isinstance(i, int))
    token_id = tokenizer.token_id(special["eos_token"]) if "eos_token" in special else None
    return frozenset(ids if token_id is None else ids | {token_id})


def _unknown_eos_token_ids(
    files: Mapping[str, bytes], tokenizer: TextTokenizer, special: Mapping[str, str]
) -> frozenset[int]:
    """Returns the end of text that the tokenizer's files name and the engine lacks. The engine
    reads the ids of generation_config.json, or else of config.json; trainers that give a model
    another end of a turn may change the tokenizer alone."""
    config = read_object(files, "config.json")
    value = read_object(files, "generation_config.json").get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    known = value if isinstance(value, list) else [value]
    token_id = tokenizer.token_id(special.get("eos_token", ""))
    rows = config.get("vocab_size")
    if token_id is None or token_id in known or (isinstance(rows, int) and token_id >= rows):
        return frozenset()
    return frozenset((token_id,))
