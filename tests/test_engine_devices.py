"""The connections of GPUs, as `loraplex doctor` shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.devices import DeviceLink, nvidia_smi, parse_numbers, parse_topology
from serve_app.cli.commands.doctor import _links

# Of a host with two pairs of GPUs, as nvidia-smi prints it: tabs, and a header that is underlined.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tSYS\tPXB\t0-15\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tSYS\tPXB\t0-15\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV1\tSYS\t16-31\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNV1\t X \tSYS\t16-31\t1\t\tN/A\n"
    "NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)


def test_the_matrix_of_connections_is_read() -> None:
    kinds = parse_topology(TOPOLOGY)
    assert (kinds[0, 1], kinds[2, 3], kinds[0, 2], kinds[3, 1]) == ("NV18", "NV1", "SYS", "SYS")
    assert all(max(pair) < 4 for pair in kinds)
    assert parse_topology("") == {}


def test_devices_are_found_by_their_identity() -> None:
    assert parse_numbers("0, GPU-aa\n1, GPU-bb\n") == {"GPU-aa": 0, "GPU-bb": 1}
    assert parse_numbers("No devices were found\n") == {}
    assert parse_numbers("\N{SUPERSCRIPT TWO}, GPU-cc\n") == {}


@pytest.mark.parametrize(
    ("script", "output"),
    [
        (None, ""),
        ("#!/bin/sh\nprintf '0, GPU-\\377\\n'\n", "0, GPU-\N{REPLACEMENT CHARACTER}\n"),
        ("#!/bin/sh\necho Failed to initialize NVML\nexit 9\n", ""),
        ("#!/no/such/shell\n", ""),
    ],
    ids=["missing", "no UTF-8", "failed", "broken"],
)
def test_whatever_the_tool_prints_is_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, output: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert nvidia_smi("topo", "-m") == output


def test_pairs_of_one_kind_are_one_finding() -> None:
    links = [
        DeviceLink(0, 1, "NV18", True),
        DeviceLink(0, 2, "SYS", False),
        DeviceLink(1, 2, "SYS", False),
        DeviceLink(1, 3, None, True),
    ]
    first, second, third = _links(links)
    assert (first.state, first.words) == (
        "ok",
        "GPUs 0-1: 18 NVLinks, they read each other's memory",
    )
    assert second.state == "warn"
    assert second.words == "GPUs 0-2, 1-2: PCIe across NUMA nodes, they are no peers"
    assert "NCCL" in second.remedy
    assert third.words.startswith("GPUs 1-3: nvidia-smi does not say")
