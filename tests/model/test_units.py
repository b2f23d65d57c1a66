from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.model.units import format_bytes, format_value, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 * 2**30), ("1 MiB", 2**20), ("512", 512), (1024, 1024), ("1.5KiB", 1536), ("10MiB", 10485760)],
)
def test_parse_bytes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["8GB", "", "-1", "1.0001B", "many", "1 mib"])
def test_invalid_or_ambiguous_size_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**50), st.sampled_from(["B", "KiB", "MiB", "GiB"]))
def test_format_bytes_round_trip(count: int, unit: str) -> None:
    size = parse_bytes(f"{count % 1024}{unit}")
    assert parse_bytes(format_bytes(size)) == size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1023.99 * 2**20, "1.0 GiB"),
        (1023.94 * 2**20, "1023.9 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (1023.99 * 2**40, "1024.0 TiB"),
        (1023, "1023 B"),
        (-5 * 2**30, "-5 GiB"),
        (-(2**20) + 1, "-1.0 MiB"),
        (-1, "-1 B"),
        (0, "0 B"),
        (float("inf"), "inf TiB"),
    ],
)
def test_sizes_at_borders_of_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_format_value() -> None:
    assert format_value(2**30, "B") == "1 GiB"
    assert format_value(1, "bool") == "yes"
    assert [format_value(1, unit) for unit in ("GPUs", "processes", "ms")] == ["1 GPU", "1 process", "1 ms"]
    assert format_value(356.4821, "GB/s") == "356.5 GB/s"
    assert format_value(1_234_567.8, "tokens/s") == "1,234,568 tokens/s"
    # measured and expected values are spelled alike, and no value as 1e+04
    assert [format_value(value, "GB/s") for value in (999.96, 4267.3, 4272, 9999.7)] == [
        *("1,000 GB/s", "4,267 GB/s", "4,272 GB/s", "10,000 GB/s")
    ]
