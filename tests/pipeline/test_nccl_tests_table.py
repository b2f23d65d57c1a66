"""pipeline/nccl_tests_table.py: what a table says by itself."""

from __future__ import annotations

import pytest

from seatrial.discover.nccl_tests_output import Row, Table, Timing
from seatrial.pipeline.nccl_tests_table import Series, nominal_size_label, rank_range, split_series


def row(
    size: int = 2**30,
    *,
    ranks: int = 1,
    redop: str = "none",
    root: int | None = -1,
    wrong: tuple[float | None, float | None] = (0.0, 0.0),
    busbw: float = 100.0,
) -> Row:
    """A row whose count is the part of one of ``ranks`` ranks."""
    out_of_place, in_place = (Timing(1.0, 100.0, busbw, count) for count in wrong)
    return Row(size, size // 4 // ranks, "float", redop, root, out_of_place, in_place)


@pytest.mark.parametrize(
    ("entry", "operations"),
    [
        (row(redop="sum", busbw=187.5), ["all_reduce"]),
        (row(redop="sum"), ["all_reduce"]),  # of two ranks
        (row(redop="sum", wrong=(0.0, None)), ["send_receive"]),
        (row(redop="sum", wrong=(None, None)), ["all_reduce", "send_receive"]),
        (row(redop="sum", ranks=8), ["reduce_scatter"]),
        (row(redop="max", root=0), ["reduce"]),
        (row(root=0), ["broadcast"]),
        (row(root=0, ranks=8), []),  # gather or scatter
        (row(ranks=8), ["all_gather"]),
        (row(ranks=8, wrong=(0.0, None)), ["all_to_all"]),
        (row(ranks=8, wrong=(None, None)), ["all_gather", "all_to_all"]),
        (row(redop="", root=None), ["send_receive"]),
    ],
)
def test_operations_that_the_columns_allow(entry: Row, operations: list[str]) -> None:
    assert list(Series(Table(), [entry]).possible_operations) == operations


def test_repeated_sweep_has_the_median() -> None:
    """Option -N."""
    rows = [row(busbw=value) for value in (90.0, 100.0, 80.0)]
    (size,) = Series(Table(), rows).sizes
    assert (size.label, size.out_of_place, size.in_place, size.wrong) == ("1GiB", 90, 90, 0)


def test_series_of_data_types_and_reductions() -> None:
    rows = [row(redop="sum"), row(redop="max"), row(0), row(2**31, redop="sum")]
    assert [len(series.rows) for series in split_series(Table(rows=rows))] == [2, 1]


def test_wrong_elements() -> None:
    assert Series(Table(), [row(wrong=(None, None))]).wrong_elements is None
    assert Series(Table(), [row(wrong=(0.0, 5.0))]).wrong_elements == 5
    deviation = Table(wrong_is_a_count=False)  # column error of old versions
    assert Series(deviation, [row(wrong=(1e-6, 1e-6))]).wrong_elements == 0
    deviation.out_of_bounds = 3
    assert Series(deviation, [row(wrong=(1e-6, 1e-6))]).wrong_elements == 3


@pytest.mark.parametrize(
    ("size", "label"),
    [
        (2**30, "1GiB"),
        (1073741568, "1GiB"),
        (1000, "1000B"),
        (3 * 2**29, "1536MiB"),
        (2**30 + 10 * 2**20 + 2**19, "1084751872B"),
    ],
)
def test_size_labels(size: int, label: str) -> None:
    assert nominal_size_label(size) == label


@pytest.mark.parametrize(("ranks", "expected"), [(1, (1, 1)), (2, (2, 2)), (16, (16, 16)), (24, (24, 24))])
def test_ranks_of_an_all_reduce(ranks: int, expected: tuple[int, int]) -> None:
    """busbw ÷ algbw = 2(n−1)/n, within rounding to two decimals."""
    timing = Timing(20000.0, 200.0, round(200 * 2 * (ranks - 1) / ranks, 2), 0.0)
    assert rank_range([Row(2**32, 2**30, "float", "sum", -1, timing, timing)], "all_reduce") == expected


def test_ranks_of_a_large_all_reduce_are_a_range() -> None:
    timing = Timing(84625.0, 203.01, 405.74, 0.0)  # 1,440 ranks
    ranks = rank_range([Row(2**34, 2**32, "float", "sum", -1, timing, timing)], "all_reduce")
    assert ranks
    assert ranks[0] < 1440 < ranks[1]


def test_ranks_from_the_count_of_one_rank() -> None:
    timing = Timing(2767.0, 388.05, 363.80, 0.0)
    row = Row(2**30, 2**24, "float", "none", -1, timing, timing)
    assert rank_range([row], "all_gather") == (16, 16)
    assert rank_range([row], "broadcast") is None
