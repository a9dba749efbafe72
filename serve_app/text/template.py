"""A model's chat template: messages to one string, exactly as transformers' apply_chat_template.

The template comes with the model and never from a client. It runs in jinja's immutable sandbox,
without attributes that lead out of it and with bounded output. On the event loop its work is
counted and bounded, too (`template_guard`); only a worker process, whose time and memory the kernel
limits, renders without the count. This module is independent of tokens and of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine.errors import InvalidRequestError, UnsupportedModelError
from serve_app.text.response_template import REASONING_FIELDS
from serve_app.text.template_guard import (
    BUDGET,
    FREE_WORK,
    MAX_SOURCE_CHARS,
    WORK_PER_CHARACTER,
    GuardedSandbox,
    refuse,
)

ChatMessage: TypeAlias = dict[str, Any]  # nested JSON: tool calls and their arguments
JsonObject: TypeAlias = dict[str, Any]
TemplateValue: TypeAlias = str | int | float | bool
T = TypeVar("T")

# A template may repeat the messages but not multiply them: 1 MiB on top of twice their length.
FREE_OUTPUT_CHARS = 1 << 20
MAX_PRODUCT = 1 << 20

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_MAX_REASON_CHARS = 500
# Jinja compiles to Python, whose compiler has limits of its own, of nesting for instance.
_COMPILE_FAILURES = (
    *(TemplateSyntaxError, SyntaxError, RecursionError, MemoryError, OverflowError, ValueError),
)


class ChatOptions(TypedDict, total=False):
    """The options of a rendering, as in transformers' apply_chat_template."""

    add_generation_prompt: bool  # True if it is left out
    continue_final_message: bool  # the last message is open, and the answer continues it
    variables: Mapping[str, TemplateValue]  # for the template, from the client
    tools: Sequence[JsonObject]  # as OpenAI writes them; none if it is left out
    documents: Sequence[JsonObject]


