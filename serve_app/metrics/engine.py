"""The metrics of an engine, under vLLM's names so that its dashboards work.

The engine actor reports each started request, each step's output and each abort. Counts are plain
integers, rendered only at a scrape. Independent of Ray and HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from engine.host_memory import resident_bytes
from engine.types import EngineLoad, Request, StepOutput, TokenOutput
from serve_app.metrics.exposition import as_text, counter, gauge, histogram
from serve_app.metrics.histograms import ALIASES, HISTOGRAMS, Histogram

_LABELS = ("model_name", "engine")
_REASONS = ("stop", "length", "abort", "error")
_TIERS = ("device", "host", "disk", "registry")
_MAX_ADAPTERS_LISTED = 100


@dataclass(slots=True)
class _Live:
    """An engine request that has not ended. Times are those of the engine actor's wall clock."""

    request: Request
    adapter: str | None
    admitted_s: float
    open_choices: set[int]
    first_token_s: float | None = None
    last_token_s: dict[int, float] = field(default_factory=dict)
    num_tokens: Counter[int] = field(default_factory=Counter)


class EngineMetrics:
    """The counts of an engine actor. Every method belongs to the actor's event loop."""

    def __init__(self, model_name: str, engine: str, block_size: int, max_adapters: int) -> None:
        self._values = (model_name, engine)  # of _LABELS
        self._block_size = block_size
        self._max_adapters = max_adapters
        self._load = EngineLoad()
        self._live: dict[str, _Live] = {}
        self._histograms = {
            name: Histogram(buckets)
            for name, (_, buckets) in HISTOGRAMS.items()
            if name not in ALIASES
        }
        self._finished: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated = 0
        self._tier_hits: Counter[str] = Counter()
        self._updated_s = 0.0

    def begin(self, request: Request, adapter: str | None, now_s: float) -> None:
        """`adapter`: its registered name, never a client's string (label values stay bounded)."""
        choices = set(request.choices)
        self._live[request.request_id] = _Live(request, adapter, now_s, choices)

    def withdraw(self, request_id: str) -> None:
        """Forgets a request that the engine refused: it is not counted, as it may come again."""
        self._live.pop(request_id, None)

    def found_adapter(self, tier: str | None) -> None:
        """Counts the tier in which an admitted call found its adapter; None: it has none."""
        if tier is not None:
            self._tier_hits[tier] += 1

    def observe_step(self, step: StepOutput, now_s: float) -> None:
        self._load = step.load
        self._updated_s = now_s
        num_tokens = 0
        for output in step.outputs:
            num_tokens += len(output.token_ids)
            live = self._live.get(output.request_id)
            if live is not None:
                self._observe_output(live, output, now_s)
        self._num_generated += num_tokens
        if num_tokens:
            self._histograms["vllm:iteration_tokens_total"].observe(num_tokens)

    def end_choice(self, request_id: str, choice: int, reason: str, now_s: float) -> None:
        """Counts the end of a choice, also of an abort without an output of the engine. A second
        call for the same choice is ignored."""
        live = self._live.get(request_id)
        if live is None or choice not in live.open_choices:
            return
        live.open_choices.discard(choice)
        self._finished[reason] += 1
        if not live.open_choices:
            del self._live[request_id]
            self._observe_end(live, now_s)

    def text(self) -> bytes:
        return as_text(
            *self._load_families(),
            *self._counter_families(),
            *self._adapter_families(),
            *self._histogram_families(),
        )

    def _observe_output(self, live: _Live, output: TokenOutput, now_s: float) -> None:
        if output.token_ids:
            last_s = live.last_token_s.get(output.choice)
            if last_s is not None:
                self._histograms["vllm:inter_token_latency_seconds"].observe(now_s - last_s)
            live.last_token_s[output.choice] = now_s
            live.num_tokens[output.choice] += len(output.token_ids)
            if live.first_token_s is None:
                live.first_token_s = now_s
                self._observe_first_token(live, output, now_s)
        if output.finish_reason is not None:
            self.end_choice(output.request_id, output.choice, output.finish_reason, now_s)

    def _observe_first_token(self, live: _Live, output: TokenOutput, now_s: float) -> None:
        arrival_s = live.request.arrival_s or live.admitted_s
        if not live.request.has_output:  # otherwise another engine sent its first token
            self._histograms["vllm:time_to_first_token_seconds"].observe(now_s - arrival_s)
        self._histograms["vllm:request_prefill_time_seconds"].observe(now_s - live.admitted_s)
        self._num_prompt_tokens += len(live.request.prompt_token_ids)
        self._num_cached_tokens += output.num_cached_tokens

    def _observe_end(self, live: _Live, now_s: float) -> None:
        request, histograms = live.request, self._histograms
        arrival_s = request.arrival_s or live.admitted_s
        histograms["vllm:e2e_request_latency_seconds"].observe(now_s - arrival_s)
        if not request.has_output:
            histograms["vllm:request_queue_time_seconds"].observe(live.admitted_s - arrival_s)
        histograms["vllm:request_inference_time_seconds"].observe(now_s - live.admitted_s)
        if live.first_token_s is not None:
            histograms["vllm:request_decode_time_seconds"].observe(now_s - live.first_token_s)
        histograms["vllm:request_prompt_tokens"].observe(len(request.prompt_token_ids))
        histograms["vllm:request_generation_tokens"].observe(live.num_tokens.total())
        longest = max(live.num_tokens.values(), default=0)
        histograms["vllm:request_max_num_generation_tokens"].observe(longest)
        histograms["vllm:request_params_n"].observe(request.params.n)
        histograms["vllm:request_params_max_tokens"].observe(request.params.max_tokens)

    def _load_families(self) -> Iterator[str]:
        load = self._load
        usage, deferred = load.kv_usage, load.num_waiting_for_adapter
        yield self._gauge("vllm:num_requests_running", "Sequences in the batch", load.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences not begun", load.num_waiting)
        yield gauge(
            "vllm:num_requests_waiting_by_reason",
            "Sequences not begun; deferred: their adapter has no room",
            (*_LABELS, "reason"),
            self._rows({"capacity": load.num_waiting - deferred, "deferred": deferred}),
        )
        yield self._gauge("vllm:kv_cache_usage_perc", "Used KV blocks, 1 = all", usage)
        yield self._gauge("vllm:gpu_cache_usage_perc", "Old name of kv_cache_usage_perc", usage)
        config = {"block_size": str(self._block_size), "num_gpu_blocks": str(load.num_blocks)}
        yield self._info("vllm:cache_config_info", "KV cache", config, 1.0)
        yield self._info(
            "vllm:lora_requests_info", "Adapters in use", self._adapters(), self._updated_s
        )

    def _adapters(self) -> dict[str, str]:
        running, waiting = set[str](), set[str]()
        for live in self._live.values():
            if live.adapter is not None:
                (waiting if live.first_token_s is None else running).add(live.adapter)
        return {
            "max_lora": str(self._max_adapters),
            "waiting_lora_adapters": _join(waiting),
            "running_lora_adapters": _join(running),
        }

    def _counter_families(self) -> Iterator[str]:
        load = self._load
        for name, words, value in (
            ("vllm:prompt_tokens", "Prompt tokens of begun requests", self._num_prompt_tokens),
            ("vllm:generation_tokens", "Generated tokens", self._num_generated),
            ("vllm:prompt_tokens_cached", "Prompt tokens from cache", self._num_cached_tokens),
            ("vllm:prefix_cache_queries", "Tokens looked up", load.prefix_queries),
            ("vllm:prefix_cache_hits", "Tokens found", load.prefix_hits),
            ("vllm:num_preemptions", "Sequences put back to recompute", load.num_preemptions),
        ):
            yield counter(name, words, _LABELS, [(self._values, value)])
        yield counter(
            "vllm:request_success",
            "Choices that ended, by reason",
            (*_LABELS, "finished_reason"),
            self._rows({reason: self._finished[reason] for reason in _REASONS}),
        )

    def _adapter_families(self) -> Iterator[str]:
        load, by_tier = self._load, (*_LABELS, "tier")
        yield counter(
            "loraplex_adapter_tier_hits",
            "Requests by the tier that held their adapter when they came",
            by_tier,
            self._rows({tier: self._tier_hits[tier] for tier in _TIERS}),
        )
        num_adapters = {
            "device": len(load.adapters_on_device),
            "host": len(load.adapters_on_host),
        }
        yield gauge(
            "loraplex_adapters_in_memory",
            "Adapters; those on the device lie on the host, too",
            by_tier,
            self._rows(num_adapters),
        )
        num_bytes = {"device": load.adapter_device_bytes, "host": load.adapter_host_bytes}
        yield gauge(
            "loraplex_adapter_memory_bytes", "Taken by adapters", by_tier, self._rows(num_bytes)
        )
        if (resident := resident_bytes()) is not None:
            yield self._gauge("loraplex_engine_resident_bytes", "The process's memory", resident)
        yield self._gauge("loraplex_adapters_pinned", "In memory", load.num_pinned_adapters)
        for name, words, value in (
            ("loraplex_adapter_device_copies", "Host to device", load.num_adapter_copies),
            (
                "loraplex_engine_missed_wakeups",
                "Times that the engine slept beside requests that it could run: always a fault",
                load.num_missed_wakeups,
            ),
        ):
            yield counter(name, words, _LABELS, [(self._values, value)])

    def _histogram_families(self) -> Iterator[str]:
        for name, (words, _) in HISTOGRAMS.items():
            found = self._histograms[ALIASES.get(name, name)]
            yield histogram(name, words, _LABELS, [(self._values, found)])

    def _gauge(self, name: str, words: str, value: float) -> str:
        return gauge(name, words, _LABELS, [(self._values, value)])

    def _info(self, name: str, words: str, labels: Mapping[str, str], value: float) -> str:
        row = ((*self._values, *labels.values()), value)
        return gauge(name, words, (*_LABELS, *labels), [row])

    def _rows(self, counts: Mapping[str, float]) -> list[tuple[tuple[str, ...], float]]:
        """Returns a row for each value of a third label."""
        return [((*self._values, value), count) for value, count in counts.items()]


def _join(names: set[str]) -> str:
    return ",".join(sorted(names)[:_MAX_ADAPTERS_LISTED])
