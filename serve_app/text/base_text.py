"""The text side of a base model: tokenizer, chat template and end-of-text token ids.

Built from the model's small files, which may come from a folder or over the network, so an ingress
needs neither the weights nor transformers. Stateless after loading; encode long texts off the event
loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import InvalidRequestError, UnsupportedModelError
from serve_app.text.template import ChatMessage, ChatTemplate, TemplateValue
from serve_app.text.template_guard import TemplateBudgetError
from serve_app.text.tokenizer import TextTokenizer

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")


class BaseText:
    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None,
        special_tokens: Mapping[str, str],
        eos_token_ids: frozenset[int],
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = eos_token_ids

    @classmethod
    def from_folder(cls, folder: Path) -> BaseText:
        return cls.from_files(
            {name: (folder / name).read_bytes() for name in TEXT_FILES if (folder / name).is_file()}
        )

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], *, is_guarded: bool = True) -> BaseText:
        """Builds from the TEXT_FILES that the model has. `is_guarded`: see `ChatTemplate`. Blocks
        for a second: use a thread."""
        if "tokenizer.json" not in files:
            raise UnsupportedModelError(
                "tokenizer.json is missing: the base needs a fast tokenizer"
            )
        config = _read_object(files, "tokenizer_config.json")
        special = _special_tokens({**_read_object(files, "special_tokens_map.json"), **config})
        try:
            library = Tokenizer.from_buffer(files["tokenizer.json"])
        # The library raises a bare Exception for a file that it cannot read.
        except Exception as error:
            raise UnsupportedModelError(f"tokenizer.json: {error}") from error
        tokenizer = TextTokenizer(library, special.get("bos_token"))
        source = _template_source(files, config)
        template = None if source is None else ChatTemplate(source, special, is_guarded=is_guarded)
        return cls(tokenizer, template, special, _eos_token_ids(files, tokenizer, special))

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

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, TemplateValue] | None = None,
    ) -> str:
        if self.template is None:
            raise InvalidRequestError(
                "This model has no chat template; send the prompt to /v1/completions instead.",
                "messages",
            )
        return self.template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )


def _read_object(files: Mapping[str, bytes], name: str) -> dict[str, object]:
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{name}: not a JSON object")
    return value


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):  # an AddedToken
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _template_source(files: Mapping[str, bytes], config: Mapping[str, object]) -> str | None:
    """Returns the template of the file, or of the configuration: the "default" one of several."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _eos_token_ids(
    files: Mapping[str, bytes], tokenizer: TextTokenizer, special: Mapping[str, str]
) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _read_object(files, name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids.update(i for i in values if isinstance(i, int))
    token_id = tokenizer.token_id(special["eos_token"]) if "eos_token" in special else None
    return frozenset(ids if token_id is None else ids | {token_id})
