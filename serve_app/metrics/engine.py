"""The metrics of an engine, under vLLM's names so that its dashboards work.

The engine actor reports each started request, each step's output and each abort. Counts are plain
integers, rendered only at a scrape. Independent of Ray and HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.admission import EngineLimits
from engine.host_memory import resident_bytes
from engine.types import NOT_FINITE, EngineLoad, Request, StepOutput, TokenOutput
from serve_app.metrics.exposition import as_text, counter, gauge, histogram
from serve_app.metrics.histograms import ALIASES, HISTOGRAMS, Histogram, bounded

_REASONS = ("stop", "length", "abort", "error")
_TIERS = ("device", "host", "disk", "registry")
_MAX_ADAPTERS_LISTED = 100
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_NO_LIMITS = EngineLimits(200_000, 0, 0)


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
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class EngineMetrics:
    """The counts of an engine actor. Every method belongs to the actor's event loop."""

    def __init__(
        self,
        model_name: str,
        engine: str,
        block_size: int,
        limits: EngineLimits = _NO_LIMITS,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self._own = {"model_name": model_name, "engine": engine}
        self._cache_config = {"block_size": str(block_size), "cache_dtype": kv_cache_dtype}
        self._limits = limits
        self._load = EngineLoad()
        self._live: dict[str, _Live] = {}
        self._histograms = {
            name: Histogram(bounded(name, limits.max_model_len))
            for name in HISTOGRAMS
            if name not in ALIASES
        }
        self._finished: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_host_tokens = 0  # of these, at the last exposition
        self._num_split_tokens = 0  # all cached tokens, at the last exposition
        self._num_generated = 0
        self._num_corrupted = 0
        self._tier_hits: Counter[str] = Counter()
        self._updated_s = 0.0

    def begin(self, request: Request, adapter: str | None, now_s: float) -> None:
        """`adapter`: registered names, of several adapters with commas; never a client's string, so
        that label values stay bounded."""
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
        num_generated, num_prompt = 0, self._num_prompt_tokens
        for request_id in step.preempted:
            if (live := self._live.get(request_id)) is not None:
                live.num_preemptions += 1
        for output in step.outputs:
            num_generated += len(output.token_ids)
            live = self._live.get(output.request_id)
            if live is not None:
                self._observe_output(live, output, now_s)
        self._num_generated += num_generated
        if num_generated:  # as in vLLM a prompt counts in the step that ends it
            num_tokens = num_generated + self._num_prompt_tokens - num_prompt
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
            *self._kv_host_families(),
            *self._adapter_families(),
            *self._histogram_families(),
        )

    def _observe_output(self, live: _Live, output: TokenOutput, now_s: float) -> None:
        if output.token_ids:
            last_s = live.last_token_s.get(output.choice)
            if last_s is not None:
                self._histograms["loraplex_inter_token_latency_seconds"].observe(now_s - last_s)
            live.last_token_s[output.choice] = now_s
            live.num_tokens[output.choice] += len(output.token_ids)
            if live.first_token_s is None:
                live.first_token_s = now_s
                self._observe_first_token(live, output, now_s)
        if output.finish_reason is not None:
            self._num_corrupted += output.error == NOT_FINITE
            self.end_choice(output.request_id, output.choice, output.finish_reason, now_s)

    def _observe_first_token(self, live: _Live, output: TokenOutput, now_s: float) -> None:
        arrival_s = live.request.arrival_s or live.admitted_s
        if not live.request.has_output:  # otherwise another engine sent its first token
            self._histograms["vllm:time_to_first_token_seconds"].observe(now_s - arrival_s)
        self._histograms["vllm:request_prefill_time_seconds"].observe(now_s - live.admitted_s)
        self._num_prompt_tokens += len(live.request.prompt_token_ids)
        self._num_cached_tokens += output.num_cached_tokens
        live.num_cached_tokens = output.num_cached_tokens

    def _observe_end(self, live: _Live, now_s: float) -> None:
        request, histograms = live.request, self._histograms
        arrival_s = request.arrival_s or live.admitted_s
        histograms["vllm:e2e_request_latency_seconds"].observe(now_s - arrival_s)
        if not request.has_output:
            histograms["vllm:request_queue_time_seconds"].observe(live.admitted_s - arrival_s)
        histograms["vllm:request_inference_time_seconds"].observe(now_s - live.admitted_s)
        if live.first_token_s is not None:
            decode_s = now_s - live.first_token_s
            histograms["vllm:request_decode_time_seconds"].observe(decode_s)
            longest = max(live.num_tokens.values())
            mean_s = decode_s / (longest - 1) if longest > 1 else 0.0
            histograms["vllm:request_time_per_output_token_seconds"].observe(mean_s)
            num_computed = request.num_tokens - live.num_cached_tokens
            histograms["vllm:request_prefill_kv_computed_tokens"].observe(max(num_computed, 0))
        histograms["vllm:request_num_preemptions"].observe(live.num_preemptions)
        histograms["vllm:request_prompt_tokens"].observe(len(request.prompt_token_ids))
        histograms["vllm:request_generation_tokens"].observe(live.num_tokens.total())
        longest = max(live.num_tokens.values(), default=0)
        histograms["vllm:request_max_num_generation_tokens"].observe(longest)
        histograms["vllm:request_params_n"].observe(request.params.n)
        histograms["vllm:request_params_max_tokens"].observe(request.params.max_tokens)

    def _load_families(self) -> Iterator[str]:
        load, own = self._load, self._own
        usage, deferred = load.kv_usage, load.num_waiting_for_adapter
        waiting = {"capacity": load.num_waiting - deferred, "deferred": deferred}
        config = self._cache_config | {"num_gpu_blocks": str(load.num_blocks)}
        yield gauge("vllm:num_requests_running", load.num_running, own)
        yield gauge("vllm:num_requests_waiting", load.num_waiting, own)
        yield gauge("vllm:num_requests_waiting_by_reason", waiting, own, "reason")
        yield gauge("vllm:kv_cache_usage_perc", usage, own)
        yield gauge("vllm:gpu_cache_usage_perc", usage, own)
        yield gauge("vllm:cache_config_info", 1.0, own | config)
        yield gauge("vllm:lora_requests_info", self._updated_s, own | self._adapters())
        # An engine that sleeps is a process that ended: the manager reports it.
        awake = {state: float(state == "awake") for state in _SLEEP_STATES}
        yield gauge("vllm:engine_sleep_state", awake, own, "sleep_state")

    def _adapters(self) -> dict[str, str]:
        running, waiting = set[str](), set[str]()
        for live in self._live.values():
            if live.adapter is not None:
                names = waiting if live.first_token_s is None else running
                names.update(live.adapter.split(","))
        return {
            "max_lora": "0",  # the pool is limited by bytes, not by a number of adapters
            "waiting_lora_adapters": _join(waiting),
            "running_lora_adapters": _join(running),
        }

    def _counter_families(self) -> Iterator[str]:
        load, own = self._load, self._own
        finished = {reason: self._finished[reason] for reason in _REASONS}
        yield counter("vllm:prompt_tokens", self._num_prompt_tokens, own)
        # The tokens from the host are counted when a sequence begins, prompts with their first
        # output: here the tokens from the host follow the prompts, so that no counter falls.
        grown = self._num_cached_tokens - self._num_split_tokens
        on_host = min(load.kv_host.hit_tokens, self._num_host_tokens + grown)
        self._num_host_tokens, self._num_split_tokens = on_host, self._num_cached_tokens
        sources = {
            "local_compute": self._num_prompt_tokens - self._num_cached_tokens,
            "local_cache_hit": self._num_cached_tokens - on_host,
            "external_kv_transfer": on_host,
        }
        yield counter("vllm:prompt_tokens_by_source", sources, own, "source")
        yield counter("vllm:generation_tokens", self._num_generated, own)
        yield counter("vllm:prompt_tokens_cached", self._num_cached_tokens, own)
        yield counter("vllm:prefix_cache_queries", load.prefix_queries, own)
        on_device = load.prefix_hits - load.kv_host.hit_tokens
        yield counter("vllm:prefix_cache_hits", on_device, own)
        missed = load.prefix_queries - on_device if load.kv_host.num_blocks else 0
        yield counter("vllm:external_prefix_cache_queries", missed, own)
        yield counter("vllm:external_prefix_cache_hits", load.kv_host.hit_tokens, own)
        yield counter("vllm:num_preemptions", load.num_preemptions, own)
        yield counter("vllm:spec_decode_num_drafts", load.num_drafts, own)
        yield counter("vllm:spec_decode_num_draft_tokens", load.num_draft_tokens, own)
        yield counter("vllm:spec_decode_num_accepted_tokens", load.num_accepted_tokens, own)
        accepted = {str(i): count for i, count in enumerate(load.accepted_per_position or (0,))}
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield counter(name, accepted, own, "position")
        yield counter("vllm:request_success", finished, own, "finished_reason")
        yield counter("vllm:corrupted_requests", self._num_corrupted, own)

    def _kv_host_families(self) -> Iterator[str]:
        host, own = self._load.kv_host, self._own
        blocks = {"used": host.num_used_blocks, "free": host.num_blocks - host.num_used_blocks}
        num_bytes = {"store": host.stored_bytes, "load": host.loaded_bytes}
        seconds = {"store": host.store_s, "load": host.load_s}
        yield gauge("loraplex_kv_host_blocks", blocks, own, "state")
        yield counter("loraplex_kv_host_copied_bytes", num_bytes, own, "direction")
        yield counter("loraplex_kv_host_copy_seconds", seconds, own, "direction")
        yield counter("loraplex_kv_host_swapped_blocks", host.num_swapped_blocks, own)
        yield counter("loraplex_kv_host_dropped_blocks", host.num_dropped_blocks, own)

    def _adapter_families(self) -> Iterator[str]:
        load, own = self._load, self._own
        hits = {tier: self._tier_hits[tier] for tier in _TIERS}
        counts = {"device": len(load.adapters_on_device), "host": len(load.adapters_on_host)}
        num_bytes = {"device": load.adapter_device_bytes, "host": load.adapter_host_bytes}
        yield gauge("vllm:num_gpu_loaded_lora_adapters", counts["device"], own)
        yield gauge("vllm:max_gpu_lora_adapters", self._max_on_device(), own)
        yield counter("loraplex_adapter_tier_hits", hits, own, "tier")
        yield gauge("loraplex_adapters_in_memory", counts, own, "tier")
        yield gauge("loraplex_adapter_memory_bytes", num_bytes, own, "tier")
        if (resident := resident_bytes()) is not None:
            yield gauge("loraplex_engine_resident_bytes", resident, own)
        yield gauge("loraplex_adapters_pinned", load.num_pinned_adapters, own)
        yield counter("loraplex_adapter_device_copies", load.num_adapter_copies, own)
        yield counter("loraplex_engine_late_compilations", load.num_late_compilations, own)
        yield counter("loraplex_engine_missed_wakeups", load.num_missed_wakeups, own)

    def _max_on_device(self) -> int:
        """Returns the number of adapters that the device can hold if further adapters are as large
        as the present adapters, or as a rank of 16 at all sites if there are none: its room is
        bytes, not slots."""
        load, limits = self._load, self._limits
        num, used = len(load.adapters_on_device), load.adapter_device_bytes
        mean = used / num if num else limits.adapter_page_bytes
        free = limits.adapter_pool_bytes - used
        return num + (int(free / mean) if mean and free > 0 else 0)

    def _histogram_families(self) -> Iterator[str]:
        for name, buckets in HISTOGRAMS.items():
            values = self._histograms.get(name)
            if values is None:
                values = self._histograms[ALIASES[name]].coarser(buckets)
            yield histogram(name, values, self._own)


def _join(names: set[str]) -> str:
    return ",".join(sorted(names)[:_MAX_ADAPTERS_LISTED])
