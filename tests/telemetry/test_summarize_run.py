"""The whole way, with a real job: samples beside it, one file, the summary in its record."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial import telemetry
from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Config, Telemetry
from seatrial.model import Job, Measurement
from seatrial.pipeline.plan import Devices, make_plan
from seatrial.telemetry.files import TELEMETRY_FILE
from tests.processes import Program, load
from tests.telemetry.test_files import HEADER, left

JOB = Job(
    name="nodes",
    placement="nodes",
    device="cpu",
    nodes=1,
    ranks_per_node=1,
    checks=("host.inventory",),
    options={},
    expected_gpus=None,
    limit_s=1,
    telemetry_hz=1.0,
)
LONG = Measurement(check="host.inventory", subject="n0", rank=0, started=100.0, seconds=60.0)
PHASES = {"host.inventory": "Environment"}
TRIAL = """
telemetry: {hz: 10}
checks:
  filesystem.speed: {options: {size: 64MiB, files: 1000}}
"""


def test_no_job_had_a_sampler(tmp_path: Path) -> None:
    assert telemetry.summarize_run(tmp_path, [JOB.model_copy(update={"telemetry_hz": 0})], [LONG], PHASES) is None


def test_a_sampler_that_died_leaves_its_last_words(tmp_path: Path) -> None:
    path = left(tmp_path / "jobs/nodes", HEADER, [101.0, 1.0, 80.1, 0])
    path.with_name("rank0.samples.err").write_text("Traceback\nOSError: [Errno 28] No space left on device\n")
    found = telemetry.summarize_run(tmp_path, [JOB], [LONG], PHASES)
    assert found
    assert found.files == (f"jobs/nodes/{TELEMETRY_FILE}",)
    assert found.warnings == (
        "n0: no telemetry for 59 s of its checks",
        "jobs/nodes/attempt1/rank0.samples.err: OSError: [Errno 28] No space left on device",
    )


def test_a_fleet_without_samplers_is_told_in_a_few_lines(tmp_path: Path) -> None:
    many = [LONG.model_copy(update={"subject": f"n{number}"}) for number in range(100)]
    found = telemetry.summarize_run(tmp_path, [JOB], many, PHASES)
    assert found
    assert len(found.warnings) == 9
    assert found.warnings[-1] == "and 92 more"


def test_a_disk_that_takes_no_more_costs_no_record(tmp_path: Path) -> None:
    left(tmp_path / "jobs/nodes", HEADER, [101.0, 1.0, 80.1, 0])
    (tmp_path / "jobs/nodes" / TELEMETRY_FILE).mkdir()  # in place of a full disk
    found = telemetry.summarize_run(tmp_path, [JOB], [], PHASES)
    assert found
    assert found.warnings == ("nodes: its telemetry could not be gathered: Is a directory",)


def test_a_real_job_is_sampled_to_its_end_and_not_after(tmp_path: Path) -> None:
    trial, out = tmp_path / "t.yaml", tmp_path / "run"
    trial.write_text(TRIAL)
    program = Program("run", trial, "--out", out)
    program.finish()
    assert program.left_behind() == []
    found = load(out).telemetry
    assert found
    assert found.warnings == ()
    assert found.files == ("jobs/ranks/telemetry.jsonl.gz",)
    with gzip.open(out / found.files[0]) as file:
        (host,) = [json.loads(line) for line in file]
    assert len(host["time"]) == len(host["cpu_util"]) >= 5
    assert host["unread"]["gpu"].startswith("NVML")
    (board,) = found.dashboards
    assert [span.check for span in board.spans] == ["filesystem.speed"]
    assert "CPU dashboard" in (out / "report.html").read_text()
    assert not list(out.glob("jobs/*/*/*.samples"))


@pytest.mark.parametrize(("enabled", "hz"), [(True, 0.5), (False, 0)])
def test_off_is_off(enabled: bool, hz: float) -> None:
    settings = Telemetry(hz=0.5, enabled=enabled)
    plan = make_plan(
        Config(name="t", checks={"host.inventory": CheckSettings()}, telemetry=settings), catalog(), Devices(0)
    )
    assert [job.telemetry_hz for job in plan.jobs] == [hz]


def test_a_job_without_telemetry_starts_no_sampler(tmp_path: Path) -> None:
    job = JOB.model_copy(update={"telemetry_hz": 0})
    (tmp_path / "jobs/nodes/attempt1").mkdir(parents=True)
    (tmp_path / "jobs/nodes/job.json").write_text(job.model_dump_json())
    worker = [sys.executable, "-m", "seatrial.worker", str(tmp_path / "jobs/nodes/job.json"), "1"]
    subprocess.run(worker, check=True, capture_output=True)
    assert {path.name for path in (tmp_path / "jobs/nodes/attempt1").iterdir()} == {"rank0.jsonl", "rank0.heartbeat.json"}
