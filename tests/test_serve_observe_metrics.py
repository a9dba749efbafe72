"""Series by adapter, by tenant and of engines that sleep: bounded, monotone, the same for all."""

from __future__ import annotations

import random

from prometheus_client.parser import text_string_to_metric_families

from engine.admission import EngineLimits
from engine.types import NOT_FINITE, EngineLoad, Request, Resident, SamplingParams, StepOutput
from engine.types import TokenOutput as Output
from registry.entities import AdapterVersion
from serve_app.control.kept_counts import EngineCounters, IngressTotals
from serve_app.messages import IngressCounts
from serve_app.metrics.engine import EngineMetrics
from serve_app.metrics.histograms import GAP_SECONDS, HISTOGRAMS, Histogram
from serve_app.metrics.ingress import IngressMetrics
from serve_app.metrics.replica import residents_text
from serve_app.observe.record import RequestRecord
from serve_app.observe.request_metrics import Busiest, RequestMetrics
from tests.ingress_app import finished_record

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: bytes) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(text: bytes, name: str, **labels: str) -> float:
    """The sum of the samples with these labels."""
    wanted = set(labels.items())
    found = samples(text).items()
    return sum(number for (n, pairs), number in found if n == name and wanted <= pairs)


def finished(
    adapter: str = "a", tenant: str = "", outcome: str = "ok", key_id: str = ""
) -> RequestRecord:
    return finished_record("base", adapter, tenant, outcome, key_id)


# Adapters and tenants


def test_a_request_counts_once_for_its_adapter_and_once_for_its_tenant() -> None:
    metrics = RequestMetrics("i0", 10, 10, ("gold",))
    metrics.observe(finished("pirate", "gold"))
    metrics.observe(finished("", "gold", "error"))
    text = metrics.text(0.0)
    assert value(text, "loraplex_adapter_requests_total", adapter="pirate", outcome="ok") == 1
    assert value(text, "loraplex_adapter_requests_total", adapter="(base)", outcome="error") == 1
    assert value(text, "loraplex_tenant_requests_total", tenant="gold") == 2
    assert value(text, "loraplex_tenant_prompt_tokens_total", tenant="gold") == 20
    assert value(text, "loraplex_adapter_output_tokens_total", adapter="pirate") == 5
    first = "loraplex_adapter_time_to_first_token_seconds"
    assert value(text, f"{first}_sum", adapter="pirate") == 0.2
    assert value(text, f"{first}_bucket", adapter="pirate", le="0.1") == 0
    assert value(text, f"{first}_bucket", adapter="pirate", le="0.25") == 1


def test_a_tenant_that_a_client_made_up_is_no_label() -> None:
    metrics = RequestMetrics("i0", 10, 10, ("gold",))
    metrics.observe(finished(tenant='x" made-up'))
    metrics.observe(finished(tenant="of-a-key", key_id="k"))
    text = metrics.text(0.0)
    assert b"made-up" not in text
    assert value(text, "loraplex_tenant_requests_total", tenant="other") == 1
    assert value(text, "loraplex_tenant_requests_total", tenant="of-a-key") == 1


def test_keys_without_a_tenant_share_other_and_take_no_place() -> None:
    metrics = RequestMetrics("i0", 10, 1, ())
    metrics.observe(finished(tenant="", key_id="k"))
    metrics.observe(finished(tenant="of-a-key", key_id="l"))
    text = metrics.text(0.0)
    labels = {dict(pairs).get("tenant") for _, pairs in samples(text)} - {None}
    assert labels == {"other", "of-a-key"}
    assert value(text, "loraplex_tenant_requests_total", tenant="other") == 1


def test_failures_are_counted_from_0_so_that_the_alert_sees_the_first() -> None:
    metrics = RequestMetrics("i0", 10, 10, ("gold",))
    metrics.observe(finished("pirate", "gold"))
    found = {
        (name, *sorted(pairs)): number
        for (name, pairs), number in samples(metrics.text(0.0)).items()
    }
    for outcome in ("error", "non_finite"):
        of_adapter = ("adapter", "pirate"), ("ingress", "i0"), ("model_name", "base")
        assert found["loraplex_adapter_requests_total", *of_adapter, ("outcome", outcome)] == 0
        of_tenant = ("ingress", "i0"), ("outcome", outcome), ("tenant", "gold")
        assert found["loraplex_tenant_requests_total", *of_tenant] == 0


