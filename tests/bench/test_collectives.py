from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, cycle, repeat
from typing import Any

import pytest
import torch

from seatrial.bench import collectives
from seatrial.bench.collectives import AllocationError, Timings, time_operation
from seatrial.bench.operations import OPERATIONS, PreparedOperation
from seatrial.bench.timing import MIN_WINDOWS


# Results printed by nccl-tests: size in B, time in us, ranks, algbw and busbw in GB/s.
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
def test_bandwidths_match_nccl_tests(size: int, us: float, ranks: int, algbw: float, busbw: float) -> None:
    measured = size / (us * 1e-6) / 1e9
    assert measured == pytest.approx(algbw, rel=2e-4)
    assert measured * OPERATIONS["all_reduce"].busbw_factor(ranks) == pytest.approx(busbw, rel=2e-4)


def test_timings_by_window_and_rank() -> None:
    timings = Timings(windows=((1.0, 3.0), (2.0, 4.0), (9.0, 5.0)), per_window=4, warmup=6)
    assert timings.window_means == (2.0, 3.0, 7.0)
    assert timings.rank_windows(1) == (3.0, 4.0, 5.0)
    assert timings.slowest_rank == 1


def fake_timings(
    monkeypatch: pytest.MonkeyPatch, clock: Iterator[float], seconds: float, min_seconds: float = 0.0
) -> Timings:
    """Time an operation on a single rank, with window times from ``clock``."""

    def window(operation: Callable[[], object], count: int, device: torch.device) -> float:
        del operation, count, device
        return next(clock)

    monkeypatch.setattr(collectives, "time_window", window)
    monkeypatch.setattr(collectives, "gather", lambda value: [value])
    return time_operation(lambda: None, torch.device("cpu"), seconds, min_seconds)


def test_constant_times_end_early_and_exclude_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    cold = (9.0, 0.004, 0.002)  # first use, first estimate (13 per window), window of 13
    timings = fake_timings(monkeypatch, chain(cold, repeat(0.001)), seconds=2)
    assert set(timings.windows) == {(0.001,)}
    assert collectives.MIN_TIMED_S <= sum(timings.window_means) * 25 < collectives.MIN_TIMED_S + 0.05
    assert (timings.per_window, timings.warmup) == (25, 1 + 1 + 13)


def test_small_operations_in_graphs_have_shorter_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_timings(monkeypatch, repeat(0.001), seconds=2)  # patches the clock
    monkeypatch.setattr(collectives, "time_window", lambda *_: 0.001)
    options = {"window_s": collectives.GRAPH_WINDOW_S, "min_timed_s": collectives.GRAPH_MIN_TIMED_S}
    timings = time_operation(lambda: None, torch.device("cpu"), 2, **options)
    assert timings.per_window == 20
    assert MIN_WINDOWS <= len(timings.windows) <= MIN_WINDOWS + 1


def test_minimum_number_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = fake_timings(monkeypatch, repeat(0.1), seconds=60)
    assert len(timings.windows) == MIN_WINDOWS


def test_varying_times_use_all_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = fake_timings(monkeypatch, cycle((0.010, 0.010, 0.010, 0.011, 0.011, 0.011)), seconds=1)
    assert timings.per_window == 5
    assert 1 <= 5 * sum(timings.window_means) < 1.06


def test_burn_in_continues_after_the_median_has_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = fake_timings(monkeypatch, repeat(0.001), seconds=2, min_seconds=60)
    assert 60 <= sum(timings.window_means) * timings.per_window < 61
    assert len(timings.windows) <= collectives.MAX_WINDOWS + 1  # longer windows instead of more


def test_ranks_with_different_speed_run_the_same_number_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank uses the times of all ranks."""
    counts = []
    for local, other in ((0.001, 0.0017), (0.0017, 0.001)):
        monkeypatch.setattr(collectives, "time_window", lambda *_, local=local: local)
        monkeypatch.setattr(collectives, "gather", lambda value, other=other: [value, other])
        timings = time_operation(lambda: None, torch.device("cpu"), 2, min_seconds=10)
        counts.append((len(timings.windows), timings.per_window))
    assert counts[0] == counts[1]


def test_operation_longer_than_the_limit_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = fake_timings(monkeypatch, repeat(3.0), seconds=1)
    assert (timings.windows, timings.per_window) == (((3.0,),), 1)


def test_number_of_windows_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = fake_timings(monkeypatch, chain((1, 1, 1), cycle((1e-5, 1e-4))), seconds=2)
    assert len(timings.windows) == collectives.MAX_WINDOWS


def test_maxima_drift_and_most_often_slowest_rank() -> None:
    windows = ((1.0, 1.0), (1.0, 2.0), (1.0, 1.2), (1.1, 1.0), (1.0, 1.4), (1.2, 1.3))
    timings = Timings(windows=windows, per_window=1, warmup=4)
    assert timings.window_maxima == (1.0, 2.0, 1.2, 1.1, 1.4, 1.3)
    assert timings.drift == pytest.approx(1.225 / 1.25 - 1)  # medians of two windows each
    assert timings.most_often_slowest_rank == (1, 4 / 6)


@pytest.mark.parametrize(("estimate", "per_graph"), [(1e-5, collectives.OPERATIONS_PER_GRAPH), (0.003, 7), (9.0, 1)])
def test_cuda_graph_times_are_per_operation(monkeypatch: pytest.MonkeyPatch, estimate: float, per_graph: int) -> None:
    @contextmanager
    def captured(operation: Callable[[], object], count: int) -> Iterator[int]:
        yield count

    def time_graphs(replay: int, device: torch.device, seconds: float, **_windows: float) -> Timings:
        return Timings(windows=((0.002 * replay, 0.003 * replay),), per_window=5, warmup=3)

    def measure(*arguments: Any, in_graph: bool) -> Timings:
        assert in_graph
        timings = arguments[-1](
            PreparedOperation(lambda: None, torch.empty(0), torch.empty(0), []), torch.device("cpu")
        )
        assert isinstance(timings, Timings)
        return timings

    for name, fake in {
        "_captured": captured,
        "_measure": measure,
        "_estimate": lambda *_: estimate,
        "time_operation": time_graphs,
        "time_window": lambda *_: 0.0,
    }.items():
        monkeypatch.setattr(collectives, name, fake)
    timings: Any = collectives.measure_cuda_graph(OPERATIONS["all_reduce"], 8, "float32", "cpu", 1)
    assert timings.windows == (pytest.approx((0.002, 0.003)),)
    assert (timings.per_window, timings.warmup) == (5 * per_graph, 3 * per_graph)


@pytest.mark.parametrize("fails", [False, True])
def test_graph_is_destroyed_and_the_device_idle_afterwards(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A process group cannot be destroyed while a graph references its communicator."""
    calls: list[str] = []

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

        def reset(self) -> None:
            calls.append("reset")

    @contextmanager
    def capture(graph: Graph, *, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        calls.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    try:
        with collectives._captured(lambda: calls.append("operation"), 3) as replay:
            replay()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    ended = ["synchronize", "reset", "synchronize"]
    assert calls == ["synchronize", "capture", *["operation"] * 3, "replay", *ended]


def test_allocation_error_names_a_few_of_many_ranks() -> None:
    message = str(AllocationError(dict.fromkeys(range(8192), "full")))
    assert message.endswith("rank 0: full; rank 1: full; rank 2: full; rank 3: full and 8188 more")
