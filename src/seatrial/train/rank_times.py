"""Each rank's compute time, compared with that of the other ranks, and each rank's wait for data. Pure; no torch.

Step times are equal on all ranks, since each step waits for the slowest rank. Compute time contains no wait for other
ranks, so it shows which rank the others wait for:

- DDP, stack native: from the start of the first forward pass to the gradient at the first block's output, which is
  nearly the end of the last backward pass.
- DDP, stack hf: the forward passes.
- FSDP2: the forward passes of the innermost groups, each timed after its weights were gathered.
- ZeRO-3: not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from seatrial.util.quantiles import median_interval

if TYPE_CHECKING:
    from seatrial.train.progress import Step

MIN_STEPS = 6  # the smallest number of steps whose median has a 95 % confidence interval
MAX_STEPS = 200  # a rank reports the times of at most this many last steps: enough for an interval of a few percent
_NAMES = ("compute_s", "data_wait_s", "seconds")  # fields that RankTimes, Step and metrics.json have in common


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank in each measured step.

    compute_s: compute time; empty if it is not measured. data_wait_s: time for which the device waited for the batch;
    empty with stack hf. seconds: whole steps.
    """

    device: str  # model of the rank's device; only ranks with the same model are compared
    compute_s: Sequence[float]
    data_wait_s: Sequence[float]
    seconds: Sequence[float]

    @classmethod
    def of_steps(cls, device: str, steps: Sequence[Step]) -> RankTimes:
        """The times in the last MAX_STEPS of ``steps`` of one rank, rounded to microseconds."""
        last = steps[-MAX_STEPS:]
        times = []
        for name in _NAMES:
            column = [getattr(step, name) for step in last]
            times.append([round(seconds, 6) for seconds in column if seconds is not None])
        return cls(device, *times)

    @classmethod
    def from_metrics(cls, rank: Mapping[str, Any]) -> RankTimes:
        """The times in an entry of ``ranks`` in metrics.json; a field that the entry does not have is empty."""
        return cls(str(rank.get("device")), *(rank.get(name) or [] for name in _NAMES))

    @property
    def data_wait_share(self) -> float | None:
        """The share of the step time, 0 to 1, that the rank waits for data; None if the wait is not timed."""
        total = sum(self.seconds)
        return sum(self.data_wait_s) / total if self.data_wait_s and total > 0 else None


@dataclass(frozen=True)
class Slowdown:
    """In each step, the compute time of a rank divided by the median of the other ranks.

    ratio: the median over ``steps`` steps. low, high: the 95 % confidence interval of this median, or the smallest and
    largest value if the steps are too few or too correlated for an interval.
    """

    ratio: float
    low: float
    high: float
    steps: int


def slowdowns(ranks: Sequence[RankTimes]) -> dict[int, Slowdown]:
    """Index in ``ranks`` → Slowdown of the rank, compared with the other ranks on the same device model.

    Ranks without such peers or without compute times are missing. So are all ranks of a device model if fewer than
    MIN_STEPS steps have a compute time above 0 on each of them.
    """
    indices_by_device: dict[str, list[int]] = {}
    for index, rank in enumerate(ranks):
        if rank.compute_s:
            indices_by_device.setdefault(rank.device, []).append(index)
    slowdown_by_index: dict[int, Slowdown] = {}
    for indices in indices_by_device.values():
        if len(indices) < 2:
            continue
        steps = min(len(ranks[index].compute_s) for index in indices)
        seconds_by_step = [[ranks[index].compute_s[step] for index in indices] for step in range(-steps, 0)]
        ratios_by_step = [_ratios_to_median_of_others(seconds) for seconds in seconds_by_step if min(seconds) > 0]
        if len(ratios_by_step) < MIN_STEPS:
            continue
        for index, ratios in zip(indices, zip(*ratios_by_step, strict=True), strict=True):
            low, high = median_interval(ratios) or (min(ratios), max(ratios))
            slowdown_by_index[index] = Slowdown(median(ratios), low, high, len(ratios))
    return slowdown_by_index


def _ratios_to_median_of_others(seconds: Sequence[float]) -> list[float]:
    """Each value divided by the median of the other values. Sorts the values only once."""
    ordered = sorted(seconds)
    index_in_ordered = {value: index for index, value in enumerate(ordered)}
    other_count = len(seconds) - 1
    middle_indices = (other_count - 1) // 2, other_count // 2  # the same index twice if the count is odd
    ratios = []
    for value in seconds:
        skipped = index_in_ordered[value]
        middle_values = [ordered[index if index < skipped else index + 1] for index in middle_indices]
        ratios.append(2 * value / sum(middle_values))
    return ratios
