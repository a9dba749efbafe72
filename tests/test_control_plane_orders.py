"""The control plane under random orders of what people, the registry and the world do to it: no
promise of `tests/control_plane/promises.py` is broken.

`python -m tests.benchmarks.control_plane` runs thousands of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.control_plane.draws import draw
from tests.control_plane.orders import run, shorten, shown
from tests.control_plane.store import Database, quick_sqlite

NUM_ORDERS = 8


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with quick_sqlite():
        yield Database(tmp_path_factory.mktemp("store"))


def test_random_orders_break_no_promise_of_the_control_plane(database: Database) -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_ORDERS):
        outcome = run(database, seed, draw(seed))
        counts += outcome.counts
        if outcome.broken is not None:
            pytest.fail(shown(shorten(database, outcome)))
    # Else it would show nothing.
    assert {what for what in ("roll-backs", "deleted engines") if not counts[what]} == set()
