"""Killed and failing ranks in real runs: root cause, remaining checks, no processes left.

Stopped ranks: test_hang.py and checks/faults/test_train_failure.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from seatrial.checks import catalog
from seatrial.config.schema import Limits
from seatrial.launch.local import LocalLauncher
from seatrial.launch.watch import run_job
from seatrial.model import DecisionValue, JobState, Outcome
from seatrial.pipeline.rejudge import rejudge
from seatrial.worker import TERMINATING
from tests.launch.scripted import NO_CHECKS, RecordingListener, job
from tests.processes import CPU_ONLY, Program, alive, call, heartbeats, load, ranks_in_check, until

CHECK = "collectives.all_reduce"
# heartbeat_timeout_s: on a busy host torchrun takes seconds to end after its ranks; see SHORT_TIMEOUT
TRIAL = """
cluster: {gpus_per_node: 0}
telemetry: {enabled: false}
limits: {heartbeat_timeout_s: 20}
checks:
  host.inventory:
  collectives.all_reduce: {options: {sizes: [10MiB], min_seconds_per_size: 2}}
  nodes.reachable:
"""
SHORT_TIMEOUT = ("--set", "limits.heartbeat_timeout_s=6")  # for tests that wait for a missing heartbeat
SAMPLED = ("--set", "telemetry.enabled=true")  # for tests whose samplers must end too


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    path = tmp_path / "crash.yaml"
    path.write_text(TRIAL)
    return path


@dataclass(frozen=True)
class KilledRank:
    """A finished run whose rank 1 was killed in CHECK."""

    out: Path
    code: int
    output: str
    remaining_pids: list[int]


@pytest.fixture(scope="module")
def killed_rank(tmp_path_factory: pytest.TempPathFactory) -> KilledRank:
    folder = tmp_path_factory.mktemp("killed_rank")
    (folder / "crash.yaml").write_text(TRIAL)
    return KilledRank(folder / "run", *run_with_signal(signal.SIGKILL, folder / "crash.yaml", folder / "run"))


@pytest.fixture
def one_check_trial(trial: Path) -> Path:
    """The trial with CHECK only."""
    trial.write_text("\n".join(line for line in TRIAL.splitlines() if line[:2] != "  " or CHECK in line))
    return trial


def run_with_signal(
    number: int, trial: Path, out: Path, *options: str, check: str = CHECK
) -> tuple[int, str, list[int]]:
    """Run the trial and send a signal to rank 1 during ``check``; return exit code, output and remaining pids."""
    program = Program("run", trial, "--out", out, *options)
    pid = until(lambda: ranks_in_check(out, "ranks", check, 2))[1]["pid"]
    os.kill(pid, number)
    code, output, _ = program.finish()
    return code, output, program.left_behind()


@pytest.mark.training
def test_killed_rank_is_the_cause_and_other_checks_run_again(killed_rank: KilledRank) -> None:
    assert (killed_rank.code, killed_rank.remaining_pids) == (3, [])
    record = load(killed_rank.out)
    assert record.decision.value is DecisionValue.INCOMPLETE
    (error,) = [verdict for verdict in record.verdicts if verdict.outcome is Outcome.ERROR]
    assert error.check == CHECK
    assert error.subject.endswith("/rank1")
    assert "rank 1 (" in error.message
    assert "killed by SIGKILL" in error.message
    assert "killed by SIGKILL" in killed_rank.output
    assert [(result.job, result.state) for result in record.results] == [
        ("nodes", JobState.COMPLETED),
        ("ranks", JobState.FAILED),
        ("ranks", JobState.COMPLETED),
    ]
    verdicts = rejudge(record).verdicts
    assert {verdict.outcome for verdict in verdicts if verdict.check == "nodes.reachable"} == {Outcome.PASS}


@pytest.mark.training
def test_resume_measures_only_the_check_whose_rank_was_killed(killed_rank: KilledRank) -> None:
    out, record = killed_rank.out, load(killed_rank.out)
    code, _, err = call("run", "--resume", out)
    assert code == 0, err
    again = load(out)
    assert again.decision.value is DecisionValue.ACCEPTED
    before = {measurement.started for measurement in record.measurements if not measurement.error}
    kept = [measurement.check for measurement in again.measurements if measurement.started in before]
    assert sorted(kept) == ["host.inventory", "nodes.reachable", "nodes.reachable"], "measured once"
    assert [session.command[1] for session in again.sessions] == ["run", "run"]
    assert again.seconds > record.seconds, "the time of both sessions counts"
    assert [job.name for job in again.jobs] == [job.name for job in record.jobs]
    logs = [path.read_text() for path in (out / "jobs" / "ranks").glob("attempt*/launcher.err")]
    assert logs
    assert not any("OMP_NUM_THREADS" in log for log in logs), "torchrun warns unless the script has set it"


@pytest.mark.training
def test_rank_killed_in_a_gpu_check_fails_the_check_on_all_ranks(trial: Path, tmp_path: Path) -> None:
    trial.write_text(CPU_ONLY + "checks: {train.cnn: {options: {epochs: 500}}, nodes.reachable: }")
    out = tmp_path / "run"
    code, _, remaining_pids = run_with_signal(signal.SIGKILL, trial, out, check="train.cnn")
    assert (code, remaining_pids) == (3, [])
    record = load(out)
    errors = {
        measurement.subject.partition("/")[2]: measurement.error or ""
        for measurement in record.measurements
        if measurement.error
    }
    assert set(errors) == {"rank0", "rank1"}
    assert all(
        "rank 1 (" in error and "killed by SIGKILL; last status: train.cnn" in error for error in errors.values()
    )
    assert [measurement.check for measurement in record.measurements if not measurement.error] == [
        "nodes.reachable"
    ] * 2


@pytest.mark.training
def test_ranks_of_a_killed_seatrial_end_and_resume_measures_the_rest(trial: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    program = Program("run", trial, "--out", out, *SAMPLED)
    until(lambda: ranks_in_check(out, "ranks", CHECK, 2))
    program.process.send_signal(signal.SIGKILL)
    assert program.finish()[0] == -signal.SIGKILL
    until(lambda: not program.left_behind())
    assert not (out / "trial.json").exists()
    before = (out / "measurements.jsonl").read_text()
    assert CHECK not in before

    code, _, err = call("run", "--resume", out)
    assert code == 0, err
    assert (out / "measurements.jsonl").read_text().startswith(before), "complete measurements are kept"
    record = load(out)
    assert record.decision.value is DecisionValue.ACCEPTED
    assert sorted(measurement.check for measurement in record.measurements) == [
        *[CHECK] * 2,
        "host.inventory",
        *["nodes.reachable"] * 2,
    ]


@pytest.mark.training
def test_limit_s_of_a_check_ends_its_ranks(trial: Path, tmp_path: Path) -> None:
    trial.write_text(trial.read_text().replace("min_seconds_per_size: 2}", "min_seconds_per_size: 600}, limit_s: 2"))
    out = tmp_path / "run"
    program = Program("run", trial, "--out", out)
    code, _, _ = program.finish()
    assert (code, program.left_behind()) == (3, [])
    record = load(out)
    (result,) = [result for result in record.results if result.state is JobState.TIMEOUT]
    assert result.job == "ranks"
    assert CHECK in result.cause
    assert {verdict.check for verdict in record.verdicts if verdict.outcome is Outcome.ERROR} == {CHECK}
    assert {measurement.check for measurement in record.measurements if not measurement.error} == {
        "host.inventory",
        "nodes.reachable",
    }


@pytest.mark.training
def test_stopped_torchrun_is_detected_after_its_ranks_end(one_check_trial: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    program = Program("run", one_check_trial, "--out", out, *SHORT_TIMEOUT)
    rank = until(lambda: ranks_in_check(out, "ranks", CHECK, 2))[0]["pid"]
    os.kill(psutil.Process(rank).ppid(), signal.SIGSTOP)
    code, _, _ = program.finish()
    assert (code, program.left_behind()) == (3, [])
    record = load(out)
    assert record.results[-1].state is JobState.HUNG
    assert "all ranks ended" in record.results[-1].cause
    assert record.decision.value is DecisionValue.INCOMPLETE, "although all checks were measured"


def test_ranks_that_do_not_start_in_time_end_the_job(trial: Path, tmp_path: Path) -> None:
    """The time limit of a check ends real ranks in test_hang.py."""
    out = tmp_path / "run"
    program = Program("run", trial, "--only", CHECK, "--set", "limits.startup_s=0.5", "--out", out)
    code, _, _ = program.finish()
    assert (code, program.left_behind()) == (3, [])
    record = load(out)
    assert [result.state for result in record.results] == [JobState.TIMEOUT]
    assert "2 of 2 ranks did not start within 0.5 s" in record.results[0].cause
    assert [verdict.outcome for verdict in record.verdicts if verdict.check == CHECK] == [Outcome.ERROR]


def test_ctrl_c_ends_all_processes_and_writes_reports(trial: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    program = Program("run", trial, "--out", out, *SAMPLED)
    until(lambda: ranks_in_check(out, "ranks", CHECK, 2))
    program.process.send_signal(signal.SIGINT)
    code, output, _ = program.finish()
    assert code == 130
    assert program.left_behind() == []
    record = load(out)
    assert record.decision.value is DecisionValue.INCOMPLETE
    assert "interrupted" in record.decision.reason
    assert "interrupted" in output
    assert [measurement.check for measurement in record.measurements] == ["host.inventory"]


@pytest.mark.training
def test_ranks_end_with_torchrun(one_check_trial: Path, tmp_path: Path) -> None:
    """torchrun is killed while seatrial is stopped and cannot end the ranks."""
    out = tmp_path / "run"
    program = Program("run", one_check_trial, "--out", out, *SAMPLED)
    ranks = [heartbeat["pid"] for heartbeat in until(lambda: ranks_in_check(out, "ranks", CHECK, 2))]
    agent = psutil.Process(ranks[0]).ppid()
    program.process.send_signal(signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in ranks))
    assert {heartbeat["status"] for heartbeat in heartbeats(out, "ranks")} == {TERMINATING}
    program.process.send_signal(signal.SIGCONT)
    assert program.finish()[0] == 3
    assert program.left_behind() == []


def test_worker_ended_by_sigterm_is_the_cause(tmp_path: Path) -> None:
    """A worker handles SIGTERM; the records of ranks that torchrun starts are in test_root_cause.py."""
    trial, out = tmp_path / "sigterm.yaml", tmp_path / "run"
    trial.write_text(CPU_ONLY + "telemetry: {enabled: false}\nchecks: {host.speed: {options: {seconds: 60}}}\n")
    program = Program("run", trial, "--out", out)
    (worker,) = until(lambda: ranks_in_check(out, "nodes", "host.speed", 1))
    os.kill(worker["pid"], signal.SIGTERM)
    code, output, _ = program.finish()
    assert (code, program.left_behind()) == (3, [])
    (result,) = load(out).results
    assert result.state is JobState.FAILED
    assert "terminated by SIGTERM from outside; last status: host.speed" in result.cause
    assert "terminated by SIGTERM from outside" in output
    assert [heartbeat["status"] for heartbeat in heartbeats(out, "nodes")] == [TERMINATING]


def test_rank_orphaned_before_its_start_exits(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "ranks" / "attempt1").mkdir(parents=True)
    (tmp_path / "jobs" / "ranks" / "job.json").write_text(job(CHECK).model_dump_json())
    command = [sys.executable, "-m", "seatrial.worker", str(tmp_path / "jobs" / "ranks" / "job.json"), "1"]
    environment = {**os.environ, "SEATRIAL_JOB_TAG": "of a torchrun that is gone"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, "torchrun exited before this rank started" in result.stderr) == (1, True), result.stderr
    assert not list(tmp_path.rglob("rank0*"))


def test_environment_of_other_jobs_is_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of torchrun and a folder named seatrial in the current directory."""
    (tmp_path / "cwd" / "seatrial").mkdir(parents=True)
    (tmp_path / "cwd" / "seatrial" / "__init__.py").write_text("raise SystemExit('not the package')")
    monkeypatch.chdir(tmp_path / "cwd")
    variables = {"PET_NNODES": "2", "PET_NO_PYTHON": "1", "PET_RUN_PATH": "1", "RANK": "3", "WORLD_SIZE": "9"}
    variables |= {"LOCAL_RANK": "2", "MASTER_ADDR": "10.255.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    listener = RecordingListener()
    for spec in (job("nodes.reachable"), job("host.inventory", ranks=1, placement="nodes")):
        (result,) = run_job(LocalLauncher(NO_CHECKS), spec, tmp_path / "run", Limits(startup_s=60), catalog(), listener)
        assert (result.state, result.cause) == (JobState.COMPLETED, "")
    assert [measurement.error for measurement in listener.measurements] == [None] * 3
