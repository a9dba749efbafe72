"""The tests that an engine with weights, keys or adapters in fewer bits passes on a GPU, like every
other.

A file of tests has a class of its own, and a fixture `base` of its module.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from engine.runner import ModelRunner
from tests.engine_agreement import make_adapters, make_engine, neighbours, run_all
from tests.layer_chains import (
    assert_answers_are_those_of,
    assert_any_company_gives_the_answer,
    assert_graphs_have_the_bits_of_kernels,
    assert_rows_of_the_base_keep_their_bits,
    open_quantized,
)


class NarrowEngine:
    tolerance: ClassVar[float]  # of log-probabilities
    settings: ClassVar[dict[str, object]]
    # Of the engine on a CPU, in float32, whose answers are right; None: the same.
    settings_on_cpu: ClassVar[dict[str, object] | None] = None

    @pytest.fixture(scope="class")
    @classmethod
    def adapters(cls, base: Path) -> dict[str, Path]:
        return make_adapters(base)

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, base: Path, adapters: dict[str, Path]) -> ModelRunner:
        return open_quantized(
            base, adapters, "cuda", backend="triton", dtype="bfloat16", **cls.settings
        )

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def num_late(cls, runner: ModelRunner) -> int:
        """The late compilations before the first test: the process counts those of all engines."""
        return runner.num_late_compilations

    def test_answers_are_those_of_the_cpu(
        self, base: Path, adapters: dict[str, Path], runner: ModelRunner
    ) -> None:
        def on_cpu() -> ModelRunner:
            settings = self.settings_on_cpu or self.settings
            return open_quantized(base, adapters, "cpu", dtype="float32", **settings)

        assert_answers_are_those_of(on_cpu, runner, self.tolerance)

    def test_a_request_gets_its_answer_in_any_company(self, runner: ModelRunner) -> None:
        assert_any_company_gives_the_answer(runner, self.tolerance)

    def test_graphs_have_the_bits_of_kernels_one_by_one(self, runner: ModelRunner) -> None:
        assert_graphs_have_the_bits_of_kernels(runner)

    def test_rows_of_the_base_keep_their_bits_beside_adapters(self, runner: ModelRunner) -> None:
        assert_rows_of_the_base_keep_their_bits(runner)

    def test_traffic_compiles_nothing(self, runner: ModelRunner, num_late: int) -> None:
        run_all(make_engine(runner), neighbours(40, 9))
        assert runner.num_late_compilations == num_late
