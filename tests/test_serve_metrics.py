"""The metrics of an engine, from the actor's calls to a scrape's samples."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.host_blocks import KVHostLoad
from engine.types import (
    EngineLoad,
    FinishReason,
    Request,
    ResumedChoice,
    SamplingParams,
    StepOutput,
    TokenOutput,
)
from registry.cache import CacheStats
from serve_app.api.scrape import Scrape
from serve_app.metrics.engine import EngineMetrics
from serve_app.metrics.exposition import join_texts
from serve_app.metrics.histograms import GAP_SECONDS, Histogram
from serve_app.metrics.ingress import IngressMetrics
from serve_app.metrics.replica import cache_text

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

# Queried by vLLM's own Grafana dashboard and the usual autoscaling recipes.
DASHBOARD_SERIES = (
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:gpu_cache_usage_perc",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
)


def new_metrics() -> EngineMetrics:
    return EngineMetrics("base", "e0", block_size=16)


def new_request(request_id: str = "r", prompt: int = 7, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=8, n=n)
    return Request(request_id, tuple(range(prompt)), params, arrival_s=100.0)


def step(*outputs: TokenOutput, load: EngineLoad | None = None) -> StepOutput:
    return StepOutput(outputs, load or EngineLoad())


def token(
    offset: int = 0, choice: int = 0, reason: FinishReason | None = None, cached: int = 0
) -> TokenOutput:
    return TokenOutput("r", choice, offset, (5,), finish_reason=reason, num_cached_tokens=cached)


def samples(text: bytes) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(metrics: EngineMetrics, name: str, **labels: str) -> float:
    wanted = frozenset(({"model_name": "base", "engine": "e0"} | labels).items())
    return samples(metrics.text())[name, wanted]


def test_every_series_of_the_usual_dashboards_is_there_before_the_first_request() -> None:
    names = {name for name, _ in samples(new_metrics().text())}
    assert set(DASHBOARD_SERIES) <= names


def test_a_request_leaves_its_times_and_tokens() -> None:
    metrics = new_metrics()
    metrics.begin(new_request(), None, now_s=100.5)
    metrics.observe_step(step(token(0, cached=3)), now_s=101.0)
    metrics.observe_step(step(token(1)), now_s=101.25)
    metrics.observe_step(step(token(2, reason="stop")), now_s=102.0)
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 1.0
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == 0.5
    assert value(metrics, "vllm:request_prefill_time_seconds_sum") == 0.5
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == 1.0
    assert value(metrics, "vllm:time_per_output_token_seconds_count") == 2
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 2.0
    assert value(metrics, "vllm:request_decode_time_seconds_sum") == 1.0
    assert value(metrics, "vllm:prompt_tokens_total") == 7
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 3
    assert value(metrics, "vllm:generation_tokens_total") == 3
    assert value(metrics, "vllm:request_generation_tokens_sum") == 3
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1


def test_a_resumed_request_counts_what_this_engine_gave() -> None:
    metrics = new_metrics()
    resumed = (ResumedChoice(2, (5, 5, 5)), ResumedChoice(0, ()))
    metrics.begin(replace(new_request(n=3), resumed=resumed), None, now_s=150.0)
    metrics.observe_step(step(token(3, choice=2), token(0, choice=0)), now_s=150.5)
    metrics.observe_step(step(token(4, choice=2, reason="stop")), now_s=150.75)
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 0
    metrics.observe_step(step(token(1, choice=0, reason="length")), now_s=151.0)
    assert value(metrics, "vllm:generation_tokens_total") == 4
    assert value(metrics, "vllm:request_generation_tokens_sum") == 4
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 51.0
    # Its client had its first token long ago, and it queued elsewhere.
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0
    assert value(metrics, "vllm:request_queue_time_seconds_count") == 0
    assert metrics._live == {}


def test_a_request_resumed_before_its_first_token_is_like_a_new_one() -> None:
    metrics = new_metrics()
    metrics.begin(replace(new_request(), resumed=(ResumedChoice(0, ()),)), None, now_s=101.0)
    metrics.observe_step(step(token(0, reason="stop")), now_s=102.0)
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 2.0
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == 1.0


def test_choices_are_counted_apart_and_the_prompt_once() -> None:
    metrics = new_metrics()
    metrics.begin(new_request(n=2), None, now_s=100.0)
    metrics.observe_step(step(token(0, 0), token(0, 1)), now_s=101.0)
    metrics.observe_step(step(token(1, 0, "length")), now_s=102.0)
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 0
    metrics.observe_step(step(token(1, 1), token(2, 1, "stop")), now_s=103.0)
    assert value(metrics, "vllm:prompt_tokens_total") == 7
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 1
    assert value(metrics, "vllm:request_generation_tokens_sum") == 5
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum") == 3


def test_an_aborted_request_is_counted_once_and_forgotten() -> None:
    metrics = new_metrics()
    metrics.begin(new_request(), "pirate", now_s=100.0)
    metrics.end_choice("r", 0, "abort", now_s=101.0)
    metrics.observe_step(step(token(0, reason="abort")), now_s=101.5)
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert b"pirate" not in metrics.text()


def test_adapters_in_use_are_listed_until_their_requests_end() -> None:
    metrics = new_metrics()
    metrics.begin(new_request(), "pirate", now_s=100.0)
    assert b'waiting_lora_adapters="pirate"' in metrics.text()
    metrics.observe_step(step(token(0)), now_s=101.0)
    assert b'running_lora_adapters="pirate"' in metrics.text()
    metrics.observe_step(step(token(1, reason="length")), now_s=102.0)
    assert b"pirate" not in metrics.text()


def test_the_load_becomes_gauges_and_counters() -> None:
    load = EngineLoad(
        num_running=3,
        num_waiting=5,
        num_waiting_for_adapter=2,
        num_blocks=100,
        num_free_blocks=25,
        num_preemptions=4,
        prefix_queries=50,
        prefix_hits=20,
        num_missed_wakeups=1,
    )
    metrics = new_metrics()
    metrics.observe_step(step(load=load), now_s=100.0)
    assert value(metrics, "vllm:num_requests_running") == 3
    assert value(metrics, "vllm:num_requests_waiting") == 5
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="capacity") == 3
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="deferred") == 2
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.75
    assert value(metrics, "vllm:num_preemptions_total") == 4
    assert value(metrics, "vllm:prefix_cache_hits_total") == 20
    assert value(metrics, "loraplex_engine_missed_wakeups_total") == 1


def test_a_bucket_holds_what_is_at_most_its_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for observed in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(observed)
    assert (histogram.bounds, histogram.counts) == (("1.0", "2.0", "+Inf"), [2, 1, 1])
    assert histogram.total == 10.0
    assert list(GAP_SECONDS) == sorted(GAP_SECONDS)


def test_joined_expositions_keep_every_sample_and_name_each_family_once() -> None:
    first, second = new_metrics(), EngineMetrics("other", "e1", 16)
    ingress = IngressMetrics("i0")
    ingress.answered("/v1/models", 200)
    parts = [first.text(), second.text(), ingress.text(num_open=2)]
    joined = join_texts(parts)
    assert samples(joined) == {k: v for part in parts for k, v in samples(part).items()}
    helps = [line for line in joined.splitlines() if line.startswith(b"# HELP")]
    assert len(helps) == len(set(helps))


def test_the_cache_is_told_with_the_engines_labels() -> None:
    stats = CacheStats(
        own_bytes=7,
        max_bytes=9,
        hits=1,
        misses=2,
        evictions=3,
        fetches_in_flight=4,
        num_quarantined=5,
    )
    labels = {"model_name": "base", "engine": "e0"}
    found_values = {
        (name, dict(found).get("stage")): number
        for (name, found), number in samples(cache_text(stats, 6, labels)).items()
        if labels.items() <= dict(found).items()
    }
    assert found_values == {
        ("loraplex_cache_bytes", None): 7,
        ("loraplex_cache_limit_bytes", None): 9,
        ("loraplex_cache_hits_total", None): 1,
        ("loraplex_cache_misses_total", None): 2,
        ("loraplex_cache_evictions_total", None): 3,
        ("loraplex_cache_downloads_in_flight", None): 4,
        ("loraplex_quarantined_versions", "fetch"): 5,
        ("loraplex_quarantined_versions", "load"): 6,
    }


class Collection:
    """Counts the collections, which end when the test sets `may_end`."""

    def __init__(self) -> None:
        self.count = 0
        self.may_end = asyncio.Event()

    async def __call__(self) -> bytes:
        self.count += 1
        await self.may_end.wait()
        return b"%d" % self.count


async def test_scrapes_at_once_share_one_collection_which_is_kept_for_a_moment() -> None:
    collection = Collection()
    scrape = Scrape(collection)
    scrapes = [asyncio.create_task(scrape.text(60.0)) for _ in range(30)]
    await asyncio.sleep(0)
    collection.may_end.set()
    assert set(await asyncio.gather(*scrapes)) == {b"1"}
    assert await scrape.text(60.0) == b"1"
    assert await scrape.text(0.0) == b"2"


async def test_a_scraper_that_leaves_ends_no_collection_of_the_others() -> None:
    collection = Collection()
    scrape = Scrape(collection)
    first, second = (asyncio.create_task(scrape.text(60.0)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    collection.may_end.set()
    assert await second == b"1"


async def test_a_collection_that_failed_is_not_kept() -> None:
    async def fail() -> bytes:
        raise RuntimeError("broken")

    scrape = Scrape(fail)
    with pytest.raises(RuntimeError, match="broken"):
        await scrape.text(60.0)
    scrape._collect = collection = Collection()
    collection.may_end.set()
    assert await scrape.text(60.0) == b"1"


def test_the_types_of_kv_are_a_label_as_vllm_has_it() -> None:
    for metrics, dtype in (
        (EngineMetrics("m", "e", 16), "auto"),
        (EngineMetrics("m", "e", 16, kv_cache_dtype="fp8"), "fp8"),
    ):
        (info,) = [
            family.samples[0].labels
            for family in text_string_to_metric_families(metrics.text().decode())
            if family.name == "vllm:cache_config_info"
        ]
        assert (info["cache_dtype"], info["block_size"]) == (dtype, "16")


def test_drafts_are_counted_under_vllms_names() -> None:
    metrics = EngineMetrics("m", "e", 16)
    load = EngineLoad(
        num_drafts=3, num_draft_tokens=12, num_accepted_tokens=5, accepted_per_position=(3, 2, 0)
    )
    metrics.observe_step(StepOutput((), load), 1.0)
    found = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name.startswith("vllm:spec_decode")
    }
    name = "vllm:spec_decode_num_"
    assert found == {
        (name + "drafts_total", None): 3,
        (name + "draft_tokens_total", None): 12,
        (name + "accepted_tokens_total", None): 5,
        **{
            (name + "accepted_tokens_per_pos_total", str(i)): count
            for i, count in enumerate((3, 2, 0))
        },
    }


def test_hits_are_counted_by_their_tier() -> None:
    metrics = EngineMetrics("base", "e0", 16)
    host = KVHostLoad(
        num_blocks=10,
        num_used_blocks=4,
        hit_tokens=32,
        stored_bytes=600,
        loaded_bytes=200,
        store_s=0.5,
        load_s=0.25,
        num_dropped_blocks=3,
        num_swapped_blocks=2,
    )
    load = EngineLoad(prefix_queries=100, prefix_hits=50, kv_host=host)
    metrics.observe_step(StepOutput((), load), 1.0)
    assert value(metrics, "vllm:prefix_cache_queries_total") == 100
    assert value(metrics, "vllm:prefix_cache_hits_total") == 18
    assert value(metrics, "vllm:external_prefix_cache_queries_total") == 82
    assert value(metrics, "vllm:external_prefix_cache_hits_total") == 32
    assert value(metrics, "loraplex_kv_host_blocks", state="used") == 4
    assert value(metrics, "loraplex_kv_host_blocks", state="free") == 6
    assert value(metrics, "loraplex_kv_host_copied_bytes_total", direction="store") == 600
    assert value(metrics, "loraplex_kv_host_copied_bytes_total", direction="load") == 200
    assert value(metrics, "loraplex_kv_host_copy_seconds_total", direction="store") == 0.5
    assert value(metrics, "loraplex_kv_host_copy_seconds_total", direction="load") == 0.25
    assert value(metrics, "loraplex_kv_host_swapped_blocks_total") == 2
    assert value(metrics, "loraplex_kv_host_dropped_blocks_total") == 3
