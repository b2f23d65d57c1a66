"""A run whose job the scheduler rejects: it ends at once with one cause, and --resume goes on."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from seatrial.config.schema import CheckSettings, Cluster, Config
from seatrial.diagnose.log_search import search_text
from seatrial.discover.gpu import GpuFacts
from seatrial.discover.slurm import command_error
from seatrial.launch.base import Launcher, RenderedJob
from seatrial.launch.local import LocalJob, LocalLauncher
from seatrial.model import CLUSTER, DecisionValue, Job, JobState, Outcome, Reason, Trial, UsageError
from seatrial.pipeline.planned_jobs import resolve
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run import run
from seatrial.pipeline.run_directory import Request, RunDir, load_trial
from seatrial.pipeline.this_host import ThisHost
from seatrial.report import junit, why_not
from seatrial.report.console import Stream
from seatrial.report.progress import Live
from seatrial.report.terminal import summary
from tests.fakes.slurm import FakeSlurm, cluster, recorded, success
from tests.launch.scripted import Scripted
from tests.pipeline.fixtures import SilentDisplay

SQUEUE = f"squeue --all --noheader --user={os.getuid()} '--format=%A %o'"
SPEED = "filesystem.speed"
ALL_RANKS = f"""
for rank in (0, 1):
    start(rank, "{SPEED}")
    metrics = [{{"name": "paths_failed", "value": 0, "unit": "paths", "subject": "cluster"}}] if rank == 0 else []
    fields = {{"check": "{SPEED}", "subject": f"n0/rank{{rank}}", "rank": rank, "started": time.time()}}
    write(rank, measurement=fields | {{"metrics": metrics}})
    done(rank)
