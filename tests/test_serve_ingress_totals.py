"""The counts of several ingresses become a sum that never falls, whichever of them ends."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from serve_app.control.kept_counts import MAX_AGE_S, MAX_GONE, IngressTotals
from serve_app.messages import IngressCounts
from serve_app.metrics.histograms import Histogram
from serve_app.metrics.ingress import IngressMetrics, QueueStats

ANSWERS = "loraplex_http_answers_total"
OPEN = "loraplex_open_engine_requests"


class Ingress:
    def __init__(self, name: str) -> None:
        self.name = name
        self.metrics = IngressMetrics(name)
        self.stats = QueueStats(name, ())
        self.num_open = 0
        self._serial = 0

    def answer(self, times: int, route: str = "/v1/models") -> None:
        for _ in range(times):
            self.metrics.answered(route, 200)

    def counts(self, *, was_taken: bool = False) -> IngressCounts:
        self._serial += 1
        text = self.metrics.text(self.num_open) + self.stats.text()
        return IngressCounts(self._serial, text, was_taken)

    def report(self, totals: IngressTotals, now_s: float = 0.0, *, was_taken: bool = False) -> None:
        totals.add(self.name, self.counts(was_taken=was_taken), now_s)


def samples(totals: IngressTotals, now_s: float = 0.0) -> dict[tuple[str, str], float]:
    """The samples by name and the values of the labels."""
    text = totals.text(now_s).decode()
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def answers(totals: IngressTotals, now_s: float = 0.0) -> float:
    return samples(totals, now_s)[ANSWERS, "/v1/models,200"]


def test_counters_histograms_and_gauges_of_two_ingresses_are_summed() -> None:
    totals, one, other = IngressTotals(), Ingress("i1"), Ingress("i2")
    for ingress, times in ((one, 3), (other, 4)):
        ingress.answer(times)
        ingress.num_open = times
        for _ in range(times):
            ingress.stats.of_base("base").waits.observe(0.3)
        ingress.report(totals)
    found = samples(totals)
    assert found[ANSWERS, "/v1/models,200"] == 7
    assert found[OPEN, ""] == 7
    assert found["loraplex_queue_wait_seconds_count", "base"] == 7
    assert found["loraplex_queue_wait_seconds_bucket", "0.5,base"] == 7
    assert found["loraplex_queue_wait_seconds_bucket", "0.25,base"] == 0
    assert abs(found["loraplex_queue_wait_seconds_sum", "base"] - 2.1) < 1e-9
    text = totals.text(0.0).decode()
    assert "ingress=" not in text
    helps = [line for line in text.splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))


def test_what_an_ingress_counted_outlives_it_and_what_it_held_does_not() -> None:
    totals, one, other = IngressTotals(), Ingress("i1"), Ingress("i2")
    for ingress in (one, other):
        ingress.answer(5)
        ingress.num_open = 2
        ingress.report(totals)
    later_s = MAX_AGE_S + 1
    other.answer(1)
    other.report(totals, later_s)
    found = samples(totals, later_s)
    assert found[ANSWERS, "/v1/models,200"] == 11
    assert found[OPEN, ""] == 2


def test_many_ingresses_that_came_and_went_are_remembered_as_one_sum() -> None:
    totals = IngressTotals()
    for number in range(5 * MAX_GONE):
        ingress = Ingress(f"i{number}")
        ingress.answer(1)
        ingress.report(totals, number * (MAX_AGE_S + 1))
        assert answers(totals) == number + 1
    assert len(totals._ingresses) <= MAX_GONE + 1


def test_an_ingress_that_comes_back_is_not_counted_twice() -> None:
    totals, sleeper = IngressTotals(), Ingress("sleeper")
    sleeper.answer(5)
    sleeper.report(totals, 0.0)
    sleeper.answer(1)
    sleeper.report(totals, 100.0, was_taken=True)
    assert answers(totals) == 6
    for number in range(2 * MAX_GONE):  # until it is forgotten
        Ingress(f"i{number}").report(totals, 200.0 + number * (MAX_AGE_S + 1))
    sleeper.report(totals, 900.0, was_taken=True)
    assert answers(totals) == 6
    sleeper.answer(2)
    sleeper.report(totals, 901.0, was_taken=True)
    assert answers(totals) == 8


def test_a_report_that_is_overtaken_by_a_later_one_changes_nothing() -> None:
    totals, one = IngressTotals(), Ingress("i1")
    one.answer(1)
    early = one.counts()
    one.answer(1)
    one.report(totals)
    totals.add("i1", early, 1.0)
    assert answers(totals) == 2


def test_after_a_restart_of_the_manager_sums_begin_at_zero_for_all_ingresses_at_once() -> None:
    """A scrape with only one of two ingresses would look as if counters had fallen."""
    one, other = Ingress("i1"), Ingress("i2")
    one.answer(5)
    other.answer(7)
    restarted = IngressTotals()
    one.report(restarted, was_taken=True)
    assert answers(restarted) == 0
    other.report(restarted, was_taken=True)
    other.answer(1)
    other.report(restarted, was_taken=True)
    assert answers(restarted) == 1


def test_a_series_that_begins_anew_at_one_ingress_does_not_fall() -> None:
    totals, one = IngressTotals(), Ingress("i1")
    one.stats.of_base("base").sheds["full"] = 5
    one.report(totals)
    assert samples(totals)["loraplex_shed_total", "base,full"] == 5
    one.stats.of_base("base").sheds["full"] = 2
    one.report(totals)
    assert samples(totals)["loraplex_shed_total", "base,full"] == 7


def test_a_series_that_no_ingress_shows_any_more_ends_and_does_not_pile_up() -> None:
    totals, one, other = IngressTotals(), Ingress("i1"), Ingress("i2")
    for ingress in (one, other):
        ingress.stats.of_base("gone").waits = Histogram((1.0,))
        ingress.stats.of_base("gone").waits.observe(0.5)
        ingress.report(totals)
    count = ("loraplex_queue_wait_seconds_count", "gone")
    assert samples(totals)[count] == 2
    del one.stats._bases["gone"]
    one.report(totals)
    assert samples(totals)[count] == 2  # the other one follows in a moment
    del other.stats._bases["gone"]
    other.report(totals)
    assert count not in samples(totals)
    assert not [sample for _, sample in totals._sums if b"gone" in sample]


def test_what_every_ingress_tells_alike_is_not_summed() -> None:
    totals = IngressTotals()
    text = b'# HELP c_total C\n# TYPE c_total counter\nc_total{adapter="a"} 3.0\n'
    for name in ("i1", "i2"):
        totals.add(name, IngressCounts(1, text, was_taken=False), 0.0)
    assert samples(totals)["c_total", "a"] == 3
