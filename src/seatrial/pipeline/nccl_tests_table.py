"""Facts of one table of nccl-tests: its operation, ranks, sizes, wrong elements, and whether it is complete."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from seatrial.discover.nccl_tests_output import REDUCTIONS, Row, Table, Timing
from seatrial.model import format_bytes, size_label
from seatrial.model.benchmark import MeasuredSize

# Operations whose column ``count`` has the number of elements of one rank, not of all ranks
_COUNT_PER_RANK = ("all_gather", "reduce_scatter", "all_to_all")
# From this size on the bandwidth is not limited by latency: 1 GiB, less 1 % since nccl-tests rounds sizes down
SATURATING_BYTES = round(0.99 * 2**30)
_REDUCED = ("all_reduce", "send_receive")  # operations whose table has a reduction, no root and the whole count
_MIB = 2**20
_MAX_ROUNDING = 2**16  # bytes by which nccl-tests rounds a size down at most: 16 for each of 4,096 ranks
_MAX_TEXT = 300  # characters of an error message in a problem


def split_series(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows, grouped by data type, reduction and root; rows without data are left out."""
    series: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.size:
            series.setdefault((row.type, row.redop, row.root), []).append(row)
    return list(series.values())


def possible_operations(table: Table, rows: Sequence[Row]) -> Sequence[str]:
    """Return the operations that the columns allow, among those that seatrial measures."""
    operations = _operations_of_columns(rows)
    if len(operations) == 1 or (operations == _REDUCED and not _has_equal_bandwidths(rows)):
        return operations[:1]
    checked = [[place.wrong is not None for place in row.timings] for row in rows]
    is_checked_in_place = any(len(places) > 1 and places[1] for places in checked)
    if not any(places[0] for places in checked):
        return operations
    if is_checked_in_place:
        return operations[:1] if table.wrong_is_a_count else operations
    return operations[1:] if all(row.in_place for row in rows) else operations


def allows(table: Table, rows: Sequence[Row], operation: str) -> bool:
    """Return whether the table can be of ``operation``.

    Before nccl-tests 2.13.1, the programs of all_to_all and send_receive count wrong elements in place too, so that
    their columns are those of all_gather and all_reduce.
    """
    possible, operations = possible_operations(table, rows), _operations_of_columns(rows)
    is_of_old_version = operation in operations[1:] and (operations != _REDUCED or _has_equal_bandwidths(rows))
    return operation in possible or is_of_old_version


def _operations_of_columns(rows: Sequence[Row]) -> Sequence[str]:
    """The operations by reduction, root and count. Of two, the second is not checked in place since nccl-tests 2.13.1.

    Source: the functions GetCollByteCount and RunTest of each program in NVIDIA/nccl-tests src/.
    """
    last = rows[-1]
    count_is_of_one_rank = last.data_size < last.size
    is_rooted = last.root is not None and last.root >= 0
    if last.redop in REDUCTIONS:  # send_receive too has one in its table, since nccl-tests 2.13
        return ("reduce",) if is_rooted else ("reduce_scatter",) if count_is_of_one_rank else _REDUCED
    if is_rooted:
        return () if count_is_of_one_rank else ("broadcast",)
    # before nccl-tests 2.13 the table of send_receive has no column redop
    return ("all_gather", "all_to_all") if count_is_of_one_rank else ("send_receive",)


def _has_equal_bandwidths(rows: Sequence[Row]) -> bool:
    """Return whether busbw equals algbw in all rows, as in send_receive and in an all_reduce of two ranks."""
    # nccl-tests prints two decimals
    return all(abs(timing.busbw - timing.algbw) < 0.02 for row in rows for timing in row.timings)


class RankRange(NamedTuple):
    """The lowest and the highest number of ranks that the rows of a table allow; ``high`` may be infinite."""

    low: int
    high: float


