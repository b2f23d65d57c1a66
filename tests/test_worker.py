"""What a worker makes of its job before and after it measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks import catalog
from seatrial.model import Measurement
from seatrial.util.journal import read
from seatrial.worker import Identity, _as_retry, _context, reversed_order
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
def test_the_same_gpus_in_reverse_order(visible: str | None, count: int, reversed_: str) -> None:
    assert reversed_order(visible, count) == reversed_


def test_a_second_measurement_says_so_and_writes_nothing_over(tmp_path: Path) -> None:
    folder = tmp_path / "jobs/nodes-retry"
    (folder / "attempt1").mkdir(parents=True)
    one = job("host.inventory", ranks=1, placement="nodes").model_copy(update={"retry": True})
    (folder / "job.json").write_text(one.model_dump_json())
    subprocess.run([sys.executable, "-m", "seatrial.worker", folder / "job.json", "1"], check=True)
    measurement = read(folder / "attempt1/rank0.jsonl")[0][1]["measurement"]
    assert measurement["retry"] is True
    assert measurement["facts"]["retry"] == "same device, new process"
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == ["host.inventory-retry"]


@pytest.mark.parametrize(
    ("check", "device", "ranks", "words"),
    [
        ("collectives.all_reduce", "cuda", 8, "ranks in reverse order"),
        ("device.gemm", "cuda", 8, "same GPU, process of another rank"),
        ("device.gemm", "cuda", 1, "same device, new process"),
        ("collectives.all_reduce", "cpu", 2, "same ranks on the same devices"),
    ],
)
def test_what_was_different_is_said_as_it_is(check: str, device: str, ranks: int, words: str) -> None:
    one = job(check, ranks=ranks).model_copy(update={"retry": True, "device": device})
    retried = _as_retry(Measurement(check=check, subject="n0"), catalog()[check], one)
    assert str(retried.facts["retry"]).startswith(words)


@pytest.mark.parametrize(("device", "run"), [("cuda", "sound"), ("cuda", "broken"), ("cpu", "sound")])
def test_error_counters_are_read_around_every_check_on_a_gpu(device: str, run: str, tmp_path: Path) -> None:
    folder = tmp_path / run / "jobs/gpu"
    (folder / "attempt1").mkdir(parents=True)
    names = ("device.gemm", "device.burn", "filesystem.speed")
    one = job(*names, ranks=1).model_copy(update={"device": device})
    (folder / "job.json").write_text(one.model_dump_json())
    driver = [sys.executable, "-m", "tests.worker_driver", str(folder / "job.json"), "1"]
    subprocess.run(driver, check=run == "sound", capture_output=True)
    records = read(folder / "attempt1/rank0.jsonl")[0]
    found = [Measurement.model_validate(one["measurement"]) for one in records if "measurement" in one]
    assert [bool(one.error) for one in found] == [run == "broken"] * 3
    counted = {one.check: one.facts.get("error_counters") for one in found}
    grew = {"gpu1": {"ecc_corrected": [0, 1], "ecc_uncorrected": [0, 1]}}
    if device == "cpu":
        assert set(counted.values()) == {None}
        return
    fact: Any = counted["device.gemm"]
    assert fact["increased"].items() >= grew.items()  # beside what RDMA ports of this machine may count
    assert fact["read"] >= 12
    assert (counted["device.burn"], counted["filesystem.speed"]) == (None, None)
    values = {metric.name: (metric.value, metric.subject.partition("/")[2]) for metric in found[0].metrics}
    assert values["new_errors.ecc_uncorrected"] == (1, "gpu1")


def test_a_check_knows_what_the_others_of_its_job_will_measure(tmp_path: Path) -> None:
    options = {"collectives.transport": {}, "collectives.all_reduce": {"dtype": "bfloat16"}}
    one = job("collectives.transport", "collectives.all_reduce").model_copy(update={"options": options})
    context = _context(
        catalog()["collectives.transport"], one, Identity(0, 2, 0), tmp_path, "cuda:0", 0, lambda _text: None
    )
    assert context.options_by_check == options
