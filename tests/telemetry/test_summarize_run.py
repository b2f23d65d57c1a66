"""Telemetry of a run, also with a real job: samples, merged file, summary in the record."""

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
from seatrial.pipeline.plan import NodeGpus, make_plan
from seatrial.telemetry.files import TELEMETRY_FILE
from tests.processes import Program, load
from tests.telemetry.test_files import HEADER, write_samples

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
cluster: {gpus_per_node: 0}
telemetry: {hz: 10}
checks:
  filesystem.speed: {options: {size: 64MiB, files: 1000}}
"""


def test_no_summary_without_sampled_jobs(tmp_path: Path) -> None:
    assert telemetry.summarize_run(tmp_path, [JOB.model_copy(update={"telemetry_hz": 0})], [LONG], PHASES) is None


def test_gap_is_reported_with_the_samplers_last_error(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "jobs/nodes", HEADER, [101.0, 1.0, 80.1, 0])
    path.with_name("rank0.samples.err").write_text("Traceback\nOSError: [Errno 28] No space left on device\n")
    summary = telemetry.summarize_run(tmp_path, [JOB], [LONG], PHASES)
    assert summary
    assert summary.files == (f"jobs/nodes/{TELEMETRY_FILE}",)
    gap, error = summary.warnings
    assert gap.startswith("n0: ")
    assert "59 s" in gap
    assert error == "jobs/nodes/attempt1/rank0.samples.err: OSError: [Errno 28] No space left on device"


def test_many_gaps_are_reported_in_a_few_lines(tmp_path: Path) -> None:
    many = [LONG.model_copy(update={"subject": f"n{number}"}) for number in range(100)]
    summary = telemetry.summarize_run(tmp_path, [JOB], many, PHASES)
    assert summary
    assert len(summary.warnings) == 9
    assert summary.warnings[-1] == "and 92 more messages about missing samples"


def test_unwritable_folder_is_reported_without_failing(tmp_path: Path) -> None:
    write_samples(tmp_path / "jobs/nodes", HEADER, [101.0, 1.0, 80.1, 0])
    (tmp_path / "jobs/nodes" / TELEMETRY_FILE).mkdir()  # fails like a full disk
    summary = telemetry.summarize_run(tmp_path, [JOB], [], PHASES)
    assert summary
    (warning,) = summary.warnings
    assert warning.startswith("nodes: ")
    assert warning.endswith("Is a directory")


def test_real_job_is_sampled_until_its_end(tmp_path: Path) -> None:
    trial, out = tmp_path / "t.yaml", tmp_path / "run"
    trial.write_text(TRIAL)
    program = Program("run", trial, "--out", out)
    program.finish()
    assert program.left_behind() == []
    summary = load(out).telemetry
    assert summary
    assert summary.warnings == ()
    assert summary.files == ("jobs/ranks/telemetry.jsonl.gz",)
    with gzip.open(out / summary.files[0]) as file:
        (host,) = [json.loads(line) for line in file]
    assert len(host["time"]) == len(host["cpu_util"]) >= 2
    assert host["unreadable"]["gpu"].startswith("NVML")
    (board,) = summary.dashboards
    assert [span.check for span in board.spans] == ["filesystem.speed"]
    assert "CPU dashboard" in (out / "report.html").read_text()
    assert not list(out.glob("jobs/*/*/*.samples"))


@pytest.mark.parametrize(("enabled", "hz"), [(True, 0.5), (False, 0)])
def test_telemetry_setting_determines_the_sample_rate(enabled: bool, hz: float) -> None:
    settings = Telemetry(hz=0.5, enabled=enabled)
    plan = make_plan(
        Config(name="t", checks={"host.inventory": CheckSettings()}, telemetry=settings), catalog(), NodeGpus(0)
    )
    assert [job.telemetry_hz for job in plan.jobs] == [hz]


def test_job_without_telemetry_starts_no_sampler(tmp_path: Path) -> None:
    job = JOB.model_copy(update={"telemetry_hz": 0})
    (tmp_path / "jobs/nodes/attempt1").mkdir(parents=True)
    (tmp_path / "jobs/nodes/job.json").write_text(job.model_dump_json())
    worker = [sys.executable, "-m", "seatrial.worker", str(tmp_path / "jobs/nodes/job.json"), "1"]
    subprocess.run(worker, check=True, capture_output=True)
    assert {path.name for path in (tmp_path / "jobs/nodes/attempt1").iterdir()} == {
        "rank0.jsonl",
        "rank0.heartbeat.json",
        "stacks",
    }
