"""Scenarios that compare: policies at a load, ingresses that see late, tenants at overload, and how
fast an adapter spreads that becomes hot.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from serve_app.routing.expected_ttft import ExpectedTtft
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.simulator.cluster import Cluster
from tests.benchmarks.simulator.pictures import Curve, Panel, bars, panels
from tests.benchmarks.simulator.records import (
    Column,
    jain,
    over_time,
    quantiles_ms,
    summary,
)
from tests.benchmarks.simulator.setting import FAIR, POLICIES, Setting, capacity, cluster
from tests.benchmarks.simulator.traffic import Change, Traffic, TrafficArgs, name_of

NUM_REPLICAS = 16


def _skewed(setting: Setting, requests: int, num_adapters: int) -> TrafficArgs:
    """Adapters by a power law, their system prompts shared, sessions of three turns, bursts."""
    return TrafficArgs(
        setting.count(requests),
        1.0,
        seed=setting.seed,
        burstiness=2.0,
        num_adapters=num_adapters,
        popularity=1.0,
    )


def policies(setting: Setting, report: Report, picture: Path | None) -> None:
    """Five policies at the same traffic: 16 replicas, 400 adapters, shares of what 16 can do."""
    traffic = _skewed(setting, 40000, 400)
    full = capacity(setting, traffic, NUM_REPLICAS)
    report.emit(part="capacity", requests_per_s_of_a_replica=round(full, 2))
    rows, found = [], {}
    for load in (0.3, 0.5, 0.7, 0.85):
        args = replace(traffic, rate=load * full * NUM_REPLICAS)
        for policy in POLICIES:
            service = cluster(setting, policy, NUM_REPLICAS)
            service.run(Traffic(args).calls())
            result = summary(service.records)
            report.emit(part="policy", policy=policy, load=load, **result)
            ttft = quantiles_ms(_ttft(service))
            found[policy, load] = ttft
            rows.append((load, policy, ttft["p50"], ttft["p95"], ttft["p99"]))
    print_table(("load", "policy", "TTFT p50 ms", "p95", "p99"), rows)
    at_70 = {policy: found[policy, 0.7]["p95"] for policy in POLICIES}
    best = min(at_70, key=lambda policy: at_70[policy])
    report.emit(part="verdict", best_p95_at_70=best, passed=best == "expected_ttft", p95_ms=at_70)
    if picture is not None:
        groups = {p: [found[p, load]["p95"] for load in (0.3, 0.5, 0.7, 0.85)] for p in POLICIES}
        title = f"p95 TTFT, {NUM_REPLICAS} replicas, 400 adapters, {setting.calibration.name}"
        bars(picture, title, ["30 %", "50 %", "70 %", "85 % load"], groups, "ms")


def herd(setting: Setting, report: Report, picture: Path | None) -> None:
    """The same bursts over 1, 4 and 16 ingresses: does any of them send where all send?"""
    traffic = replace(_skewed(setting, 40000, 400), burstiness=5.0)
    full = capacity(setting, traffic, NUM_REPLICAS)
    args = replace(traffic, rate=0.6 * full * NUM_REPLICAS)
    rows = []
    for policy in ("expected_ttft", "power_of_two"):
        for num_ingresses in (1, 4, 16):
            for stream_s in (0.0005, 0.02):
                late = replace(setting, calibration=replace(setting.calibration, stream_s=stream_s))
                service = cluster(late, policy, NUM_REPLICAS, num_ingresses)
                service.run(Traffic(args).calls())
                result = summary(service.records)
                unevenness = _unevenness(service)
                report.emit(
                    part="herd",
                    policy=policy,
                    ingresses=num_ingresses,
                    view_delay_ms=1000 * stream_s,
                    unevenness=unevenness,
                    **result,
                )
                ttft = quantiles_ms(_ttft(service))
                rows.append(
                    (policy, num_ingresses, 1000 * stream_s, ttft["p50"], ttft["p95"], unevenness)
                )
    print_table(("policy", "ingresses", "delay ms", "p50 ms", "p95", "uneven"), rows)


def fairness(setting: Setting, report: Report, picture: Path | None) -> None:
    """Eight tenants of equal weight, the greediest asks eight times as much as the most modest, and
    even that one more than an eighth of what the engines can do: served tokens, Jain's index, and
    the longest wait of adapters that hardly anybody uses."""
    num_replicas = 4
    traffic = replace(
        _skewed(setting, 60000, 100), tenants=tuple(float(i + 1) for i in range(8)), turns=1.0
    )
    full = capacity(setting, replace(traffic, tenants=(1.0,)), num_replicas)
    args = replace(traffic, rate=5.0 * full * num_replicas)
    for gate in (None, FAIR):
        service = cluster(setting, "expected_ttft", num_replicas, gate=gate)
        service.run(Traffic(args).calls())
        records = service.records
        # Where all compete: after the queues have filled, before the arrivals end.
        ended_s = records.column("arrived_s") + records.column("duration_s")
        last_s = float(records.column("arrived_s").max())
        inside = (ended_s > 0.3 * last_s) & (ended_s < last_s)
        tokens = (records.column("prompt") + 2 * records.column("output"))[inside]
        tenants = records.tenants()[inside]
        codes = [records.code_of(f"tenant-{i}") for i in range(8)]
        shares = [float(tokens[tenants == code].sum()) for code in codes]
        held = records.column("held_s")
        adapters = records.adapters()
        numbers, counts = np.unique(adapters, return_counts=True)
        cold = np.isin(adapters, numbers[counts <= np.quantile(counts, 0.25)])
        report.emit(
            part="fairness",
            queue="fair" if gate else "none",
            jain=round(jain(shares), 4),
            shares=[round(share / sum(shares), 4) for share in shares],
            served=len(records),
            refused=service.num_refused,
            longest_wait_s=round(float(held.max()), 3),
            longest_wait_of_cold_adapters_s=round(float(held[cold].max()), 3),
            ttft_of_cold_adapters_ms=quantiles_ms(records.column("ttft_s")[cold]),
        )


def spread(setting: Setting, report: Report, picture: Path | None) -> None:
    """One of 50 adapters is suddenly asked for 5 times as often, on 64 replicas: when is it in
    memory of as many as its work needs, and what do its requests notice?"""
    change_s, end_s, num_replicas = 30.0, 70.0, 64
    traffic = replace(_skewed(setting, 30000, 50), popularity=0.8, burstiness=1.0, turns=1.0)
    rate = 0.6 * capacity(setting, traffic, NUM_REPLICAS) * num_replicas
    hot = Traffic(traffic).place(10)
    args = replace(
        traffic,
        rate=rate,
        num_requests=setting.count(int(rate * end_s)),
        changes=(Change(change_s, hot, 5.0),),
    )
    service = cluster(setting, "expected_ttft", num_replicas)
    holders = _watch(service, name_of(hot), 0.25, end_s)
    service.run(Traffic(args).calls())
    policy = service.ingresses[0].policy
    assert isinstance(policy, ExpectedTtft)
    needed = policy.placement.num_homes(name_of(hot), service.loop.now_s)
    records = service.records
    at_s, ttft_s = records.column("arrived_s"), records.column("ttft_s")
    is_hot = records.adapters() == records.code_of(name_of(hot))
    phases = {
        "before": is_hot & (at_s < change_s),
        "first 10 s": is_hot & (at_s >= change_s) & (at_s < change_s + 10),
        "later": is_hot & (at_s >= change_s + 10),
    }
    later = [at for at, count in holders if at >= change_s and count >= needed]
    seconds = later[0] - change_s if later else None
    report.emit(
        part="spread",
        share_before=round(float(is_hot[at_s < change_s].mean()), 4),
        share_after=round(float(is_hot[at_s >= change_s].mean()), 4),
        homes_needed=needed,
        holders_at_the_change=[count for at, count in holders if at < change_s][-1],
        seconds_until_as_many_hold_it=seconds,
        replicas_used={p: _num_used(records.column("replica")[w]) for p, w in phases.items()},
        ttft_ms={p: quantiles_ms(ttft_s[which]) for p, which in phases.items()},
        passed=seconds is not None and seconds <= 10,
    )
    if picture is not None:
        slow, usual = (
            Curve(*over_time(at_s[is_hot], 1000 * ttft_s[is_hot], 2.0, q), f"p{100 * q:.0f}")
            for q in (0.95, 0.5)
        )
        held = Curve([at for at, _ in holders], [float(count) for _, count in holders])
        panels(
            picture,
            f"An adapter becomes five times as hot at {change_s:.0f} s",
            [Panel("replicas that hold it", [held]), Panel("its TTFT, ms", [slow, usual])],
        )


def _num_used(replicas: Column) -> int:
    """Counts the replicas that took more than a hundredth of the requests."""
    counts = np.unique(replicas, return_counts=True)[1]
    return int((counts > 0.01 * counts.sum()).sum())


def _watch(
    service: Cluster, adapter: str, every_s: float, until_s: float
) -> list[tuple[float, int]]:
    """(seconds, replicas whose memory holds it), written as the run goes."""
    seen: list[tuple[float, int]] = []

    def look(_: object) -> None:
        now_s = service.loop.now_s
        tiers = [engine.tiers.tier_of(adapter) for engine in service.engines.values()]
        seen.append((now_s, sum(tier in ("device", "host") for tier in tiers)))
        if now_s < until_s:
            service.loop.at(now_s + every_s, look)

    service.loop.at(0.0, look)
    return seen


def _ttft(service: Cluster) -> np.ndarray:
    records = service.records
    arrived_s = records.column("arrived_s")
    return np.asarray(records.column("ttft_s")[arrived_s >= np.quantile(arrived_s, 0.1)])


def _unevenness(service: Cluster) -> float:
    """Returns the standard deviation over the mean of the replicas' requests in each second."""
    records = service.records
    seconds = records.column("arrived_s").astype(int)
    replicas = records.column("replica").astype(int)
    table = np.zeros((seconds.max() + 1, len(service.names)))
    np.add.at(table, (seconds, replicas), 1)
    counts = table[table.sum(axis=1) > len(service.names)]
    return round(float((counts.std(axis=1) / counts.mean(axis=1)).mean()), 3)
