from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, cycle, repeat
from typing import Any

import pytest
import torch

from seatrial.bench import collectives
from seatrial.bench.collectives import Timings, time_operation
from seatrial.bench.operations import OPERATIONS, PreparedOperation
from seatrial.bench.timing import MIN_WINDOWS


# Lines that nccl-tests printed: size in B, time in us, ranks, algbw and busbw in GB/s.
# 72 GPUs of a GB200 NVL72: coreweave/nccl-tests#43; 8 GPUs: kvcache-ai/Mooncake#3484.
@pytest.mark.parametrize(
    ("size", "us", "ranks", "algbw", "busbw"),
    [
        (8589934592, 20299, 72, 423.16, 834.57),
        (1073741824, 3108.8, 72, 345.38, 681.17),
        (16777216, 121.33, 8, 138.28, 242.00),
        (1048576, 27.76, 8, 37.78, 66.11),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(size: int, us: float, ranks: int, algbw: float, busbw: float) -> None:
    measured = size / (us * 1e-6) / 1e9
    assert measured == pytest.approx(algbw, rel=2e-4)
    assert measured * OPERATIONS["all_reduce"].busbw_factor(ranks) == pytest.approx(busbw, rel=2e-4)


def test_timings_by_window_and_by_rank() -> None:
    timings = Timings(windows=((1.0, 3.0), (2.0, 4.0), (9.0, 5.0)), per_window=4, warmup=6)
    assert timings.window_means == (2.0, 3.0, 7.0)
    assert timings.rank_windows(1) == (3.0, 4.0, 5.0)
    assert timings.slowest_rank == 1


def time_it(monkeypatch: pytest.MonkeyPatch, clock: Iterator[float], seconds: float, at_least: float = 0.0) -> Timings:
    """Time an operation that takes what ``clock`` says, on one rank with itself as the only peer."""

    def window(operation: Callable[[], object], count: int, device: torch.device) -> float:
        del operation, count, device
        return next(clock)

    monkeypatch.setattr(collectives, "time_window", window)
    monkeypatch.setattr(collectives, "gather", lambda value: [value])
    return time_operation(lambda: None, torch.device("cpu"), seconds, at_least)


def test_steady_times_end_early_and_the_warm_up_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cold = (9.0, 0.004, 0.002)  # the first use, the first guess (13 a window), the window of 13
    timings = time_it(monkeypatch, chain(cold, repeat(0.001)), seconds=2)
    assert set(timings.windows) == {(0.001,)}
    assert collectives.MIN_TIMED_S <= sum(timings.window_means) * 25 < collectives.MIN_TIMED_S + 0.05
    assert (timings.per_window, timings.warmup) == (25, 1 + 1 + 13)


def test_few_windows_are_not_enough_however_long_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = time_it(monkeypatch, repeat(0.1), seconds=60)
    assert len(timings.windows) == MIN_WINDOWS


def test_unsteady_times_go_on_to_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = time_it(monkeypatch, cycle((0.010, 0.010, 0.010, 0.011, 0.011, 0.011)), seconds=1)
    assert timings.per_window == 5
    assert 1 <= 5 * sum(timings.window_means) < 1.06


def test_a_burn_in_goes_on_when_the_median_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = time_it(monkeypatch, repeat(0.001), seconds=2, at_least=60)
    assert 60 <= sum(timings.window_means) * timings.per_window < 61
    assert len(timings.windows) <= collectives.MAX_WINDOWS + 1  # longer windows, not thousands of samples


def test_ranks_of_unlike_speed_agree_on_the_end_of_a_burn_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sees its own clock, and decides by what all of them measured."""
    counts = []
    for own, other in ((0.001, 0.0017), (0.0017, 0.001)):
        monkeypatch.setattr(collectives, "time_window", lambda *_, own=own: own)
        monkeypatch.setattr(collectives, "gather", lambda value, other=other: [value, other])
        timings = time_operation(lambda: None, torch.device("cpu"), 2, min_seconds=10)
        counts.append((len(timings.windows), timings.per_window))
    assert counts[0] == counts[1]


def test_an_operation_longer_than_the_cap_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = time_it(monkeypatch, repeat(3.0), seconds=1)
    assert (timings.windows, timings.per_window) == (((3.0,),), 1)


def test_a_misjudged_window_does_not_run_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = time_it(monkeypatch, chain((1, 1, 1), cycle((1e-5, 1e-4))), seconds=2)
    assert len(timings.windows) == collectives.MAX_WINDOWS


def test_the_slowest_rank_the_drift_and_who_is_late() -> None:
    windows = ((1.0, 1.0), (1.0, 2.0), (1.0, 1.2), (1.1, 1.0), (1.0, 1.4), (1.2, 1.3))
    timings = Timings(windows=windows, per_window=1, warmup=4)
    assert timings.window_maxima == (1.0, 2.0, 1.2, 1.1, 1.4, 1.3)
    assert timings.drift == pytest.approx(1.225 / 1.25 - 1)  # medians of two windows each
    assert timings.most_often_slowest_rank == (1, 4 / 6)


@pytest.mark.parametrize(("estimate", "a_graph"), [(1e-5, collectives.OPERATIONS_PER_GRAPH), (0.003, 17), (9.0, 1)])
def test_a_figure_of_device_mode_is_that_of_one_operation(
    monkeypatch: pytest.MonkeyPatch, estimate: float, a_graph: int
) -> None:
    @contextmanager
    def captured(operation: Callable[[], object], count: int) -> Iterator[int]:
        yield count

    def of_graphs(replay: int, device: torch.device, seconds: float) -> Timings:
        return Timings(windows=((0.002 * replay, 0.003 * replay),), per_window=5, warmup=3)

    def measure(*arguments: Any, replayed: bool) -> Timings:
        assert replayed
        found = arguments[-1](PreparedOperation(lambda: None, torch.empty(0), torch.empty(0), []), torch.device("cpu"))
        assert isinstance(found, Timings)
        return found

    for name, stand_in in {
        "_captured": captured,
        "_measure": measure,
        "_estimate": lambda *_: estimate,
        "time_operation": of_graphs,
        "time_window": lambda *_: 0.0,
    }.items():
        monkeypatch.setattr(collectives, name, stand_in)
    timings: Any = collectives.measure_cuda_graph(OPERATIONS["all_reduce"], 8, "float32", "cpu", 1)
    assert timings.windows == (pytest.approx((0.002, 0.003)),)
    assert (timings.per_window, timings.warmup) == (5 * a_graph, 3 * a_graph)


@pytest.mark.parametrize("fails", [False, True])
def test_a_graph_is_gone_and_the_device_idle_before_anything_else_goes_on(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A group cannot be torn down while a graph holds its operations."""
    told: list[str] = []

    class Graph:
        def replay(self) -> None:
            told.append("replay")

        def reset(self) -> None:
            told.append("reset")

    @contextmanager
    def capture(graph: Graph, *, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        told.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("synchronize"))
    try:
        with collectives._captured(lambda: told.append("operation"), 3) as replay:
            replay()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    ended = ["synchronize", "reset", "synchronize"]
    assert told == ["synchronize", "capture", *["operation"] * 3, "replay", *ended]
