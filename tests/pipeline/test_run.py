"""The pipeline in this process: retries, resume, interruptions and unwritable records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from seatrial import report
from seatrial.config.schema import CheckSettings, Cluster, Config
from seatrial.launch.base import RenderedJob
from seatrial.launch.local import LocalJob
from seatrial.model import BasisKind, DecisionValue, Job, JobState, Measurement, Outcome, Reason, Retry, Trial, Verdict
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.results import TrialResults
from seatrial.pipeline.run import INTERRUPTED, run
from seatrial.pipeline.run_directory import RunDir, load_trial
from seatrial.report import junit
from tests import processes
from tests.launch.scripted import HEAD, Scripted, clock_file
from tests.pipeline.fixtures import SilentDisplay, request
from tests.processes import Program, ranks_in_check, until


def test_ctrl_c_while_writing_reports_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all = report.write_all

    def interrupted(trial: Trial, run_dir: Path) -> list[Path]:
        os.kill(os.getpid(), signal.SIGINT)
        return write_all(trial, run_dir)

    monkeypatch.setattr(report, "write_all", interrupted)
    trial = run(RunDir.create(tmp_path / "out", request()), SilentDisplay())
    assert (trial.decision.value, trial.stop_reason) == (DecisionValue.ACCEPTED, "")
    assert rejudge(load_trial(tmp_path / "out")).verdicts == trial.verdicts
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_ctrl_c_while_measuring_writes_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: TrialResults, measurement: Measurement) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrialResults, "add_measurement", interrupt)
    trial = run(RunDir.create(tmp_path / "out", request()), SilentDisplay())
    assert (trial.decision.value, trial.stop_reason) == (DecisionValue.INCOMPLETE, INTERRUPTED)
    assert (tmp_path / "out/report.html").exists()


def test_a_report_that_cannot_be_rendered_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(trial: Trial) -> str:
        raise ZeroDivisionError(trial.name)

    monkeypatch.setattr(junit, "render", fail)
    trial = run(RunDir.create(tmp_path / "out", request()), SilentDisplay())
    assert trial.decision.value is DecisionValue.INCOMPLETE
    assert "junit.xml (ZeroDivisionError" in trial.decision.reason
    assert load_trial(tmp_path / "out").sessions == trial.sessions


@pytest.mark.parametrize(("expect", "decision"), [(0, DecisionValue.INCOMPLETE), (10**9, DecisionValue.REJECTED)])
def test_unwritable_record_is_never_accepted(tmp_path: Path, expect: int, decision: DecisionValue) -> None:
    settings = {"expect": {"nofile_soft": f">= {expect} files"}}
    config = Config(name="t", checks={"host.inventory": CheckSettings.model_validate(settings)})
    run_dir = RunDir.create(tmp_path / "out", request().model_copy(update={"config": config}))
    (tmp_path / "out/report.html").mkdir()
    trial = run(run_dir, SilentDisplay())
    assert trial.decision.value is decision
    written = Trial.model_validate_json((tmp_path / "out/trial.json").read_text())
    assert written.decision == trial.decision


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_refused_job_stops_the_run(is_interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancel = LocalJob.cancel

    def interrupted_cancel(self: LocalJob, *, node_lost: bool = False) -> str:
        monkeypatch.setattr(LocalJob, "cancel", cancel)
        raise KeyboardInterrupt

    if is_interrupted:
        monkeypatch.setattr(LocalJob, "cancel", interrupted_cancel)
    refused = "print('preflight: n0: no torch. Run first: ls', file=sys.stderr); sys.exit(1)"
    trial, _ = run_scripts(monkeypatch, speed_trial(tmp_path / "out"), ranks=refused)
    assert [(result.state, result.failed_subject) for result in trial.results] == [(JobState.REFUSED, "n0")]
    assert (trial.stop_reason == INTERRUPTED) is is_interrupted
    assert trial.decision.value is DecisionValue.INCOMPLETE


SPEED, METRIC = "filesystem.speed", "write_single.run_directory"
BROKEN = "sys.exit(3)\n"


def speed(gb_s: float, ranks: tuple[int, ...] = (0, 1), retry: int = 0, seconds: float = 0) -> str:
    """Return a script in which these ranks measure METRIC."""
    metrics = [
        {"name": METRIC, "value": gb_s, "unit": "GB/s", "subject": "cluster"},
        {"name": METRIC.replace("write", "read"), "value": 1, "unit": "GB/s", "subject": "cluster"},
        {"name": "paths_failed", "value": 0, "unit": "paths", "subject": "cluster"},
    ]
    return f"""