class ChatTemplate:
    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, is_guarded: bool = True
    ) -> None:
        """`special_tokens` maps the template's names, such as bos_token, to texts. If `is_guarded`,
        rendering beyond the work budget raises TemplateBudgetError; pass False only in a process
        that may be killed."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._is_guarded = is_guarded
        if is_guarded and len(source) > MAX_SOURCE_CHARS:
            source = ""  # not even parsed; `render` refuses it
        try:
            environment = _environment(is_guarded=is_guarded)
            tree = environment.parse(source)
            _check_constants(tree)
            self._template = environment.from_string(tree)
            self._reasoning_names = REASONING_FIELDS & _names_in(tree)
        except _COMPILE_FAILURES as error:
            raise UnsupportedModelError(f"chat template: {error}") from error

    def render(self, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> str:
        if self._is_guarded and len(self._source) > MAX_SOURCE_CHARS:
            refuse(f"it has more than {MAX_SOURCE_CHARS} characters")
        # Copies: the template may write into them, and the tag below does.
        counter = _Counter()
        chat = [counter.copy(message) for message in messages]
        for message in chat:
            if "reasoning_content" in message:
                names = self._reasoning_names
                if message.get("content") and message.get("tool_calls"):
                    names = names - {"thinking"}  # which gpt-oss refuses beside these two
                for name in names:
                    message.setdefault(name, message["reasoning_content"])
        tools = [counter.copy(tool) for tool in options.get("tools") or ()]
        documents = [counter.copy(document) for document in options.get("documents") or ()]
        final: str | None = None
        if options.get("continue_final_message"):
            final = chat[-1]["content"]
            chat[-1]["content"] = final + _CONTINUE_TAG
        num_chars = counter.num_chars
        BUDGET.left = FREE_WORK + WORK_PER_CHARACTER * num_chars
        text = self._run(
            {
                **self._special_tokens,
                **options.get("variables", {}),
                "messages": chat,
                "tools": tools or None,
                "documents": documents or None,
                "add_generation_prompt": options.get("add_generation_prompt", True),
            },
            FREE_OUTPUT_CHARS + 2 * num_chars,
        )
        return text if final is None else _cut_at_tag(text, final)

    def _run(self, context: dict[str, object], max_chars: int) -> str:
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(context):
                parts.append(part)
                num_chars += len(part)
                if num_chars > max_chars:
                    refuse(f"it writes more than {max_chars} characters")
        except (InvalidRequestError, MemoryError):
            raise
        # A template is code: any exception that it raises for these messages is about them.
        except Exception as error:
            raise _refusal(str(error) or type(error).__name__) from error
        text = "".join(parts)
        if not text.isascii() and not _is_encodable(text):
            raise _refusal("it writes half of a surrogate pair, which is no character")
        return text


class _Counter:
    """Copies nested JSON and counts the characters of its texts, keys included."""

    def __init__(self) -> None:
        self.num_chars = 0

    def copy(self, value: Any) -> Any:
        if isinstance(value, str):
            self.num_chars += len(value)
            return value
        if isinstance(value, dict):
            return {self.copy(key): self.copy(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.copy(item) for item in value]
        self.num_chars += 8
        return value


def _cut_at_tag(text: str, final: str) -> str:
    """Returns the rendered chat up to the end of its last message."""
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise _refusal("it drops parts of the final message, so that cannot be continued")
    end = text.rindex(tag)
    if text.startswith(_CONTINUE_TAG, end):
        return text[:end]
    return text[:end].rstrip()  # the template trimmed the message, and the tag's space with it


def _refusal(reason: str) -> InvalidRequestError:
    """Returns the error for a reason that the template may have written: it has any length, and
    characters that no response can hold."""
    if len(reason) > _MAX_REASON_CHARS:
        reason = f"{reason[:_MAX_REASON_CHARS]}..."
    reason = reason.encode("utf-8", "backslashreplace").decode()
    return InvalidRequestError(
        f"The model's chat template refuses these messages: {reason}", "messages"
    )


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _GenerationBlocks(Extension):
    """Renders `{% generation %}` blocks, which mark assistant text for training, as their body."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it as an instance variable)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body", [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()

    _body.is_cheap = True  # type: ignore[attr-defined]


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that does not count its work: the process that runs it must be limited."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        limit = 64 if operator == "**" else MAX_PRODUCT
        for number, other in ((left, right), (right, left)):
            if isinstance(number, int) and isinstance(other, str | list | tuple):
                if number * len(other) > MAX_PRODUCT:
                    raise SecurityError("it repeats a value too often")
            elif operator == "**" and isinstance(number, int) and abs(number) > limit:
                raise SecurityError("it computes a power that is too large")
        return super().call_binop(context, operator, left, right)


class _TemplateDict:
    """The `dict` of templates, without the attributes of a class."""

    is_cheap = True

    def __call__(self, /, *args: Mapping[str, T], **kwargs: T) -> dict[str, T]:
        return dict(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """A jinja namespace that refuses names with a leading underscore."""

    is_cheap = True

    def __init__(*args: object, **kwargs: object) -> None:  # `namespace(self=...)` is legal
        namespace, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(namespace, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _names_in(tree: nodes.Template) -> set[object]:
    """Returns the attributes and the constants of a template."""
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    return attributes | {node.value for node in tree.find_all(nodes.Const)}


def _check_constants(tree: nodes.Template) -> None:
    """Refuses options of `autoescape` that are no constants: the compiler, whose work nobody
    counts, would run their filters."""
    for block in tree.find_all(nodes.EvalContextModifier):
        for option in block.options:
            if not isinstance(option.value, nodes.Const):
                raise TemplateSyntaxError("autoescape takes true or false", block.lineno)


@pass_context
def _unchanged(context: Context, value: object) -> object:
    """Returns an output as it is. The compiler has no context, so it runs no output's filters."""
    return value


def _environment(*, is_guarded: bool) -> ImmutableSandboxedEnvironment:
    # The compiler would run filters on constants, of outputs even if it does not optimize. The
    # guard wraps outputs in filters of its own.
    environment = (GuardedSandbox if is_guarded else _Sandbox)(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=None if is_guarded else _unchanged,
        extensions=[_GenerationBlocks, loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    if isinstance(environment, GuardedSandbox):
        environment.guard_filters()
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > 64 or any(character.isdigit() for character in format):
        raise SecurityError("its strftime_now format has over 64 characters, or a field width")
    return datetime.now().strftime(format)


_raise_exception.is_cheap = _strftime_now.is_cheap = True  # type: ignore[attr-defined]
