"""Sizes and modes of the collective checks; real ranks: test_all_reduce.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.records import record_path

from seatrial.bench.collectives import CollectiveResult, Timings
from seatrial.bench.operations import OPERATIONS
from seatrial.checks import catalog
from seatrial.checks.check import Context
from seatrial.checks.declare import answers
from seatrial.checks.fabric import _results
from seatrial.checks.fabric._collective import _Modes
from seatrial.checks.fabric._sizes import (
    GPU_SIZES,
    MANY_NODES,
    CollectiveOptions,
    default_gpu_sizes,
    mode_sizes,
)
from seatrial.hardware.network_time import TcpNetwork
from seatrial.model import Absent, DecisionValue, Metric, Outcome, Trial, Why
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from tests.checks.fabric.verdicts import outcomes


def modes(device: str, /, **options: object) -> _Modes:
    return modes_of("all_gather", device, options)


def modes_of(operation: str, device: str, options: dict[str, object], network: TcpNetwork | None = None) -> _Modes:
    context = Context(
        node="node0",
        rank=0,
        world_size=2,
        local_rank=0,
        device=device,
        expected_gpus=None,
        artifacts_dir=Path("/nowhere"),
        run_dir=Path("/nowhere"),
        tcp_network=network,
    )
    requested = CollectiveOptions.model_validate(options)
    sizes = default_gpu_sizes(operation, network.nodes if network else 1, network)
    return _Modes(OPERATIONS[operation], sizes, requested, context, ["node0/rank0", "node0/rank1"])


def test_cpus_have_no_mode_cuda_graph() -> None:
    requested = {"modes": ["back_to_back", "cuda_graph"]}
    assert modes("cuda:0", **requested).applicable_modes == ["back_to_back", "cuda_graph"]
    assert modes("cpu", **requested).applicable_modes == ["back_to_back"]


@pytest.mark.parametrize(
    ("options", "omitted"),
    [
        ({}, set()),
        ({"sizes": ["64KiB", "1MiB"]}, {"busbw.10MiB"}),
        ({"modes": ["percentiles"]}, {"busbw.64KiB", "busbw.1MiB", "busbw.10MiB"}),
    ],
)
def test_omitted_default_sizes_are_recorded(options: dict[str, object], omitted: set[str]) -> None:
    answers = list(modes("cpu", **options).not_measured())
    assert {name for answer in answers for name in answer.names} == omitted
    assert {answer.why for answer in answers} <= {Why.NOT_REQUESTED}


def test_data_memory_tail_and_bandwidth_are_judged() -> None:
    check = catalog()["collectives.all_gather"]
    values = {"busbw.1GiB": 1.0, "wrong_elements": 0, "sizes_not_allocated": 0}
    no_reference = {"backend": "nccl", "gpu": "none", "world_size": 8, "nodes": 1}
    no_p99 = {"p99_ratio.1GiB": "no operations"}
    assert outcomes(check, values, no_p99, **no_reference) == {
        "busbw.1GiB": Outcome.UNJUDGED,
        "wrong_elements": Outcome.PASS,
        "sizes_not_allocated": Outcome.PASS,
        "p99_ratio.1GiB": Outcome.SKIP,
    }
    assert outcomes(check, values, backend="gloo")["busbw.1GiB"] is Outcome.SKIP


def with_operations(trial: Trial, times_us: list[float]) -> Trial:
    """The trial with these times of single all-reduce operations, as this version records them."""
    check, windows = catalog()["collectives.all_reduce"], tuple((time / 1e6,) for time in times_us)
    result = CollectiveResult(size=2**30, timings=Timings(windows, per_window=1, warmup=4), mismatches={})
    measurements = []
    for measurement in trial.measurements:
        if "percentiles" in measurement.facts:
            given = _results.percentile_values(2**30, result, ["vm/gpu0"])
            observed = list(answers(given, check.declared, check.name, {None: "cluster"}))
            metrics = [each for each in observed if isinstance(each, Metric)]
            absent = [each for each in observed if isinstance(each, Absent)]
            names = {*(each.name for each in metrics), *(each.metric for each in absent)}
            changed = {
                "metrics": (*(each for each in measurement.metrics if each.name not in names), *metrics),
                "absent": (*(each for each in measurement.absent if each.metric not in names), *absent),
            }
            measurements.append(measurement.model_copy(update=changed))
        else:
            measurements.append(measurement)
    return rejudge(trial.model_copy(update={"measurements": tuple(measurements)}))


def single_operations(trial: Trial) -> list[float]:
    return next(
        list(metric.samples)
        for measurement in trial.measurements
        for metric in measurement.metrics
        if (measurement.check, metric.name) == ("collectives.all_reduce", "p50.1GiB")
    )


def test_one_in_fifty_slow_operations_is_rejected() -> None:
    trial = load_trial(record_path("2026-11-23-2xh200/acceptance"))
    times = single_operations(trial)
    slow = [time * (10 if index % 50 == 7 else 1) for index, time in enumerate(times)]
    assert with_operations(trial, times).decision.value is DecisionValue.ACCEPTED
    rejected = with_operations(trial, slow)
    assert rejected.decision.value is DecisionValue.REJECTED
    assert [verdict.metric for verdict in rejected.verdicts if verdict.outcome is Outcome.FAIL] == ["p99_ratio.1GiB"]


@pytest.mark.parametrize(
    "path",
    ["2026-11-21-2xh200/acceptance", "2026-11-22-2xh200-restructured/after-acceptance", "2026-11-22-4xh200/acceptance"],
)
def test_healthy_nodes_pass_the_limit_on_p99(path: str) -> None:
    trial = load_trial(record_path(path))
    judged = with_operations(trial, single_operations(trial))
    (verdict,) = [verdict for verdict in judged.verdicts if verdict.metric == "p99_ratio.1GiB" and verdict.value]
    assert verdict.outcome is Outcome.PASS


def test_many_nodes_measure_8_gib_too() -> None:
    assert max(default_gpu_sizes("all_gather", MANY_NODES - 1)) == 2**30
    assert set(default_gpu_sizes("all_gather", MANY_NODES)) == {*GPU_SIZES, 2**33}
    assert default_gpu_sizes("all_reduce", MANY_NODES).count(2**33) == 1


SLOW = TcpNetwork(nodes=4, gpus=8, gbps=10)
INSTEAD = {"busbw.8GiB": "busbw.1GiB"}


@pytest.mark.parametrize(
    ("options", "instead", "omitted"),
    [
        ({}, INSTEAD, {"busbw.8GiB"}),
        ({"sizes": ["1GiB", "8GiB"]}, {}, {"busbw.1MiB", "busbw.10MiB", "busbw.100MiB"}),
        (
            {"sizes": ["1GiB"]},
            INSTEAD,
            {"busbw.8GiB", "busbw.1MiB", "busbw.10MiB", "busbw.100MiB"},
        ),
    ],
)
def test_a_slow_network_leaves_out_default_sizes_and_records_them(
    options: dict[str, object], instead: dict[str, str], omitted: set[str]
) -> None:
    on_slow = modes_of("all_reduce", "cuda:0", options, SLOW)
    answers = {name: answer for answer in on_slow.not_measured() for name in answer.names}
    assert {name: answer.instead for name, answer in answers.items() if answer.instead} == instead
    assert answers.keys() == omitted
    reasons = {name: answer.reason for name, answer in answers.items()}
    assert "busbw.8GiB" not in reasons or "takes about 111 s on a network of 10 Gb/s" in str(reasons["busbw.8GiB"])
    timed = mode_sizes("back_to_back", on_slow.options, on_slow.default_gpu_sizes, gpu=True)
    assert (2**33 in timed) == (not instead)


def test_a_fast_network_leaves_nothing_out() -> None:
    assert not list(modes_of("all_reduce", "cuda:0", {}, TcpNetwork(4, 8, 100)).not_measured())
