"""Results of a hook on a node: rules of the checks, fake GPUs, GPUs in use by jobs, time limits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.checks.check import Context, Options
from seatrial.checks.declare import Answer
from seatrial.operate import node_checks
from seatrial.operate import node_owners as owners
from seatrial.operate.node_checks import NodeResult, check_node
from seatrial.util import data_files
from tests.fakes.nvml import FakeGpu, FakeNvml, geforce, h200, memory, nvml_error, processes
from tests.processes import with_enough_time


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_NODE", "node3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def looked(
    monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu | Exception, expected: int | None = None, seconds: float = 60
) -> NodeResult:
    FakeNvml(*gpus).install(monkeypatch)
    return check_node(expected, None, "", time.monotonic() + seconds)


def failures(result: NodeResult) -> set[tuple[str, str]]:
    return {(verdict.metric, verdict.subject) for verdict in result.failures}


def test_a_good_node_passes_and_lists_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    result = looked(monkeypatch, h200(0), h200(1), expected=2)
    assert failures(result) == set()
    assert result.not_measured == {}
    assert {"host.inventory", "gpu.inventory"} <= set(result.seconds_by_check)
    assert not set(result.seconds_by_check) & set(result.not_applicable)
    assert {*result.seconds_by_check, *result.not_applicable} == {
        "host.inventory",
        "gpu.inventory",
        "gpu.model",
        "gpu.kernel_log",
        "fabric.node_ports",
    }


def test_checks_without_anything_to_measure_are_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    result = looked(monkeypatch)
    assert "no NVIDIA GPU" in result.not_applicable["gpu.inventory"]
    assert "gpu.model" in result.not_applicable
    assert "host.inventory" in result.seconds_by_check
    assert not set(result.seconds_by_check) & set(result.not_applicable)
    assert failures(result) == set()


def test_faults_are_those_of_the_checks_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = h200(1, nvmlDeviceGetRemappedRows=(0, 0, 1, 0))
    result = looked(monkeypatch, h200(0), bad, expected=4)
    assert failures(result) == {("gpus_missing", "node3"), ("repair_pending", "node3/gpu1")}
    assert all(verdict.fix for verdict in result.failures)


def test_another_model_than_expected_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(h200(0), geforce(1)).install(monkeypatch)
    result = check_node(2, "H200", "", time.monotonic() + 60)
    assert ("gpus_of_other_model", "node3") in failures(result)


def test_slurm_hides_the_gpus_of_other_jobs_from_a_prolog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    bad = h200(0, nvmlDeviceGetRemappedRows=(0, 0, 1, 0))
    assert failures(looked(monkeypatch, bad, h200(1), expected=2)) == set(), "not the GPU of this job"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert failures(looked(monkeypatch, bad, h200(1), expected=2)) == {("repair_pending", "node3/gpu0")}


def busy(index: int, pid: int) -> FakeGpu:
    return h200(
        index,
        nvmlDeviceGetComputeRunningProcesses_v3=processes((pid, 9 * 2**30)),
        nvmlDeviceGetMemoryInfo=memory(150754820096, used=9 * 2**30),
    )


@pytest.mark.parametrize("owner", ["job 57", "a pod", None])
def test_a_gpu_that_a_job_uses_is_not_judged(monkeypatch: pytest.MonkeyPatch, owner: str | None) -> None:
    monkeypatch.setattr(owners, "owner", lambda _pid, _own: owner)
    result = looked(monkeypatch, busy(0, 900), h200(1), expected=2)
    assert failures(result) == set()
    assert "memory_used_bytes" not in {verdict.metric for verdict in result.warnings}
    assert list(result.not_judged) == ["node3/gpu0"]
    assert (owner or "not visible here") in result.not_judged["node3/gpu0"]


def test_a_fault_of_a_gpu_in_use_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "owner", lambda _pid, _own: "job 57")
    used = busy(0, 900).with_answers(nvmlDeviceGetRemappedRows=(0, 0, 1, 0))
    assert failures(looked(monkeypatch, used, h200(1), expected=2)) == {("repair_pending", "node3/gpu0")}


def test_a_process_that_no_job_owns_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "owner", lambda pid, _own: "" if pid == 900 else "job 57")
    gpu = busy(0, 900).with_answers(nvmlDeviceGetComputeRunningProcesses_v3=processes((900, 1), (901, 1)))
    result = looked(monkeypatch, gpu, h200(1), expected=2)
    assert failures(result) == {("foreign_processes", "node3/gpu0")}
    assert result.not_judged == {}


def test_a_driver_that_hangs_is_not_measured_in_time_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(_context: Context, _options: Options) -> Iterator[Answer]:
        time.sleep(600)
        yield from ()

    checks = {**catalog(), "gpu.inventory": replace(catalog()["gpu.inventory"], measure=hang)}
    monkeypatch.setattr(node_checks, "catalog", lambda: checks)
    result = with_enough_time(
        lambda seconds: check_node(8, None, "", time.monotonic() + seconds),
        lambda result: "host.inventory" in result.seconds_by_check,
        6,
    )
    assert list(result.not_measured) == ["gpu.inventory"]
    assert "no result within" in result.not_measured["gpu.inventory"]
    assert "host.inventory" in result.seconds_by_check


def test_a_check_that_kills_its_process_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_context: Context, _options: Options) -> Iterator[Answer]:
        os.kill(os.getpid(), 9)
        yield from ()

    checks = {**catalog(), "host.inventory": replace(catalog()["host.inventory"], measure=die)}
    monkeypatch.setattr(node_checks, "catalog", lambda: checks)
    assert check_node(0, None, "", time.monotonic() + 60).not_measured == {"host.inventory": "its process ended"}


def test_a_reading_that_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [h200(index, nvmlDeviceGetRemappedRows=nvml_error("Unknown")) for index in range(2)]
    result = looked(monkeypatch, *gpus, expected=2)
    assert "gpu.inventory" in result.not_measured
    assert "gpu.inventory" not in result.seconds_by_check


def test_metrics_that_are_not_judged_exist() -> None:
    policy: dict[str, Any] = data_files.read("hooks.yaml")
    metrics = {metric for name in ("host.inventory", "gpu.inventory") for metric in catalog()[name].units}
    assert {*policy["not_of_a_job"], *policy["idle_gpu_only"]} <= metrics


def test_files_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert check_node(0, None, "", time.monotonic() + 60).not_measured == {}