def test_the_series_are_bounded_whatever_the_number_of_adapters() -> None:
    metrics = RequestMetrics("i0", 20, 5, ())
    for number in range(2000):
        metrics.observe(finished(f"a{number}", f"t{number}", key_id="k"))
        if number % 100 == 0:
            metrics.text(number)
    text = metrics.text(3000.0)
    labels = {dict(pairs).get("adapter") for _, pairs in samples(text)} - {None}
    assert len(labels) <= 21
    assert "other" in labels
    assert len({dict(pairs).get("tenant") for _, pairs in samples(text)} - {None}) <= 6


def test_an_adapter_that_becomes_busy_takes_the_place_of_one_that_is_idle() -> None:
    busiest = Busiest[str](2)
    for name in ("old", "steady", "old", "steady"):
        assert busiest.count(name)
    busiest.review(0.0)
    for _ in range(10):
        assert not busiest.count("new")
        busiest.count("steady")
    assert busiest.review(20.0) == {"old"}
    assert busiest.count("new")
    assert not busiest.count("old")


def test_two_that_are_equally_busy_do_not_change_places() -> None:
    busiest, draw = Busiest[str](1), random.Random(0)
    busiest.count("first")
    busiest.review(0.0)
    for turn in range(1, 100):
        for _ in range(20):
            busiest.count(draw.choice(("first", "second")))
        assert busiest.review(turn * 11.0) == set()


def test_sums_over_two_ingresses_never_fall_while_places_change() -> None:
    totals, draw = IngressTotals(), random.Random(1)
    ingresses = [RequestMetrics(f"i{number}", 2, 2, ()) for number in range(2)]
    sent, last = 0, Samples()
    for turn in range(60):
        for _ in range(draw.randrange(20)):
            adapter = f"a{(turn // 15 + draw.randrange(3)) % 6}"
            draw.choice(ingresses).observe(finished(adapter))
            sent += 1
        for name, metrics in zip(("i0", "i1"), ingresses, strict=True):
            counts = IngressCounts(turn + 1, metrics.text(turn * 11.0), was_taken=False)
            totals.add(name, counts, turn * 3.0)
        now = samples(totals.text(turn * 3.0))
        assert all(now[key] >= number for key, number in last.items() if key in now)
        last = now
    other = value(totals.text(200.0), "loraplex_adapter_requests_total", adapter="other")
    assert 0 < other < sent


def test_one_scrape_is_the_sum_of_two_ingresses_whichever_answers() -> None:
    totals = IngressTotals()
    for name, times in (("i0", 3), ("i1", 4)):
        http, requests = IngressMetrics(name), RequestMetrics(name, 10, 10, ())
        for _ in range(times):
            http.answered("/v1/completions", 503, "POST")
            requests.observe(finished("pirate"))
        totals.add(name, IngressCounts(1, http.text(0) + requests.text(0.0), False), 0.0)
    text = totals.text(0.0)
    assert b"ingress=" not in text
    labels = {"handler": "/v1/completions", "method": "POST", "status": "5xx"}
    assert value(text, "http_requests_total", **labels) == 7
    assert value(text, "loraplex_http_answers_total", status="503") == 7
    assert value(text, "loraplex_adapter_requests_total", adapter="pirate") == 7


def test_a_method_that_a_client_made_up_is_no_label() -> None:
    metrics = IngressMetrics("i0")
    metrics.answered("unknown", 405, "BREW")
    text = metrics.text(0)
    assert b"BREW" not in text
    assert value(text, "http_requests_total", method="other", status="4xx") == 1


# Engines


def engine(limits: EngineLimits | None = None) -> EngineMetrics:
    return EngineMetrics("base", "e0", 16, limits or EngineLimits(4096, 0, 0))


def run(metrics: EngineMetrics, tokens: int, error: str | None = None, cached: int = 0) -> None:
    request = Request("r", tuple(range(7)), SamplingParams(max_tokens=8), arrival_s=100.0)
    metrics.begin(request, None, now_s=100.0)
    load = EngineLoad()
    for offset in range(tokens):
        reason = None if offset < tokens - 1 else "error" if error else "stop"
        output = Output(
            *("r", 0, offset, (5,)), finish_reason=reason, error=error, num_cached_tokens=cached
        )
        preempted = ("r", "gone") if offset == 1 else ()
        metrics.observe_step(StepOutput((output,), load, (), (), preempted), 101.0 + offset)


