"""Facts of one table of nccl-tests: its operation, ranks, sizes, wrong elements, and whether it is complete."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from seatrial.discover.nccl_tests_output import REDUCTIONS, Row, Table
from seatrial.model import format_bytes, size_label
from seatrial.model.benchmark import MeasuredSize
from seatrial.util.grouping import grouped

# Operations whose column ``count`` has the number of elements of one rank, not of all ranks
_COUNT_PER_RANK = ("all_gather", "reduce_scatter", "all_to_all")
_REDUCED = ("all_reduce", "send_receive")  # operations whose table has a reduction, no root and the whole count
# From this size on the bandwidth is not limited by latency: 1 GiB, less 1 % since nccl-tests rounds sizes down
SATURATING_BYTES = round(0.99 * 2**30)
_MIB = 2**20
_MAX_ROUNDING = 2**16  # bytes by which nccl-tests rounds a size down at most: 16 for each of 4,096 ranks
_MAX_TEXT = 300  # characters of an error message in a problem


@dataclass(frozen=True)
class Series:
    """The rows of a table with one data type, reduction and root; none for a table without rows."""

    table: Table
    rows: Sequence[Row]

    @property
    def variant(self) -> str:
        """Data type, reduction and root as text, where the rows have them."""
        if not self.rows:
            return ""
        row = self.rows[-1]
        root = f"root {row.root}" if row.root is not None and row.root >= 0 else ""
        return ", ".join(filter(None, (row.type, row.redop if row.redop != "none" else "", root)))

    @cached_property
    def possible_operations(self) -> Sequence[str]:
        """The operations that the columns allow, among those that seatrial measures."""
        operations = self._operations_of_columns
        if len(operations) == 1 or (operations == _REDUCED and not self._has_equal_bandwidths):
            return operations[:1]
        checked_in_place = any(row.in_place and row.in_place.wrong is not None for row in self.rows)
        if not any(row.out_of_place and row.out_of_place.wrong is not None for row in self.rows):
            return operations
        if checked_in_place:
            return operations[:1] if self.table.wrong_is_a_count else operations
        return operations[1:] if all(row.in_place for row in self.rows) else operations

    def allows(self, operation: str) -> bool:
        """Return whether the table can be of ``operation``.

        Before nccl-tests 2.13.1, the programs of all_to_all and send_receive count wrong elements in place too, so that
        their columns are those of all_gather and all_reduce.
        """
        operations = self._operations_of_columns
        is_of_old_version = operation in operations[1:] and (operations != _REDUCED or self._has_equal_bandwidths)
        return is_of_old_version or operation in self.possible_operations

    @property
    def _operations_of_columns(self) -> Sequence[str]:
        """The operations by reduction, root and count. Of two, the second has not been checked in place since 2.13.1.

        Source: the functions GetCollByteCount and RunTest of each program in NVIDIA/nccl-tests src/.
        """
        last = self.rows[-1]
        count_is_of_one_rank = last.data_size < last.size
        is_rooted = last.root is not None and last.root >= 0
        if last.redop in REDUCTIONS:  # send_receive too has one in its table, since nccl-tests 2.13
            return ("reduce",) if is_rooted else ("reduce_scatter",) if count_is_of_one_rank else _REDUCED
        if is_rooted:
            return () if count_is_of_one_rank else ("broadcast",)
        # before nccl-tests 2.13 the table of send_receive has no column redop
        return ("all_gather", "all_to_all") if count_is_of_one_rank else ("send_receive",)

    @property
    def _has_equal_bandwidths(self) -> bool:
        """Whether busbw equals algbw in all rows, as in send_receive and in an all_reduce of two ranks."""
        # nccl-tests prints two decimals
        return all(abs(timing.busbw - timing.algbw) < 0.02 for row in self.rows for timing in row.timings)

    @cached_property
    def sizes(self) -> tuple[MeasuredSize, ...]:
        """The bandwidths at each size, in order of size; with repeated sweeps (-N) their medians."""
        rows_by_size = sorted(self.rows, key=lambda row: row.size)
        by_label = grouped((nominal_size_label(row.size), row) for row in rows_by_size)
        found = []
        for label, rows in by_label.items():
            out_of_place = [row.out_of_place.busbw for row in rows if row.out_of_place]
            in_place = [row.in_place.busbw for row in rows if row.in_place]
            size = MeasuredSize(
                size=rows[0].size,
                label=label,
                out_of_place=median(out_of_place) if out_of_place else None,
                in_place=median(in_place) if in_place else None,
                wrong=max(_wrong_counts(rows), default=None),
            )
            found.append(size)
        return tuple(found)

    @property
    def wrong_elements(self) -> float | None:
        """The largest number of wrong elements in rows and summary; None if the run did not check the data."""
        counts, in_summary = _wrong_counts(self.rows), float(self.table.out_of_bounds or 0)
        if not counts and not in_summary:
            return None
        return max(in_summary, *counts) if counts and self.table.wrong_is_a_count else in_summary

    @property
    def problems(self) -> list[str]:
        """Why the table cannot be judged: it is incomplete, of a failed run, or has only small sizes."""
        problems, table = [], self.table
        if table.failure:
            problems.append(f"the run ended with an error: {table.failure[:_MAX_TEXT]}")
        if table.rejected:
            more = f" (and {len(table.rejected) - 1} more)" if len(table.rejected) > 1 else ""
            problems.append(f"the table is damaged: {table.rejected[0]}{more}; no value is taken from such rows")
        largest = max(row.size for row in self.rows)
        # truncated if the size after the largest one is within the requested range
        following = largest + table.step_bytes if table.step_bytes else 2 * largest
        if table.max_bytes and not table.footer_count and following <= table.max_bytes:
            text = f"it ends at {format_bytes(_nominal_size(largest))} of {format_bytes(table.max_bytes)}"
            problems.append(f"the table is truncated: {text}; the run did not end, or the rest of the file is missing")
        if largest < SATURATING_BYTES:
            text = f"the largest size is {format_bytes(_nominal_size(largest))}: too small to judge"
            problems.append(f"{text}, since latency limits it; run again with -b 1G -e 16G -f 2")
        return problems


def split_series(table: Table) -> list[Series]:
    """Return the rows, grouped by data type, reduction and root; rows without data are left out."""
    series = grouped(((row.type, row.redop, row.root), row) for row in table.rows if row.size)
    return [Series(table, rows) for rows in series.values()]


def rank_range(rows: Sequence[Row], operation: str) -> tuple[int, float] | None:
    """Return the lowest and highest number of ranks that agree with ``rows``; None if the rows do not show it.

    The number n of ranks follows from size and count for operations in _COUNT_PER_RANK, and from busbw ÷ algbw =
    2(n−1)/n for an all-reduce. The highest one may be infinite. If the rows contradict each other, the lowest number is
    above the highest.
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
    return None if (low, high) == (1, math.inf) else (low, high)


def _ratio_range(busbw: float, algbw: float) -> tuple[float, float]:
    """Return the smallest and the largest busbw ÷ algbw of unrounded values that are printed as these numbers.

    nccl-tests prints two decimals; from 1,000 on it prints one, and from 10,000 on none. The rounding error of each
    number is half a unit of its last digit; it is increased by 2 %.
    """
    busbw_error, algbw_error = (
        0.0051 if value < 1000 else 0.051 if value < 10000 else 0.51 for value in (busbw, algbw)
    )
    return (busbw - busbw_error) / (algbw + algbw_error), (busbw + busbw_error) / (algbw - algbw_error)


def _wrong_counts(rows: Sequence[Row]) -> list[float]:
    """Return the number of wrong elements of each measurement that checked the data."""
    return [timing.wrong for row in rows for timing in row.timings if timing.wrong is not None]


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
