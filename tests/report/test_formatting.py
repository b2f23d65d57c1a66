"""Text of values, subjects and metric names."""

from __future__ import annotations

import pytest

from seatrial.report.formatting import format_range, natural_key, print_value, size_in_name


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [(3, "count", "3"), (24.77, "us", "24.77 µs"), (2**30, "B", "1 GiB"), (float(2**63 - 1), "files", "unlimited")],
)
def test_print_value(value: float, unit: str, expected: str) -> None:
    assert print_value(value, unit) == expected


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
    [
        ([787, 810], "TFLOP/s", "787–810 TFLOP/s"),
        ([2, 2], "s", "2 s"),
        ([2**20, 2**30], "B", "1 MiB–1 GiB"),
        ([2**20, 3 * 2**20], "B", "1–3 MiB"),
        ([1, 8], "GPUs", "1–8 GPUs"),
        ([1, float(2**63)], "files", "1–unlimited"),
        ([0, 1], "bool", "no–yes"),
    ],
)
def test_format_range(values: list[float], unit: str, expected: str) -> None:
    assert format_range(values, unit) == expected


def test_natural_key_accepts_any_number_of_digits() -> None:
    assert sorted(["node10", "node2", "node1/gpu3", "node" + "9" * 5000], key=natural_key)[:3] == [
        "node1/gpu3",
        "node2",
        "node10",
    ]


@pytest.mark.parametrize(
    ("name", "expected"), [("busbw.1GiB", 2**30), ("p99.64KiB", 65536), ("tflops.bf16", 0), ("wrong", 0)]
)
def test_bytes_of(name: str, expected: int) -> None:
    assert size_in_name(name) == expected