for rank in {ranks}:
    start(rank, "{SPEED}")
    fields = {{"check": "{SPEED}", "subject": f"n0/rank{{rank}}", "rank": rank, "retry": {retry}, "seconds": {seconds}}}
    write(rank, measurement=fields | {{"started": time.time(), "metrics": {metrics} if rank == 0 else []}})
    done(rank)
"""


class ScriptLauncher(Scripted):
    """Runs a script per job name; raises KeyboardInterrupt after the job ``stopped_job``."""

    def __init__(self, scripts: Mapping[str, str], stopped_job: str = "") -> None:
        super().__init__()
        self._by_job, self._stopped_job = scripts, stopped_job

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        folder = run_dir / "jobs" / job.name / f"attempt{attempt}"
        argv = (sys.executable, "-c", HEAD + self._by_job[job.name], str(folder), str(clock_file(run_dir)))
        return RenderedJob(argv=argv, text=job.name)

    def start(self, rendered: RenderedJob, folder: Path) -> LocalJob:
        if rendered.text == self._stopped_job:
            subprocess.run(rendered.argv, check=True)
            raise KeyboardInterrupt
        return super().start(rendered, folder)


def speed_trial(out: Path, retry: bool = True) -> RunDir:
    settings = CheckSettings.model_validate({"expect": {METRIC: "> 1 GB/s"}})
    config = Config(name="t", retry=retry, cluster=Cluster(gpus_per_node=0), checks={SPEED: settings})
    return RunDir.create(out, request().model_copy(update={"config": config}))


def run_scripts(
    monkeypatch: pytest.MonkeyPatch, run_dir: RunDir, *, stopped_job: str = "", **scripts: str
) -> tuple[Trial, SilentDisplay]:
    display = SilentDisplay()
    launcher = ScriptLauncher({name.replace("_", "-"): text for name, text in scripts.items()}, stopped_job)
    with monkeypatch.context() as patch:
        patch.setattr("seatrial.pipeline.run.select_launcher", lambda settings, placement: launcher)
        trial = run(run_dir, display)
    os.close(run_dir._journal.fileno())  # releases the lock
    return trial, display


def metric_verdict(trial: Trial) -> Verdict:
    """The verdict on the threshold of the trial; a rule of the check judges the metric too."""
    (verdict,) = [
        verdict
        for verdict in trial.verdicts
        if verdict.metric == METRIC and verdict.basis and verdict.basis.kind is BasisKind.TRIAL
    ]
    return verdict


def test_not_reproduced_failure_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = speed_trial(tmp_path / "out")
    trial, display = run_scripts(
        monkeypatch, run_dir, ranks=speed(0.5, seconds=1000), ranks_retry=speed(2), ranks_retry2=speed(3)
    )
    assert (trial.decision.value, metric_verdict(trial).outcome) == (DecisionValue.ACCEPTED, Outcome.WARN)
    assert display.retry_reasons == {"ranks-retry2": f"{METRIC} is 0.5 GB/s, expected > 1 GB/s"}
    assert [result.job for result in trial.results] == ["ranks", "ranks-retry", "ranks-retry2"]
    assert [job.name for job in trial.jobs] == ["ranks"]
    assert [
        [measurement.metrics[0].value for measurement in each if measurement.metrics]
        for each in (trial.measurements, trial.retries)
    ] == [
        [0.5],
        [2, 3],
    ]
    took = {timing.name: timing.seconds for timing in trial.timings}
    assert (took[SPEED], took[f"{SPEED} (retry)"]) == (1000, 0)
    assert took["start and end of the job 'ranks-retry'"] > 0
    overhead = sum(timing.seconds for timing in trial.timings if timing.kind == "overhead")
    assert took["report"] <= overhead <= trial.seconds == sum(session.seconds for session in trial.sessions)
    recorded = [item for item in load_trial(run_dir.path).verdicts if item.retry]
    assert [(item.reasons, item.retry) for item in recorded] == [
        ((Reason.THRESHOLD_VIOLATED, Reason.NOT_REPRODUCED), Retry(0.5, 2, third_value=3))
    ]
    for name in ("report.html", "junit.xml"):
        assert "not reproduced (0.5 GB/s, then 2 GB/s, then 3 GB/s)" in (run_dir.path / name).read_text(), name
    figures = [line for line in (run_dir.path / "metrics.prom").read_text().splitlines() if METRIC in line]
    figures = [line for line in figures if not line.startswith("seatrial_headline")]
    assert [line.partition("{")[0] for line in figures] == ["seatrial_measured_bytes_per_second"]


def test_reproduced_failure_is_rejected_and_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = speed_trial(tmp_path / "out")
    trial, _ = run_scripts(monkeypatch, run_dir, ranks=speed(0.5), ranks_retry=speed(0.4))
    assert trial.decision.value is DecisionValue.REJECTED
    assert metric_verdict(trial).retry == Retry(0.5, 0.4)
    assert Reason.REPRODUCED in metric_verdict(trial).reasons
    assert rejudge(trial).verdicts == trial.verdicts
    resumed, display = run_scripts(monkeypatch, RunDir.reopen(run_dir.path))
    assert (resumed.verdicts, resumed.retries) == (trial.verdicts, trial.retries)
    assert (len(resumed.results), display.retry_reasons) == (2, {})


def test_failed_retry_keeps_the_failure_and_is_repeated_by_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = speed_trial(tmp_path / "out")
    trial, _ = run_scripts(monkeypatch, run_dir, ranks=speed(0.5), ranks_retry=BROKEN)
    assert (trial.decision.value, metric_verdict(trial).outcome) == (DecisionValue.REJECTED, Outcome.FAIL)
    assert Reason.NOT_RETRIED in metric_verdict(trial).reasons
    assert len(trial.measurements) == 2
    resumed, _ = run_scripts(monkeypatch, RunDir.reopen(run_dir.path), ranks_retry=speed(2), ranks_retry2=speed(2))
    assert (resumed.measurements, metric_verdict(resumed).outcome) == (trial.measurements, Outcome.WARN)
    assert not any(measurement.error for measurement in resumed.retries)


@pytest.mark.parametrize(("third", "decision"), [(0.4, DecisionValue.REJECTED), (2.0, DecisionValue.ACCEPTED)])
def test_third_measurement_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, third: float, decision: DecisionValue
) -> None:
    run_dir = speed_trial(tmp_path / "out")
    trial, _ = run_scripts(monkeypatch, run_dir, ranks=speed(0.5), ranks_retry=speed(2), ranks_retry2=speed(third))
    assert (trial.decision.value, metric_verdict(trial).retry) == (decision, Retry(0.5, 2, third_value=third))
    assert rejudge(load_trial(run_dir.path)).verdicts == trial.verdicts


def test_interrupted_third_measurement_is_not_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = speed_trial(tmp_path / "out")
    scripts = {"ranks": speed(0.5), "ranks_retry": speed(2)}
    trial, _ = run_scripts(
        monkeypatch, run_dir, stopped_job="ranks-retry2", ranks_retry2=speed(3, ranks=(0,), retry=2), **scripts
    )
    verdict = metric_verdict(trial)
    assert (verdict.outcome, verdict.reasons[-1]) == (Outcome.UNJUDGED, Reason.NO_THIRD_MEASUREMENT)
    resumed, _ = run_scripts(monkeypatch, RunDir.reopen(run_dir.path), **scripts, ranks_retry2=speed(3))
    assert (resumed.decision.value, metric_verdict(resumed).outcome) == (DecisionValue.ACCEPTED, Outcome.WARN)


def test_retry_can_be_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, display = run_scripts(monkeypatch, speed_trial(tmp_path / "out", retry=False), ranks=speed(0.5))
    assert (trial.decision.value, display.retry_reasons) == (DecisionValue.REJECTED, {})
    assert (metric_verdict(trial).value, metric_verdict(trial).retry) == (0.5, None)
    assert Reason.NOT_RETRIED in metric_verdict(trial).reasons


def test_interrupted_retry_is_repeated_by_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = speed_trial(tmp_path / "out")
    first_rank_only = speed(3, ranks=(0,), retry=1)
    trial, _ = run_scripts(
        monkeypatch, run_dir, stopped_job="ranks-retry", ranks=speed(0.5), ranks_retry=first_rank_only
    )
    assert (trial.stop_reason, trial.decision.value) == (INTERRUPTED, DecisionValue.REJECTED)
    assert Reason.NOT_RETRIED in metric_verdict(trial).reasons
    resumed, _ = run_scripts(monkeypatch, RunDir.reopen(run_dir.path), ranks_retry=speed(2), ranks_retry2=speed(2.5))
    assert resumed.measurements == trial.measurements
    assert [measurement.metrics[0].value for measurement in resumed.retries if measurement.metrics] == [2, 2.5]
    assert metric_verdict(resumed).retry == Retry(0.5, 2, third_value=2.5)
    finished, _ = run_scripts(monkeypatch, RunDir.reopen(run_dir.path))
    assert (finished.retries, finished.verdicts) == (resumed.retries, resumed.verdicts)


def test_trial_that_is_killed_twice_is_finished_by_resume(tmp_path: Path) -> None:
    """SIGKILL during the first measurement, then during the retry: no complete measurement is lost or repeated."""
    out, path = tmp_path / "run", tmp_path / "t.yaml"
    check = "host.speed"  # its worker imports no torch
    path.write_text(
        processes.CPU_ONLY
        + "telemetry: {enabled: false}\n"
        + f"checks: {{{check}: {{options: {{seconds: 0.4, disk_size: 4MiB}}, "
        "expect: {hash_single: '> 1e15 iterations/s'}}}"
    )
    _kill_during("nodes", check, out, "run", path, "--out", out)
    journal = out / "measurements.jsonl"
    assert '{"measurement"' not in journal.read_text()
    journal.write_text(journal.read_text() + '{"measurement": {"check": "host.sp')
    err = _kill_during("nodes-retry", check, out, "run", "--resume", out)
    assert f"{journal}:" in err, "the truncated line is named"
    assert all(text in err for text in (check, "nodes-retry", "hash_single"))
    code, _, err = processes.call("run", "--resume", out)
    assert code == 1, err
    trial = processes.load(out)
    # A worker that ends with seatrial may complete its measurement, which is then kept
    ended = {job: (out / "jobs" / job / "attempt1" / "rank0.jsonl").read_text() for job in ("nodes", "nodes-retry")}
    repeated = [(job, 2) for job, text in ended.items() if '"measurement"' not in text]
    assert [(result.job, result.attempt) for result in trial.results] == repeated
    assert [len(each) for each in (trial.measurements, trial.retries)] == [1, 1]
    (bad,) = [verdict for verdict in trial.verdicts if verdict.outcome is Outcome.FAIL]
    assert Reason.REPRODUCED in bad.reasons
    ranks = {f"jobs/{job}/attempt{number}/rank0.jsonl" for job, number in [*dict.fromkeys(ended, 1).items(), *repeated]}
    assert set(load_trial(out).manifest) == {"measurements.jsonl", *ranks}
    before = journal.read_text().count('{"measurement"')
    assert processes.call("run", "--resume", out)[0] == 1
    assert journal.read_text().count('{"measurement"') == before


def _kill_during(job: str, check: str, out: Path, *arguments: str | Path) -> str:
    """Send SIGKILL to seatrial while the worker of ``job`` measures ``check``; return what it wrote to stderr."""
    program = Program(*arguments)
    until(lambda: ranks_in_check(out, job, check, 1))
    program.process.send_signal(signal.SIGKILL)
    _, _, err = program.finish()
    until(lambda: not program.left_behind())
    assert not (out / "trial.json").exists()
    return err