def rank_range(rows: Sequence[Row], operation: str) -> RankRange | None:
    """Return the numbers of ranks that agree with ``rows``; None if the rows do not show them.

    The number n of ranks follows from size and count for operations in _COUNT_PER_RANK, and from busbw ÷ algbw =
    2(n−1)/n for an all-reduce.
    If the rows contradict each other, ``low`` is above ``high``.
    """
    low, high = 1, math.inf
    for row in rows:
        if row.size < 2**20:  # bandwidths of small sizes are printed with too few digits
            continue
        if operation in _COUNT_PER_RANK:
            if not row.data_size or row.size % row.data_size:
                return None
            low, high = max(low, row.size // row.data_size), min(high, row.size // row.data_size)
        elif operation == "all_reduce":
            for timing in row.timings:
                if timing.algbw >= 1:
                    smallest, largest = _ratio_range(timing.busbw, timing.algbw)
                    # n = 2 / (2 - ratio). No n has a ratio of 2 or more: low is then 2**31, more than any cluster has
                    low = max(low, math.ceil(2 / (2 - smallest) - 1e-6) if smallest < 2 else 2**31)
                    high = min(high, math.floor(2 / (2 - largest) + 1e-6) if largest < 2 else math.inf)
    return None if (low, high) == (1, math.inf) else RankRange(low, high)


def _ratio_range(busbw: float, algbw: float) -> tuple[float, float]:
    """Return the smallest and the largest busbw ÷ algbw of unrounded values that are printed as these numbers.

    nccl-tests prints two decimals; from 1,000 on it prints one, and from 10,000 on none. The rounding error of each
    number is half a unit of its last digit; it is increased by 2 %.
    """
    busbw_error, algbw_error = (
        0.0051 if value < 1000 else 0.051 if value < 10000 else 0.51 for value in (busbw, algbw)
    )
    return (busbw - busbw_error) / (algbw + algbw_error), (busbw + busbw_error) / (algbw - algbw_error)


def measured_sizes(rows: Sequence[Row]) -> tuple[MeasuredSize, ...]:
    """The bandwidths at each size, in order of size."""
    by_label: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.size):
        by_label.setdefault(nominal_size_label(row.size), []).append(row)
    return tuple(
        MeasuredSize(
            size=size_rows[0].size,
            label=label,
            out_of_place=_busbw(row.out_of_place for row in size_rows),
            in_place=_busbw(row.in_place for row in size_rows),
            wrong=max(_wrong_counts(size_rows), default=None),
        )
        for label, size_rows in by_label.items()
    )


def _busbw(place_timings: Iterable[Timing | None]) -> float | None:
    """The bus bandwidth in GB/s; None if not measured. With repeated sweeps (-N) the median."""
    values = [timing.busbw for timing in place_timings if timing]
    return median(values) if values else None


def _wrong_counts(rows: Sequence[Row]) -> list[float]:
    """Return the number of wrong elements of each measurement that checked the data."""
    return [timing.wrong for row in rows for timing in row.timings if timing.wrong is not None]


def wrong_elements(table: Table, rows: Sequence[Row]) -> float | None:
    """Return the largest number of wrong elements in rows and summary; None if the run did not check the data."""
    counts = _wrong_counts(rows)
    if not counts and not table.out_of_bounds:
        return None
    in_rows = max(counts, default=0.0) if table.wrong_is_a_count else 0.0
    return max(in_rows, float(table.out_of_bounds or 0))


def variant_text(row: Row) -> str:
    """Return data type, reduction and root as text, where the row has them."""
    root = f"root {row.root}" if row.root is not None and row.root >= 0 else ""
    return ", ".join(filter(None, (row.type, row.redop if row.redop != "none" else "", root)))


def nominal_size_label(size: int) -> str:
    """Return the label of the requested size: ``1GiB``, ``1536MiB``."""
    nominal = _nominal_size(size)
    label = size_label(nominal)
    is_in_bytes = label == f"{nominal}B"  # such as 1536 MiB, which is no whole number of GiB
    return f"{nominal // _MIB}MiB" if is_in_bytes and nominal >= _MIB and nominal % _MIB == 0 else label


def _nominal_size(size: int) -> int:
    """Return the requested size. nccl-tests rounds it down to a multiple of the ranks: 1 GiB becomes 1073741568 B."""
    next_mib = -(-size // _MIB) * _MIB
    return next_mib if size >= _MIB and next_mib - size <= _MAX_ROUNDING else size


def table_problems(table: Table, rows: Sequence[Row]) -> list[str]:
    """Return why the table cannot be judged: it is incomplete, of a failed run, or has only small sizes."""
    problems = []
    if table.failure:
        problems.append(f"the run ended with an error: {table.failure[:_MAX_TEXT]}")
    if table.rejected:
        more = f" (and {len(table.rejected) - 1} more)" if len(table.rejected) > 1 else ""
        problems.append(f"the table is damaged: {table.rejected[0]}{more}; no value is taken from such rows")
    largest = max(row.size for row in rows)
    # truncated if the size after the largest one is within the requested range
    following = largest + table.step_bytes if table.step_bytes else 2 * largest
    if table.max_bytes and not table.footer_count and following <= table.max_bytes:
        text = f"it ends at {format_bytes(_nominal_size(largest))} of {format_bytes(table.max_bytes)}"
        problems.append(f"the table is truncated: {text}; the run did not end, or the rest of the file is missing")
    if largest < SATURATING_BYTES:
        text = f"the largest size is {format_bytes(_nominal_size(largest))}: too small to judge"
        problems.append(f"{text}, since latency limits it; run again with -b 1G -e 16G -f 2")
    return problems
