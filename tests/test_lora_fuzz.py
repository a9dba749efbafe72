"""A share of `tests.benchmarks.fuzz_adapters`: each kind of mutation, and loads beside a stream."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from lora.errors import AdapterError
from tests.benchmarks.fuzz_adapters import (
    MAX_GROWN_BYTES,
    MUTATIONS,
    Bench,
    fault_of_reason,
    make_cases,
    make_templates,
)
from tests.benchmarks.fuzz_judge import Finding, Oracle, difference, factors, find, read
from tests.engine_helpers import make_base

Folders = tuple[Path, list[Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("fuzz")
    base = make_base(root / "base", tie_word_embeddings=False)
    return base, make_templates(root, base)


@pytest.fixture
def oracle(folders: Folders) -> Oracle:
    return Oracle(folders[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(2))
def test_spoilt_folders_are_refused_with_a_reason_or_read_as_peft_does(
    seed: int, folders: Folders, oracle: Oracle, tmp_path: Path
) -> None:
    base, templates = folders
    for case in make_cases(tmp_path, templates, 2 * len(MUTATIONS), 1000 + seed):
        where = f"case {case.number} of seed {1000 + seed}: {case.mutation}"
        finding = find(case.folder, base)
        assert finding.kind in ("accepted", "refused"), f"{where}: {finding.reason}"
        assert finding.grown_bytes < MAX_GROWN_BYTES, where
        if finding.kind == "refused":
            assert case.expected.verdict not in ("accepted", "unchanged"), where
            assert fault_of_reason(finding.reason, case.folder, case.expected.words) is None, where
            continue
        assert case.expected.verdict != "refused", where
        is_unchanged = case.expected.verdict.startswith("unchanged")
        wanted = factors(oracle.load(case.template if is_unchanged else case.folder))
        assert difference(read(case.folder, base), wanted) is None, where


@dataclass
class InThisProcess:
    base: Path

    def judge(self, folder: Path) -> Finding:
        return find(folder, self.base)

    def close(self) -> None:
        pass


@pytest.fixture
def bench(folders: Folders) -> Bench:
    return Bench(*folders, InThisProcess(folders[0]))


@pytest.mark.filterwarnings("ignore")
async def test_a_stream_goes_on_while_bad_adapters_are_loaded(
    bench: Bench, folders: Folders, tmp_path: Path
) -> None:
    """An AdapterError arrives at the caller, and the next load under the same digest works."""
    await bench.guard.start()
    try:
        for case in make_cases(tmp_path, folders[1], len(MUTATIONS), 5):
            column, why = await bench.judge(case)
            assert column in ("refused", "accepted", "slow"), f"{case.mutation}: {column}, {why}"
        with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
            await bench.guard.engine.load_adapter("x", "x", "no\0path")
        assert bench.guard.is_serving
        assert bench.num_reloads > len(MUTATIONS) // 2
        assert bench.guard.num_answers > 0
        assert bench.guard.num_changed == 0
    finally:
        await bench.guard.stop()
