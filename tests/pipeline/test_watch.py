"""The status of jobs by recorded output of Slurm 22.05, and by folders as trainings and runs write them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from string import Template

import pytest

from seatrial.discover.slurm import ControllerDown, SlurmUnavailable
from seatrial.model import SeatrialError, UsageError
from seatrial.model.job_status import GpuUse, JobStatus
from seatrial.pipeline import watch
from seatrial.pipeline.watch import Watcher
from seatrial.util.journal import record_line
from tests.fakes.slurm import FakeSlurm, Reply, recorded, success
from tests.paths import FIXTURES

RUNNING = (FIXTURES / "slurm-task/scontrol-show-job-details.txt").read_text()
BUSY = recorded("scontrol-show-jobs-busy.txt").out
USE = GpuUse(node="node0", gpu="gpu0", utilization=98)


class FakeStep:
    def read(self, wait_s: float = 0) -> tuple[tuple[GpuUse, ...], str]:
        del wait_s
        return (USE,), "1 of 2 nodes: no answer"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float]]:
    """The arguments of the srun steps that were started."""
    started: list[tuple[str, int, float]] = []

    @contextmanager
    def step(job_id: str, nodes: int, interval_s: float) -> Iterator[FakeStep]:
        started.append((job_id, nodes, interval_s))
        yield FakeStep()

    monkeypatch.setattr(watch, "gpu_use_step", step)
    return started


def status(target: str | Path, lines: int = 3) -> JobStatus:
    with Watcher(str(target), lines, 0) as watcher:
        return watcher.status()


def slurm(monkeypatch: pytest.MonkeyPatch, job_id: str, reply: str | Reply, **more: Reply) -> FakeSlurm:
    replies: Mapping[str, Reply] = {
        f"scontrol show job {job_id}": success(reply) if isinstance(reply, str) else reply,
        "scontrol show config": recorded("scontrol-show-config.txt"),
        **more,
    }
    return FakeSlurm(replies).install(monkeypatch)


def site(folder: Path, job_id: int = 1, name: str = "train_1gpu") -> tuple[Path, Path]:
    """The log and the results folder of a job script of `seatrial init`."""
    log, out = folder / "logs" / f"{name}-{job_id}.out", folder / "runs" / f"{name}-{job_id}"
    log.parent.mkdir()
    out.mkdir(parents=True)
    log.write_text(
        f"job {job_id} on node[0-1]: tiny/ddp, results in {out}\n" + "".join(f"line {n}\n" for n in range(9))
    )
    step = {"step": 7, "loss": 2.5, "tokens": 256, "seconds": 0.5}
    (out / "steps.jsonl").write_text(json.dumps(step) + "\n")
    (out / "config.json").write_text('{"max_steps": 30}')
    return log, out


def running(log: Path, command: str = "(null)") -> str:
    return RUNNING.replace("StdOut=/dev/null", f"StdOut={log}").replace("Command=(null)", f"Command={command}")


def test_a_running_job_of_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, int, float]]
) -> None:
    log, out = site(tmp_path)
    slurm(monkeypatch, "1", running(log))
    by_id, by_folder = status("1"), status(out)
    for read in (by_id, by_folder):
        assert (read.state, read.nodes, read.ended, read.time_limit_s) == ("RUNNING", ("node0", "node1"), False, 300)
        assert read.title == "job 1 wrap"
        assert read.gpus == (USE,)
        assert read.training
        assert (read.training.step, read.training.max_steps, read.training.tokens_per_second) == (7, 30, 512)
        assert (read.log, read.log_lines) == (str(log), ("line 6", "line 7", "line 8"))
        assert read.notes == ("GPU use: 1 of 2 nodes: no answer",)
    assert steps == [("1", 2, 0)] * 2


def test_a_refreshed_view_starts_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, int, float]]
) -> None:
    log, _ = site(tmp_path)
    slurm(monkeypatch, "1", running(log))
    with Watcher("1", 3, 5) as watcher:
        assert [watcher.status().gpus for _ in range(3)] == [(USE,)] * 3
    assert steps == [("1", 2, 5)]


def test_another_job_has_its_log_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, int, float]]
) -> None:
    log = tmp_path / "slurm-1.out"
    log.write_text("hello\n")
    slurm(monkeypatch, "1", running(log))
    read = status("1")
    assert (read.training, read.log_lines) == (None, ("hello",))
    log.write_text("DB_PASS=hunter2\nhello\n")
    assert status("1").log_lines == ("DB_PASS=REDACTED", "hello")
    log.unlink()
    assert status("1").notes[-1] == f"{log}: No such file or directory"


def job_text(job_id: str) -> str:
    (text,) = (f"JobId={job}" for job in BUSY.split("JobId=") if job.startswith(f"{job_id} "))
    return text


def test_a_pending_job_has_its_reason(monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, int, float]]) -> None:
    (job_id,) = (text.split()[0] for text in BUSY.split("JobId=") if "JobState=PENDING Reason=Resources" in text)
    slurm(monkeypatch, job_id, job_text(job_id))
    read = status(job_id)
    assert (read.state, read.reason, read.ended, read.log) == ("PENDING", "Resources", False, "")
    assert not steps


def test_an_ended_job(monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, int, float]]) -> None:
    slurm(monkeypatch, "2", job_text("2"))
    read = status("2")
    assert (read.state, read.ended, read.reason) == ("CANCELLED", True, "exit code 0, signal 15")
    assert not steps


def test_an_unknown_job(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch, "999", recorded("scontrol-show-job-unknown.txt"))
    with pytest.raises(UsageError, match=r"job 999: .*MinJobAge.*Run first: squeue --me; sacct --jobs 999"):
        status("999")


@pytest.mark.parametrize("target", ["", "12x", "-1", "job", "1 2", "/nowhere"])
def test_neither_job_nor_folder(target: str) -> None:
    with pytest.raises(UsageError, match="not a job ID"):
        Watcher(target or "nowhere", 1, 0).status()


@pytest.mark.parametrize("error", [SlurmUnavailable("no client"), ControllerDown("no answer")])
def test_without_slurm_a_job_id_is_an_error_and_a_folder_is_not(
    error: SeatrialError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out = site(tmp_path)
    slurm(monkeypatch, "1", error)
    with pytest.raises(type(error)):
        status("1")
    read = status(out)
    assert (read.state, read.notes) == ("training", (f"state and GPU use of job 1: {error}",))
    assert read.log_lines[-1] == "line 8"
    monkeypatch.setattr("seatrial.discover.slurm.installed", lambda: False)
    assert status(out).notes == ("state and GPU use of job 1: this machine has no Slurm client",)


def test_a_step_that_cannot_start_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = site(tmp_path)
    slurm(monkeypatch, "1", running(log))

    def start(*_arguments: object, **_options: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("seatrial.util.processes.start", start)
    read = status("1")
    assert (read.state, read.gpus) == ("RUNNING", ())
    assert read.notes[0].startswith("GPU use: srun: No such file")


def test_a_training_without_a_job(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    assert status(out).state == "no data yet"
    (out / "notes.txt").write_text("")
    with pytest.raises(UsageError, match="neither a run directory"):
        status(out)
    (out / "steps.jsonl").write_text('{"step": 2, "loss": 1.0, "tokens": 4, "seconds": 2.0}\n')
    assert (status(out).state, status(out).ended) == ("training", False)
    os.utime(out / "steps.jsonl", (1, 1))
    (out / "metrics.json").write_text("{}")
    assert (status(out).state, status(out).ended) == ("ended", True)


def test_a_training_that_was_killed_is_not_shown_as_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.discover.slurm.installed", lambda: False)
    log, out = site(tmp_path)
    assert status(out).state == "training"
    os.utime(out / "steps.jsonl", (time.time() - 100,) * 2)
    assert status(out).state in ("no step for 100 s", "no step for 101 s")
    log.write_text("step 7\nseatrial: interrupted; complete checkpoints in checkpoints/ remain\n")
    assert status(out).state == status(out, lines=0).state == "interrupted"
    slow = {"step": 7, "loss": 2.5, "tokens": 256, "seconds": 60}
    (out / "steps.jsonl").write_text(json.dumps(slow) + "\n")
    os.utime(out / "steps.jsonl", (time.time() - 100,) * 2)
    assert status(out).state == "training", "less than five steps of 60 s"


def run_directory(folder: Path, heartbeat_age_s: float = 0) -> Path:
    """A run directory whose rank 0 is in a check, and rank 1 has not started."""
    job = {
        **{"name": "ranks", "placement": "ranks", "device": "cuda", "nodes": 1, "ranks_per_node": 2},
        **{"checks": ["device.gemm"], "options": {}, "expected_gpus": 2, "limit_s": 60},
    }
    attempt = folder / "jobs" / "ranks" / "attempt1"
    attempt.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (attempt.parent / "job.json").write_text(json.dumps(job))
    heartbeat = {
        "pid": 1,
        "node": "n0",
        "status": "device.gemm",
        "progress": "fp8",
        "time": time.time() - heartbeat_age_s,
    }
    (attempt / "rank0.heartbeat.json").write_text(json.dumps(heartbeat))
    (attempt / "rank0.jsonl").write_text(record_line({"start": "device.gemm", "subject": "n0/gpu0"}))
    header = {
        "node": "n0",
        "hz": 1.0,
        "devices": {},
        "reasons": {},
        "columns": ["time", "gpu0.sm_util", "gpu0.power_w"],
    }
    (attempt / "rank0.samples").write_text(f"{json.dumps(header)}\n[{time.time() - 9}, 97.0, 650.5]\n")
    (attempt / "launcher.err").write_text("a\nb\n")
    return folder


def test_a_run_directory(tmp_path: Path) -> None:
    read = status(run_directory(tmp_path))
    assert (read.state, read.nodes, read.ranks) == ("job ranks, attempt1", ("n0",), {"device.gemm: fp8": 1})
    (use,) = read.gpus
    assert (use.node, use.gpu, use.utilization, use.power_w, use.memory_used_bytes) == ("n0", "gpu0", 97, 650.5, None)
    assert use.age_s == pytest.approx(9, abs=5)
    assert (read.log_lines, read.notes) == (("a", "b"), ())


def test_a_training_in_a_run_directory(tmp_path: Path) -> None:
    folder = run_directory(tmp_path) / "artifacts/train.fsdp/native"
    folder.mkdir(parents=True)
    (folder / "steps.jsonl").write_text('{"step": 5, "loss": 1.0, "tokens": 4, "seconds": 2.0}\n')
    speed = status(tmp_path).training
    assert speed
    assert (speed.step, speed.steps_per_second) == (5, 0.5)
    os.utime(folder / "steps.jsonl", (1, 1))
    assert status(tmp_path).training is None, "of an earlier check"


def test_silent_ranks_are_named(tmp_path: Path) -> None:
    assert "no heartbeat of 1 rank for 30 s" in status(run_directory(tmp_path, heartbeat_age_s=100)).notes


def test_a_run_directory_without_data_and_one_that_has_ended(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert (status(tmp_path).state, status(tmp_path).notes) == ("no data yet", ("no job has started yet",))
    run_directory(tmp_path)
    (tmp_path / "jobs/ranks/job.json").write_text("{")
    assert "no rank" not in " ".join(status(tmp_path).notes)
    assert status(tmp_path).gpus
    later = time.time() + 60
    (tmp_path / "trial.json").write_text("{}")
    os.utime(tmp_path / "trial.json", (later, later))
    assert (status(tmp_path).state, status(tmp_path).ended) == ("ended", True)


def test_a_job_script_that_calls_seatrial_run_shows_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, int, float]]
) -> None:
    """oumi.sbatch of `seatrial init`: its results are a run directory, and its log has a line of its own."""
    template = (Path(str(files("seatrial.launch"))) / "site/oumi.sbatch.j2").read_text()
    (line,) = [line for line in template.splitlines() if line.startswith('echo "job ')]
    out = run_directory(tmp_path / "runs/oumi-1")
    values = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node0", "out": str(out)}
    log = tmp_path / "oumi-1.out"
    log.write_text(Template(line[len('echo "') : -1]).substitute(values) + "\n")
    slurm(monkeypatch, "1", running(log))
    read = status("1")
    assert (read.target, read.state, read.ranks) == ("1", "RUNNING", {"device.gemm: fp8": 1})


def test_a_job_of_a_run_shows_its_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str, int, float]]
) -> None:
    run_directory(tmp_path)
    slurm(monkeypatch, "1", running(Path("/dev/null"), f"{tmp_path}/jobs/ranks/attempt1/job.sbatch"))
    read = status("1")
    assert (read.target, read.state, read.ranks) == ("1", "RUNNING", {"device.gemm: fp8": 1})
    assert not steps, "its telemetry has the use of its GPUs"
