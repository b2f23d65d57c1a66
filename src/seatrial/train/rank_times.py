"""The compute time of each rank, compared with that of the other ranks, and its wait for data. Pure; no torch.

Step times are equal on all ranks, since each step waits for the slowest rank. Compute time contains no wait for other
ranks, so it shows which rank the others wait for:

- DDP, stack native: from the first forward pass to the last gradient of the rank.
- DDP, stack hf: the forward passes.
- FSDP2: the forward passes of the innermost groups, each timed after its weights were gathered.
- ZeRO-3: not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from seatrial.util.quantiles import median_interval

if TYPE_CHECKING:
    from seatrial.train.progress import Step

MIN_STEPS = 6  # the smallest sample whose median has a 95 % confidence interval
MAX_STEPS = 200  # a rank reports the times of at most this many last steps: enough for an interval of a few percent
_NAMES = ("compute_s", "data_wait_s", "seconds")  # fields that RankTimes, Step and metrics.json have in common


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank in each measured step.

    compute_s: compute time; empty if it is not measured. data_wait_s: time for which the device waited for the batch;
    empty with stack hf. seconds: whole steps.
    """

    device: str  # model of the rank's device; only ranks with the same model are compared
    compute_s: tuple[float, ...]
    data_wait_s: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of_steps(cls, device: str, steps: Sequence[Step]) -> RankTimes:
        """The times in the last MAX_STEPS of ``steps`` of one rank, rounded to microseconds."""
        last = steps[-MAX_STEPS:]
        columns = [[getattr(step, name) for step in last] for name in _NAMES]
        return cls(device, *(tuple(round(value, 6) for value in column if value is not None) for column in columns))

    def to_metrics(self) -> dict[str, list[float]]:
        """The times as they are in an entry of ``ranks`` in metrics.json."""
        return {name: list(getattr(self, name)) for name in _NAMES}

    @classmethod
    def from_metrics(cls, rank: Mapping[str, Any]) -> RankTimes:
        """The times in an entry of ``ranks`` in metrics.json; empty where the stack or version has none."""
        return cls(str(rank.get("device")), *(tuple(rank.get(name) or ()) for name in _NAMES))

    @property
    def data_wait_share(self) -> float | None:
        """The share of the step time, 0 to 1, that the rank waits for data; None if it is not timed."""
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

    Ranks without such peers or without compute times are missing. So are all ranks of a device model if one of them
    has compute times of fewer than MIN_STEPS steps.
    """
    groups: dict[str, list[int]] = {}
    for index, rank in enumerate(ranks):
        if rank.compute_s:
            groups.setdefault(rank.device, []).append(index)
    by_index: dict[int, Slowdown] = {}
    for indices in groups.values():
        steps = min(len(ranks[index].compute_s) for index in indices)
        if len(indices) < 2 or steps < MIN_STEPS:
            continue
        seconds_by_step = [[ranks[index].compute_s[step] for index in indices] for step in range(-steps, 0)]
        ratios_by_rank = list(zip(*(list(_ratios(seconds)) for seconds in seconds_by_step), strict=True))
        for index, samples in zip(indices, ratios_by_rank, strict=True):
            low, high = median_interval(samples) or (min(samples), max(samples))
            by_index[index] = Slowdown(median(samples), low, high, steps)
    return by_index


def _ratios(seconds: Sequence[float]) -> Iterator[float]:
    """Each value divided by the median of the other values; 1 where that median is 0."""
    ordered = sorted(seconds)
    position = {value: index for index, value in enumerate(ordered)}
    count = len(seconds) - 1
    for value in seconds:
        # the median of the others: the mean of the middle two (or twice the middle one) of ``ordered`` without value
        skipped = position[value]
        middle_two = [ordered[index if index < skipped else index + 1] for index in ((count - 1) // 2, count // 2)]
        median_of_others = sum(middle_two) / 2
        yield value / median_of_others if median_of_others > 0 else 1.0