def test_the_newer_names_of_vllm_have_their_numbers() -> None:
    metrics = engine()
    run(metrics, tokens=4, cached=3)
    text = metrics.text()
    mean = "vllm:request_time_per_output_token_seconds"
    assert value(text, f"{mean}_sum") == 1.0  # 3 s between 4 tokens
    assert value(text, "vllm:prompt_tokens_by_source_total", source="local_compute") == 4
    assert value(text, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 3
    assert value(text, "vllm:request_prefill_kv_computed_tokens_sum") == 4
    assert value(text, "vllm:request_num_preemptions_sum") == 1
    assert value(text, "vllm:engine_sleep_state", sleep_state="awake") == 1
    assert value(text, "vllm:iteration_tokens_total_sum") == 7 + 4
    assert value(text, "vllm:corrupted_requests_total") == 0
    run(metrics, tokens=2, error=NOT_FINITE)
    assert value(metrics.text(), "vllm:corrupted_requests_total") == 1


def test_buckets_of_tokens_end_at_the_longest_request_as_vllms_do() -> None:
    text = engine().text()
    bounds = [
        dict(pairs)["le"]
        for name, pairs in samples(text)
        if name == "vllm:request_prompt_tokens_bucket"
    ]
    assert bounds[-2:] == ["2000.0", "+Inf"]


def test_gaps_have_vllms_buckets_and_finer_ones_of_our_own() -> None:
    fine = Histogram(GAP_SECONDS)
    for seconds in (0.002, 0.01, 0.012, 0.03, 90.0):
        fine.observe(seconds)
    buckets = HISTOGRAMS["vllm:inter_token_latency_seconds"]
    direct = Histogram(buckets)
    for seconds in (0.002, 0.01, 0.012, 0.03, 90.0):
        direct.observe(seconds)
    assert fine.coarser(buckets) == direct
    assert set(buckets) <= set(GAP_SECONDS)


def test_the_room_for_adapters_follows_the_sizes_of_those_there() -> None:
    metrics = engine(EngineLimits(4096, 0, 0, adapter_pool_bytes=1000, adapter_page_bytes=100))
    assert value(metrics.text(), "vllm:max_gpu_lora_adapters") == 10
    load = EngineLoad(adapters_on_device=("d1", "d2"), adapter_device_bytes=500)
    metrics.observe_step(StepOutput((), load), 1.0)
    assert value(metrics.text(), "vllm:num_gpu_loaded_lora_adapters") == 2
    assert value(metrics.text(), "vllm:max_gpu_lora_adapters") == 4


def test_adapters_in_memory_are_listed_by_their_registered_names() -> None:
    def resident(digest: str, *, on_device: bool, is_pinned: bool = False) -> Resident:
        return Resident(digest, on_device, 1, 1, 0, is_pinned, False, 0.0)

    versions = {
        digest: AdapterVersion(name, 1, digest, "base", "b", rank, (), "")
        for digest, name, rank in (("d1", "pirate", 8), ("d2", "poet", 16))
    }
    residents = [
        resident("d2", on_device=False),
        resident("d1", on_device=True, is_pinned=True),
        resident("unknown", on_device=True),
    ]
    found = samples(residents_text(residents, versions, {"engine": "e0"}))
    name = "vllm:lora_adapter_loaded"
    pirate = {"adapter_name": "pirate", "level": "gpu", "pinned": "true", "rank": "8"}
    poet = {"adapter_name": "poet", "level": "cpu", "pinned": "false", "rank": "16"}
    own = {"engine": "e0"}
    assert found == {(name, frozenset((one | own).items())): 1.0 for one in (pirate, poet)}


# Engines that sleep


def test_an_engine_that_sleeps_keeps_its_counters_and_loses_its_gauges() -> None:
    metrics, counters = engine(), EngineCounters()
    run(metrics, tokens=4)
    awake = metrics.text()
    counters.add({"digest": [awake]})
    assert counters.text(asleep=(), served=("digest",)) == b""
    counters.add({"digest": []})  # a scrape at which the engine was gone already
    asleep = counters.text(asleep=("digest",), served=("digest",))
    before = samples(awake)
    grown = {key for key in before if key[0].endswith(("_total", "_sum", "_count", "_bucket"))}
    state = {key for key in before if key[0] == "vllm:engine_sleep_state"}
    found = samples(asleep)
    assert found.keys() == grown | state
    assert all(found[key] == before[key] for key in grown)
    assert value(asleep, "vllm:engine_sleep_state", sleep_state="discard_all") == 1
    assert value(asleep, "vllm:engine_sleep_state", sleep_state="awake") == 0


def test_the_counters_of_a_base_that_is_not_served_are_forgotten() -> None:
    counters = EngineCounters()
    counters.add({"digest": [engine().text()]})
    assert counters.text(asleep=("digest",), served=()) == b""
    assert counters.text(asleep=("digest",), served=("digest",)) == b""
