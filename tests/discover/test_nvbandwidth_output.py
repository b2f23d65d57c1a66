"""discover/nvbandwidth_output.py: text of all versions, JSON, and text that is none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.discover.nvbandwidth_output import NvbandwidthOutput, is_report, parse, parse_json
from tests.paths import FIXTURES

FOLDER = FIXTURES / "nvbandwidth"
TITLE = "memcpy CE GPU(row) <-> GPU(column) {} bandwidth (GB/s)"
TOTAL = "device_to_device_bidirectional_memcpy_read_ce"


def read(name: str) -> NvbandwidthOutput:
    output = parse((FOLDER / name).read_text().splitlines())
    assert output.is_nvbandwidth
    return output


def test_matrix_of_peers() -> None:
    output = read("h100-peers-0.4.txt")
    (matrix,) = output.matrices
    assert (matrix.name, matrix.is_complete, len(matrix.rows)) == ("device_to_device_memcpy_read_ce", True, 8)
    assert matrix.rows[0][:3] == [None, 370.9, 370.9]
    assert matrix.rows[2][4] == 372.96
    assert output.devices == ("NVIDIA H100 80GB HBM3",) * 8
    assert output.version == "v0.4"


def test_matrices_without_summary() -> None:
    host, peers = read("a100-host-and-peers.txt").matrices
    assert (host.name, host.is_complete, host.rows[0][4]) == ("host_to_device_memcpy_ce", True, 26.19)
    assert (peers.name, peers.is_complete, peers.rows[0][:2]) == (
        "device_to_device_memcpy_write_ce",
        True,
        [0.0, 276.07],
    )


def test_data_error() -> None:
    output = read("wrong-data-0.7.txt")
    assert output.matrices == []
    assert "Invalid value when checking the pattern" in output.failures["device_to_device_memcpy_read_ce"]
    assert output.devices[4] == "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize("lines", range(21, 29))
def test_truncated_matrix(lines: int) -> None:
    text = (FOLDER / "h100-peers-0.4.txt").read_text().splitlines()[:lines]
    assert [matrix.is_complete for matrix in parse(text).matrices] == [False]


def test_prefix_of_a_launcher() -> None:
    text = (FOLDER / "a6000-peers-0.8.txt").read_text().splitlines()
    plain, prefixed = parse(text), parse(f"[1,0]<stdout>: {line}" for line in text)
    assert prefixed.matrices[0].rows == plain.matrices[0].rows
    assert len(plain.matrices[0].rows) == 6


def test_bidirectional_testcase_has_a_total() -> None:
    parts = {"Read1": "391.90", "Read2": "391.80", "Total": "783.70"}
    text = [f"Running {TOTAL}."]
    for part, value in parts.items():
        text += [
            TITLE.format(part),
            "           0         1",
            f" 0       N/A    {value}",
            f" 1    {value}       N/A",
            "",
        ]
        text += [f"SUM {TOTAL}_{part.lower()} 1.0", ""]
    (matrix,) = parse(text).matrices
    assert (matrix.name, matrix.rows) == (f"{TOTAL}_total", [[None, 783.7], [783.7, None]])


def report() -> dict[str, Any]:
    """As json_output.cpp writes it: numbers are text; the three matrices of a bidirectional testcase are one list."""
    rows = [["N/A", value, value, "N/A"] for value in ("391.9", "391.8", "783.7")]
    return {
        "nvbandwidth": {
            "CUDA Runtime Version": 12080,
            "Driver Version": "570.124.06",
            "GPU Device list": ["0: NVIDIA H200 (00000000:18:00): (node1)", "1: NVIDIA H200 (00000000:2a:00): (node1)"],
            "git_version": "v0.8",
            "testcases": [
                {
                    "bandwidth_description": "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)",
                    "bandwidth_matrix": [["55.3", "55.4"]],
                    "name": "host_to_device_memcpy_ce",
                    "status": "Passed",
                    "sum": 110.7,
                },
                {
                    "bandwidth_description": TITLE.format("Total"),
                    "bandwidth_matrix": [half for row in rows for half in (row[:2], row[2:])],
                    "name": TOTAL,
                    "status": "Passed",
                },
                {"name": "multinode_device_to_device_memcpy_read_ce", "status": "Waived"},
                {"name": "device_local_copy", "status": "Error", "error": "CUDA_ERROR_OUT_OF_MEMORY"},
            ],
            "version": "v0.8",
        }
    }


def test_json_report() -> None:
    assert is_report(report())
    output = parse_json(report())
    host, total = output.matrices
    assert (host.rows, host.is_complete) == ([[55.3, 55.4]], True)
    assert (total.name, total.rows) == (f"{TOTAL}_total", [[None, 783.7], [783.7, None]])
    assert output.devices == ("NVIDIA H200", "NVIDIA H200")
    assert list(output.hosts) == ["node1"]
    assert output.failures == {"device_local_copy": "CUDA_ERROR_OUT_OF_MEMORY"}


WORDS = st.sampled_from(
    [
        *(FOLDER / "h100-peers-0.4.txt").read_text().split(" ")[:120],
        "\n",
        TITLE,
        "SUM x_read1 1",
        "Device 1: a",
        "1",
        "nan",
    ]
)


@given(st.lists(WORDS, max_size=60).map(" ".join))
def test_fragments_of_the_format_in_any_order(text: str) -> None:
    for matrix in parse(text.splitlines()).matrices:
        assert all(value is None or value >= 0 for row in matrix.rows for value in row)


@settings(max_examples=20)
@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda child: st.lists(child, max_size=3)))
def test_json_report_with_values_of_other_types(value: Any) -> None:
    for key in report()["nvbandwidth"]:
        parse_json({"nvbandwidth": report()["nvbandwidth"] | {key: value}})
    for key in ("bandwidth_matrix", "name", "status", "bandwidth_description"):
        testcase = report()["nvbandwidth"]["testcases"][1] | {key: value}
        parse_json({"nvbandwidth": report()["nvbandwidth"] | {"testcases": [testcase]}})
