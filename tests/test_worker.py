"""The worker: contexts, retries, error counters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.hardware.network_time import TcpNetwork
from seatrial.model import Measurement, SeatrialError
from seatrial.util.journal import read
from seatrial.worker import RankIdentity, _as_retry, _context, reversed_devices, run_checks, visible_gpus_of_children
from tests.launch.scripted import job


@pytest.mark.parametrize(
    ("visible", "count", "reversed_"),
    [
        (None, 4, "3,2,1,0"),
        ("0,1,2,3", 4, "3,2,1,0"),
        ("2,5,7", 2, "5,2"),
        ("GPU-a,GPU-b", 2, "GPU-b,GPU-a"),
        (None, 1, "0"),
        ("3", 1, "3"),
    ],
)
def test_reversed_order(visible: str | None, count: int, reversed_: str) -> None:
    assert reversed_devices(visible, count) == reversed_


@pytest.mark.parametrize(
    ("device", "ranks", "visible_gpus"),
    [
        ("cuda", 4, ["all", "own", "all", "all", "all"]),
        ("cuda", 1, ["own", "own", "own", "all", "all"]),
        ("cpu", 4, []),
    ],
)
def test_processes_that_import_before_the_first_check(device: str, ranks: int, visible_gpus: list[str]) -> None:
    spec = job("device.gemm", "train.fsdp", "train.throughput", "train.parity", ranks=ranks)
    assert visible_gpus_of_children(spec.model_copy(update={"device": device})) == visible_gpus


def test_retry_is_marked_and_has_its_own_artifacts(tmp_path: Path) -> None:
    folder = tmp_path / "jobs/nodes-retry"
    (folder / "attempt1").mkdir(parents=True)
    spec = job("host.inventory", ranks=1, placement="nodes").model_copy(update={"retry": 1})
    (folder / "job.json").write_text(spec.model_dump_json())
    subprocess.run([sys.executable, "-m", "seatrial.worker", folder / "job.json", "1"], check=True)
    measurement = read(folder / "attempt1/rank0.jsonl")[0][1]["measurement"]
    assert measurement["retry"] == 1
    assert measurement["facts"]["retry"] == "same device, new process"
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == ["host.inventory-retry"]


@pytest.mark.parametrize(
    ("check", "device", "ranks", "difference"),
    [
        ("collectives.all_reduce", "cuda", 8, "ranks assigned to the GPUs of each node in reverse order"),
        ("device.gemm", "cuda", 8, "same GPU, process of another rank"),
        ("device.gemm", "cuda", 1, "same device, new process"),
        ("collectives.all_reduce", "cpu", 2, "same ranks on the same devices"),
    ],
)
def test_retry_fact_states_the_difference(check: str, device: str, ranks: int, difference: str) -> None:
    spec = job(check, ranks=ranks).model_copy(update={"retry": True, "device": device})
    retried = _as_retry(Measurement(check=check, subject="n0"), catalog()[check], spec)
    assert str(retried.facts["retry"]).startswith(difference)


@pytest.mark.parametrize("world_size", ["1", "3"])
def test_a_process_of_another_world_size_than_its_job_measures_nothing(
    world_size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(SeatrialError, match=rf"WORLD_SIZE is {world_size}, but job nodes has 1 nodes with 2 processes"):
        run_checks(job("host.inventory", ranks=2, placement="nodes"), tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("device", "run"), [("cuda", "sound"), ("cuda", "broken"), ("cpu", "sound")])
def test_error_counters_are_read_around_gpu_checks(device: str, run: str, tmp_path: Path) -> None:
    folder = tmp_path / run / "jobs/gpu"
    (folder / "attempt1").mkdir(parents=True)
    names = ("device.gemm", "device.burn", "filesystem.speed")
    spec = job(*names, ranks=1).model_copy(update={"device": device})
    (folder / "job.json").write_text(spec.model_dump_json())
    driver = [sys.executable, "-m", "tests.worker_driver", str(folder / "job.json"), "1"]
    subprocess.run(driver, check=run == "sound", capture_output=True)
    records = read(folder / "attempt1/rank0.jsonl")[0]
    measurements = [Measurement.model_validate(record["measurement"]) for record in records if "measurement" in record]
    assert [bool(measurement.error) for measurement in measurements] == [run == "broken"] * 3
    counters = {measurement.check: measurement.facts.get("error_counters") for measurement in measurements}
    increased = {"gpu1": {"ecc_corrected": [0, 1], "ecc_uncorrected": [0, 1]}}
    if device == "cpu":
        assert set(counters.values()) == {None}
        return
    fact: Any = counters["device.gemm"]
    assert fact["increased"].items() >= increased.items()  # RDMA ports of this host may add more
    assert fact["counters_read"] >= 12
    assert (counters["device.burn"], counters["filesystem.speed"]) == (None, None)
    values = {metric.name: (metric.value, metric.subject.partition("/")[2]) for metric in measurements[0].metrics}
    assert values["new_errors.ecc_uncorrected"] == (1, "gpu1")


def test_context_has_the_options_of_all_checks(tmp_path: Path) -> None:
    options = {"collectives.transport": {}, "collectives.all_reduce": {"dtype": "bfloat16"}}
    spec = job("collectives.transport", "collectives.all_reduce").model_copy(update={"options": options})
    context = _context(
        catalog()["collectives.transport"], spec, RankIdentity(0, 2, 0), tmp_path, "cuda:0", 0, lambda _text: None
    )
    assert context.options_by_check == options


def test_context_has_the_tcp_network_of_the_nodes_that_are_there(tmp_path: Path) -> None:
    def network(nodes: int, gbps: float | None) -> TcpNetwork | None:
        changes: dict[str, Any] = {
            "nodes": nodes,
            "ranks_per_node": 8,
            "network_gbps": gbps,
            "options": {"device.gemm": {}},
        }
        spec = job("device.gemm").model_copy(update=changes)
        rank = RankIdentity(0, 2, 0)
        return _context(catalog()["device.gemm"], spec, rank, tmp_path, "cuda:0", 0, lambda _text: None).tcp_network

    assert network(3, 10.0) == TcpNetwork(3, 8, 10)
    assert network(1, 10.0) is None
    assert network(3, None) is None
