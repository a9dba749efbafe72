"""The notebooks run top to bottom, as a reader would run them: every cell, no error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.demo_server import ROOT, environment

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


Runs = dict[Path, "Future[nbformat.NotebookNode]"]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, demo_home: Path) -> Iterator[Runs]:
    """Runs the selected notebooks side by side: one of them waits for its server part of the
    time."""
    items = [i for i in request.session.items if isinstance(i, pytest.Function)]
    own = [i for i in items if i.module is request.module and hasattr(i, "callspec")]
    paths = [item.callspec.params["path"] for item in own]
    pool = ThreadPoolExecutor(len(paths))
    try:
        yield {path: pool.submit(run, path, environment(demo_home)) for path in paths}
    finally:
        pool.shutdown(cancel_futures=True)


def run(path: Path, variables: dict[str, str]) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    asyncio.run(client.async_execute(env=variables))
    return notebook


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the Jupyter libraries
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_top_to_bottom(path: Path, runs: Runs) -> None:
    notebook = runs[path].result()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
