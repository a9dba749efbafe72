"""The response to a request, streamed or whole: engine outputs in, bytes for the client out.

Holds the choices of all prompts (index = prompt * n + choice), echo, log-probabilities and the
usage. It does no I/O: the ingress feeds it, sends the bytes that it returns, and aborts the choices
that it reports in the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from msgspec import Raw

from engine.types import TokenLogprobs, TokenOutput
from serve_app.errors import ApiError
from serve_app.openai.chat import ChatRequest
from serve_app.openai.choice import ChoiceDelta, ChoiceRules, ChoiceState, RegionRules
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.dialect import DialectRequest, rendered_chunk
from serve_app.openai.engine_params import GenerationRequest, Prompt, template_of_regions
from serve_app.openai.logprobs import (
    PAUSE,
    Position,
    Rendering,
    batched,
    chat_logprobs,
    completion_logprobs,
    list_rendering,
)
from serve_app.openai.responses import (
    DONE,
    ChunkWriter,
    CompletionTokensDetails,
    Json,
    PromptTokensDetails,
    ResponseHead,
    UsageInfo,
    choice_body,
    encode,
    error_event,
    message_fields,
    usage_chunk,
)
from serve_app.openai.tools import schemas
from serve_app.text.base_text import BaseText
from serve_app.text.detokenize import build_stop_table
from serve_app.text.tokenizer import TextTokenizer

_LONG_CHUNK_ENTRIES = 512  # log-probabilities: 0.6 ms; a hundred such chunks may arrive together
_SLICE_EVENTS = 1024  # events of a dialect between two turns of the event loop: about 3 ms
_SLICE_DELTAS = 16 * 1024  # joined between two turns of the event loop: about 2 ms


@dataclass(slots=True)
class FeedResult:
    """The consequences of an engine output."""

    data: bytes = b""  # for the stream; always empty for a whole response
    abort: bool = False  # a stop string ended this choice: the engine may drop it
    rendering: Rendering[bytes] | None = None  # replaces data for many log-probabilities


NOTHING = FeedResult()


@dataclass(slots=True, eq=False)
class _ChoiceOutput:
    index: int
    prompt: int  # index of the prompt
    state: ChoiceState
    writer: ChunkWriter
    deltas: list[ChoiceDelta] = field(default_factory=list)  # of whole responses only
    is_started: bool = False


class ResponseBuilder:
    """Assembles the response of a request."""

    def __init__(
        self,
        request: GenerationRequest,
        prompts: Sequence[Prompt],
        text: BaseText,
        head: ResponseHead,
    ) -> None:
        self._request = request
        self._prompts = prompts
        self._text = text
        self._head = head
        self._is_chat = isinstance(request, ChatRequest)
        self._writer = request.new_writer(head) if isinstance(request, DialectRequest) else None
        self._echoes = isinstance(request, CompletionRequest) and bool(request.echo)
        self._num_logprobs = request.output_logprobs
        options = request.stream_options
        self._shows_usage = options is not None and bool(options.include_usage)
        self._continuous_usage = self._shows_usage and bool(
            options is not None and options.continuous_usage_stats
        )
        self._regions = self._region_rules()
        # Without any of these a chunk holds text only.
        has_more = self._num_logprobs is not None or self._regions is not None
        self._has_text_chunks = not (has_more or self._continuous_usage or request.return_token_ids)
        self._cached_tokens = [0] * len(prompts)
        self._prompt_logprobs: list[tuple[TokenLogprobs | None, ...]] = [()] * len(prompts)
        self.num_tokens = 0  # generated so far, in all choices
        # Whether any choice has visible text; a request for no tokens is never counted as empty.
        self.has_text = request.requested_tokens == 0
        self._echo_texts = [self._echo_text(prompt) for prompt in prompts]
        self._choices = self._make_choices()
        self.finish_reasons: tuple[str, ...] = ()  # of the choices that have ended, in that order
        self.is_done = False  # all choices have ended

    def feed(self, prompt: int, output: TokenOutput) -> FeedResult:
        """Adds an output of the engine request of `prompt`, an index. Raises as `ChoiceState.feed`;
        the response is then void."""
        choice = self._choices[prompt * self._request.num_choices + output.choice]
        state = choice.state
        num_before = state.num_tokens
        delta = state.feed(output)
        self.num_tokens += state.num_tokens - num_before
        if output.choice == 0:  # the other choices always find the prompt of this one in the cache
            self._cached_tokens[prompt] = output.num_cached_tokens
        if output.prompt_logprobs:
            self._prompt_logprobs[prompt] = output.prompt_logprobs
        if delta is None:
            return NOTHING
        if not self.has_text:
            is_visible = bool(delta.text) and not delta.text.isspace()
            self.has_text = is_visible or bool(delta.reasoning or delta.tool_calls)
        if delta.finish_reason is not None:
            self.finish_reasons += (delta.finish_reason,)
            self.is_done = len(self.finish_reasons) == len(self._choices)
        if not self._request.stream:
            choice.deltas.append(delta)
            return FeedResult(b"", state.stopped_by_text)
        is_first, choice.is_started = not choice.is_started, True
        if self._writer is not None:
            opening = self._writer.start(self.usage()) if is_first else b""
            if self._num_logprobs is None:
                return FeedResult(opening + self._writer.chunk(delta), state.stopped_by_text)
            logprobs = self._logprobs(choice, [delta], with_prompt=False)
            rendering = rendered_chunk(self._writer, opening, delta, logprobs)
            return FeedResult(b"", state.stopped_by_text, rendering)
        if self._is_long(choice, delta, is_first):
            return FeedResult(b"", state.stopped_by_text, self._long_chunk(choice, delta, is_first))
        return FeedResult(self._chunk(choice, delta, is_first), state.stopped_by_text)

    def usage(self) -> UsageInfo:
        num_prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        cached, reasoning = PromptTokensDetails(sum(self._cached_tokens)), None
        if self._regions is not None:
            reasoning = CompletionTokensDetails(self._num_reasoning_tokens())
        num_all = num_prompt + self.num_tokens
        return UsageInfo(num_prompt, self.num_tokens, num_all, cached, reasoning)

    def stream_end(self) -> bytes:
        """Returns the bytes that follow the last chunk of the last choice."""
        assert self.is_done
        if self._writer is not None:
            return self._writer.end(self.usage(), self._num_reasoning_tokens())
        return (usage_chunk(self._head, self.usage()) if self._shows_usage else b"") + DONE

    def rendering(self) -> Rendering[bytes]:
        """Renders the whole body. Run inline, many log-probabilities block for seconds."""
        assert self.is_done
        if self._writer is not None:
            choice = self._choices[0]
            self._writer.start(self.usage())
            for deltas in batched(choice.deltas, _SLICE_EVENTS):
                for delta in deltas:
                    logprobs = self._logprobs(choice, [delta], with_prompt=False)
                    yield from rendered_chunk(self._writer, b"", delta, logprobs)
                yield PAUSE
            return self._writer.body(self.usage(), self._num_reasoning_tokens())
        extras: Json = {}
        if self._is_chat:
            extras = yield from self._prompt_extras(self._choices[0])
        choices = []
        for choice in self._choices:
            choices.append((yield from self._choice_body(choice)))
            if self.num_tokens > _SLICE_DELTAS:
                yield PAUSE
        body = {"choices": choices, "usage": self.usage(), **extras}
        return encode(self._head.to_json(is_chunk=False) | body)

    def failure(self, error: ApiError) -> bytes:
        """Returns the end of a stream that failed."""
        return error_event(error) if self._writer is None else self._writer.failure(error)

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._text.tokenizer

    def _make_choices(self) -> list[_ChoiceOutput]:
        request = self._request
        rules = ChoiceRules(
            stop_table=build_stop_table(request.stop) if request.stop else None,
            include_stop=bool(request.include_stop_str_in_output),
            min_tokens=request.min_tokens or 0,
            eos_token_ids=frozenset() if request.ignore_eos else self._text.eos_token_ids,
            has_no_output=request.requested_tokens == 0,
            grammar_field=request.grammar_field or "tools",
            regions=self._regions,
        )
        skip = request.skip_special_tokens is not False
        # A completion continues its prompt, and so does a chat whose last message the client
        # began: a leading space is part of the text there.
        at_start = isinstance(request, ChatRequest) and not request.continue_final_message
        choices = []
        for index in range(len(self._prompts) * request.num_choices):
            detokenizer = self._text.tokenizer.detokenizer(
                skip_special_tokens=skip, at_start=at_start
            )
            writer = ChunkWriter(self._head, index, shows_usage=self._shows_usage)
            state = rules.new_state(detokenizer)
            choices.append(_ChoiceOutput(index, index // request.num_choices, state, writer))
        return choices

    def _region_rules(self) -> RegionRules | None:
        request = self._request
        if not isinstance(request, ChatRequest):
            return None
        template = template_of_regions(request, self._text)
        if template is None:
            return None
        special = self._text.tokenizer.special_ids()
        tools = request.template_tools
        return RegionRules(
            template if request.shows_tools else template.without_calls(),
            self._prompts[0].turn_start,
            schemas(tools),
            {token_id: text for text, token_id in special.items() if template.is_marker(text)},
            request.tool_choice.is_named,
            request.include_reasoning is not False,
            request.grammar is not None,
        )

    def _echo_text(self, prompt: Prompt) -> str:
        if not self._echoes:
            return ""
        return self._text.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _is_long(self, choice: _ChoiceOutput, delta: ChoiceDelta, is_first: bool) -> bool:
        """Returns True for a chunk with many log-probabilities, usually of an echoed prompt."""
        if self._num_logprobs is None:
            return False
        num_positions = len(delta.logprobs)
        if is_first and self._echoes:
            num_positions += len(self._prompts[choice.prompt].token_ids)
        return num_positions * (self._num_logprobs + 1) > _LONG_CHUNK_ENTRIES

    def _num_reasoning_tokens(self) -> int:
        states = [choice.state for choice in self._choices]
        return sum(min(one.num_reasoning_tokens, one.num_tokens) for one in states)

    def _chunk(self, choice: _ChoiceOutput, delta: ChoiceDelta, is_first: bool) -> bytes:
        if self._has_text_chunks and delta.finish_reason is None:
            text = self._echo_texts[choice.prompt] + delta.text if is_first else delta.text
            return choice.writer.text_chunk(text)
        before, after = self._split_chunk(choice, delta, is_first)
        logprobs = self._chunk_logprobs(choice, delta, with_prompt=is_first)
        return b"".join((before, encode(logprobs), after))

    def _long_chunk(
        self, choice: _ChoiceOutput, delta: ChoiceDelta, is_first: bool
    ) -> Rendering[bytes]:
        # Outside of the generator: the usage must be as of now, whenever the chunk is rendered.
        before, after = self._split_chunk(choice, delta, is_first)

        def rendering() -> Rendering[bytes]:
            logprobs = yield from self._logprobs(choice, [delta], with_prompt=is_first)
            return b"".join((before, encode(logprobs), after))

        return rendering()

    def _split_chunk(
        self, choice: _ChoiceOutput, delta: ChoiceDelta, is_first: bool
    ) -> tuple[bytes, bytes]:
        text = delta.text
        if is_first:
            text = self._echo_texts[choice.prompt] + text
        extras: Json = {}
        if delta.finish_reason is not None:
            extras["stop_reason"] = delta.stop_reason
        if self._request.return_token_ids:
            extras["token_ids"] = delta.token_ids
            if is_first:
                extras["prompt_token_ids"] = self._prompts[choice.prompt].token_ids
        usage = self.usage() if self._continuous_usage else None
        additions = message_fields(delta.reasoning, delta.tool_calls, is_chunk=True)
        return choice.writer.split_chunk(text, delta.finish_reason, extras, usage, additions)

    def _choice_body(self, choice: _ChoiceOutput) -> Rendering[Raw]:
        last = choice.deltas[-1]
        assert last.finish_reason is not None
        texts = [self._echo_texts[choice.prompt]]
        token_ids: list[int] = []
        for deltas in batched(choice.deltas, _SLICE_DELTAS):
            texts.append("".join([delta.text for delta in deltas]))
            if self._request.return_token_ids:
                token_ids += chain.from_iterable([delta.token_ids for delta in deltas])
            if len(deltas) == _SLICE_DELTAS:
                yield PAUSE
        additions: Json | None = None
        if self._regions is not None:
            reasoning = "".join([delta.reasoning for delta in choice.deltas])
            additions = message_fields(
                reasoning, chain.from_iterable(delta.tool_calls for delta in choice.deltas)
            )
        extras: Json = {"token_ids": token_ids} if self._request.return_token_ids else {}
        if not self._is_chat:
            extras.update((yield from self._prompt_extras(choice)))
        return choice_body(
            self._head.kind,
            choice.index,
            "".join(texts),
            (yield from self._logprobs(choice, choice.deltas, with_prompt=True)),
            last.finish_reason,
            last.stop_reason,
            extras,
            additions,
        )

    def _prompt_extras(self, choice: _ChoiceOutput) -> Rendering[Json]:
        extras: Json = {}
        if self._request.return_token_ids:
            extras["prompt_token_ids"] = self._prompts[choice.prompt].token_ids
        num_top = self._request.prompt_logprobs
        if num_top is not None:
            positions = ((0, entry, 0) for entry in self._prompt_logprobs[choice.prompt])
            lists = yield from list_rendering("prompt", positions, num_top)
            extras["prompt_logprobs"] = lists["entries"]
        return extras

    def _chunk_logprobs(
        self, choice: _ChoiceOutput, delta: ChoiceDelta, *, with_prompt: bool
    ) -> Json | None:
        """Returns the log-probabilities of a chunk that has few of them."""
        num_top, tokenizer = self._num_logprobs, self._text.tokenizer
        if num_top is None:
            return None
        if self._is_chat:
            content = chat_logprobs([entry for entry, _ in delta.logprobs], num_top, tokenizer)
            return {"content": content, "refusal": None}
        positions = self._positions(choice, [delta], with_prompt=with_prompt)
        return completion_logprobs(positions, num_top, tokenizer)

    def _logprobs(
        self, choice: _ChoiceOutput, deltas: Sequence[ChoiceDelta], *, with_prompt: bool
    ) -> Rendering[Json | None]:
        num_top = self._num_logprobs
        if num_top is None:
            return None
        positions = self._positions(choice, deltas, with_prompt=with_prompt)
        if self._is_chat:
            content = yield from list_rendering("chat", positions, num_top)
            return {**content, "refusal": None}
        return (yield from list_rendering("completion", positions, num_top))

    def _positions(
        self, choice: _ChoiceOutput, deltas: Sequence[ChoiceDelta], *, with_prompt: bool
    ) -> Iterator[Position]:
        if with_prompt and self._echoes:
            prompt = self._prompts[choice.prompt]
            entries, offsets = self._prompt_logprobs[choice.prompt], self._prompt_offsets(prompt)
            yield from zip(prompt.token_ids, entries, offsets, strict=True)
        num_echoed = len(self._echo_texts[choice.prompt])
        for delta in deltas:
            for entry, offset in delta.logprobs:
                yield entry.token_id, entry, num_echoed + offset

    def _prompt_offsets(self, prompt: Prompt) -> Iterator[int]:
        """Yields the offset of each prompt token in the echoed text. A special token has a width
        there if the client wrote it, and none if the tokenizer added it."""
        tokenizer, text = self._text.tokenizer, prompt.text
        stream = tokenizer.detokenizer(skip_special_tokens=text is None)
        offset = 0
        for token_id in prompt.token_ids:
            yield offset
            is_added = (
                text is not None
                and tokenizer.is_special(token_id)
                and not text.startswith(tokenizer.token_text(token_id), offset)
            )
            if not is_added:
                offset += len(stream.push(token_id))