"""


def slurm(monkeypatch: pytest.MonkeyPatch, sbatch: str) -> FakeSlurm:
    """A Slurm of four nodes that answers sbatch with the recorded answer."""
    replies = {"sbatch": recorded(sbatch), SQUEUE: success(""), "scontrol show topology": success("")}
    return FakeSlurm({**cluster(), **replies}).install(monkeypatch)


class Rejecting(Scripted):
    """Rejects each job as sbatch does for an unknown partition."""

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        return RenderedJob(argv=("sbatch",), text="")

    def start(self, rendered: RenderedJob, folder: Path) -> LocalJob:
        raise command_error(rendered.argv, recorded("sbatch-partition-unknown.txt"))


@pytest.mark.parametrize(
    ("sbatch", "sentence", "first_command"),
    [
        ("sbatch-partition-unknown.txt", "Invalid partition name specified", "sinfo -s"),
        ("sbatch-gres-unknown.txt", "Invalid generic resource (gres) specification", "sinfo -o '%N %G'"),
        ("sbatch-gpus-too-many.txt", "Requested node configuration is not available", "sinfo -Nel"),
    ],
)
def test_quick_on_64_nodes_of_8_gpus_ends_with_one_cause_in_20_lines(
    sbatch: str, sentence: str, first_command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = slurm(monkeypatch, sbatch)
    monkeypatch.setattr("seatrial.pipeline.run.discover", lambda: ThisHost({}, GpuFacts()))
    options = [("--launcher", "launcher", "slurm"), ("--nodes", "cluster.nodes", 64), ("", "cluster.gpus_per_node", 8)]
    resolved = resolve("quick", options)
    request = Request(config=resolved.config, origins={}, only=(), skip=(), command=(), started=1.0)
    run_dir, output = RunDir.create(tmp_path / "out", request), io.StringIO()
    with Live(Stream(file=output)) as live:
        trial = run(run_dir, live)
    summary(trial, Stream(file=output))
    assert len(output.getvalue().splitlines()) <= 18, "two lines follow: the report and --resume"
    assert sum(command.startswith("sbatch ") for command in fake.commands) == 1
    (result,) = trial.results
    assert (result.state, result.failed_subject) == (JobState.REJECTED, CLUSTER)
    assert trial.measurements == ()
    (finding,) = trial.findings
    assert (finding.subject, finding.first_command, finding.confidence) == (CLUSTER, first_command, "high")
    assert sentence in finding.evidence
    assert set(finding.explains) == {each.key for each in trial.verdicts}
    assert {verdict.subject for verdict in trial.verdicts} == {CLUSTER}
    assert trial.decision.value is DecisionValue.INCOMPLETE
    assert f"job {result.job} was rejected: " in trial.decision.reason
    assert sentence in trial.decision.reason
    for judged in (load_trial(tmp_path / "out"), rejudge(trial)):
        assert (judged.decision, judged.findings) == (trial.decision, trial.findings)
    explained = tmp_path / "out/jobs/nodes/attempt1/launcher.err"  # the log for `seatrial explain RUN`
    early_end, cause = why_not.reasons(trial)
    assert sentence in early_end.text
    assert finding.title in cause.title
    assert junit.render(trial).count("cause: ") == junit.render(trial).count(f"cause: {finding.title}") == 18
    assert finding.signature in {match.signature.id for match in search_text(explained.read_text(), "")}


def two_jobs(out: Path, nofile: str = ">= 0 files") -> RunDir:
    """A run on this host of a job of nodes and a job of ranks."""
    checks = {
        "host.inventory": CheckSettings.model_validate({"expect": {"nofile_soft": nofile}}),
        SPEED: CheckSettings(),
    }
    config = Config(name="t", localize=False, cluster=Cluster(gpus_per_node=0), checks=checks)
    return RunDir.create(out, Request(config=config, origins={}, only=(), skip=(), command=(), started=1.0))


def run_with(monkeypatch: pytest.MonkeyPatch, run_dir: RunDir, ranks: Callable[[Config], Launcher]) -> Trial:
    """Run with the local launcher for the job of nodes, and this launcher for the job of ranks."""
    with monkeypatch.context() as patch:
        for module in ("run", "resume"):
            patch.setattr(
                f"seatrial.pipeline.{module}.select_launcher",
                lambda settings, placement: (ranks if placement == "ranks" else LocalLauncher)(settings),
            )
        trial = run(run_dir, SilentDisplay())
    run_dir._journal._file.close()  # releases the lock
    return trial


@pytest.mark.parametrize(
    ("nofile", "decision"), [(">= 0 files", DecisionValue.INCOMPLETE), (">= 9999999999 files", DecisionValue.REJECTED)]
)
def test_jobs_that_ran_are_judged_and_resume_goes_on(
    nofile: str, decision: DecisionValue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected = run_with(monkeypatch, two_jobs(tmp_path / "out", nofile), lambda _: Rejecting())
    assert [result.state for result in rejected.results] == [JobState.COMPLETED, JobState.REJECTED]
    assert {measurement.check for measurement in rejected.measurements} == {"host.inventory"}
    assert rejected.decision.value is decision
    assert "Invalid partition name specified" in rejected.decision.reason
    (not_started,) = [verdict for verdict in rejected.verdicts if verdict.check == SPEED]
    assert (not_started.subject, not_started.reasons) == (CLUSTER, (Reason.NOT_MEASURED,))
    assert [finding.explains for finding in rejected.findings if finding.cause == "job_rejected"] == [
        (not_started.key,)
    ]
    text = io.StringIO()
    summary(rejected, Console(file=text, width=200))
    assert f"Not measured: 1 check ({SPEED})" in text.getvalue()
    resumed = run_with(monkeypatch, RunDir.reopen(tmp_path / "out"), lambda _: Scripted(*[ALL_RANKS] * 2))
    assert [result.state for result in resumed.results[2:]] == [JobState.COMPLETED], "only the job of ranks"
    assert resumed.stop_reason == ""
    assert not [finding for finding in resumed.findings if finding.cause == "job_rejected"]
    assert {verdict.check for verdict in resumed.verdicts if verdict.outcome is Outcome.ERROR} <= {SPEED}
    assert Reason.NOT_MEASURED not in {reason for verdict in resumed.verdicts for reason in verdict.reasons}


def test_a_wrong_setting_of_slurm_is_corrected_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = two_jobs(tmp_path / "out")
    run_dir.change_slurm([("--set", "slurm.partition", "gpux")])
    with monkeypatch.context() as patch:
        patch.setattr("seatrial.pipeline.run.select_launcher", lambda settings, placement: Rejecting())
        rejected = run(run_dir, SilentDisplay())
    assert [result.state for result in rejected.results] == [JobState.REJECTED]
    run_dir._journal._file.close()
    reopened = RunDir.reopen(tmp_path / "out")
    with pytest.raises(UsageError, match=r"partitio.*Extra inputs are not permitted"):
        reopened.change_slurm([("--set", "slurm.partitio", "gpu")])
    reopened.change_slurm([("--set", "slurm.partition", "gpu")])
    resumed = run_with(monkeypatch, reopened, lambda _: Scripted(*[ALL_RANKS] * 2))
    assert resumed.config["slurm"]["partition"] == "gpu"
    assert resumed.origins["slurm.partition"] == "--set"
    assert [result.state for result in resumed.results[1:]] == [JobState.COMPLETED, JobState.COMPLETED]
    with pytest.raises(UsageError, match="were measured with other settings"):
        RunDir.reopen(tmp_path / "out").change_slurm([("--set", "slurm.partition", "debug")])
