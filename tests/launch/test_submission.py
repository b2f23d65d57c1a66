"""Submission of jobs: transient refusals are retried, a rejection ends the job without measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from seatrial.launch import submission
from seatrial.launch.base import JobRefused, RenderedJob, WaitState
from seatrial.launch.local import LocalJob
from seatrial.model import CLUSTER, JobState, MissingNode, NodeShortage, SeatrialError
from tests.launch.scripted import GPU_CHECK, Scripted, job, run_scripted

MEASURED = "start(0, GPU_CHECK); measured(0, GPU_CHECK); done(0); start(1, GPU_CHECK); measured(1, GPU_CHECK); done(1)"
BUSY = JobRefused("QOSMaxSubmitJobPerUserLimit. Run first: squeue --me", transient=True)
UNKNOWN = SeatrialError("Invalid partition name specified. Run first: sinfo -s")


class Refusing(Scripted):
    """Raises one of the errors at each start, until none is left."""

    def __init__(self, *errors: SeatrialError) -> None:
        super().__init__(MEASURED)
        self.errors, self.starts = list(errors), 0

    def start(self, rendered: RenderedJob, folder: Path) -> LocalJob:
        self.starts += 1
        if self.errors:
            raise self.errors.pop(0)
        return super().start(rendered, folder)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_POLL_S", 0.01)


def test_a_transient_refusal_is_retried_with_one_line(tmp_path: Path) -> None:
    launcher = Refusing(BUSY, BUSY)
    (result,), listener = run_scripted(launcher, job(GPU_CHECK), tmp_path)
    assert (result.state, launcher.starts, listener.errors) == (JobState.COMPLETED, 3, [])
    (warning,) = listener.warnings
    assert "60 s" in warning
    assert "QOSMaxSubmitJobPerUserLimit" in warning


@pytest.mark.parametrize(
    ("errors", "sentence", "starts"),
    [([UNKNOWN, BUSY], "Invalid partition name specified", 1), ([BUSY] * 999, "QOSMaxSubmitJobPerUserLimit", None)],
    ids=["permanent", "transient for too long"],
)
def test_a_rejected_job_is_not_repeated_and_measures_nothing(
    errors: Sequence[SeatrialError], sentence: str, starts: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "_RETRY_S", 0.1)
    launcher = Refusing(*errors)
    (result,), listener = run_scripted(launcher, job(GPU_CHECK), tmp_path)
    assert (result.state, result.failed_subject, listener.measurements) == (JobState.REJECTED, CLUSTER, [])
    assert sentence in result.cause_without_command
    assert launcher.starts == starts if starts else launcher.starts > 1
    assert sentence in (tmp_path / "jobs/ranks/attempt1/launcher.err").read_text()


class Pending(LocalJob):
    """A job that never starts, since a node is missing."""

    def wait_state(self) -> WaitState:
        shortage = NodeShortage(usable=1, missing=(MissingNode(name="n1", state="DOWN"),))
        return WaitState(reason="n1 is DOWN", permanent=True, pending=True, shortage=shortage)


class PendingOnTwoNodes(Scripted):
    """Starts only jobs on one node."""

    def start(self, rendered: RenderedJob, folder: Path) -> LocalJob:
        started = super().start(rendered, folder)
        return started if folder.parent.name.endswith("-on1") else Pending(started.child)


@pytest.mark.parametrize(
    ("min_nodes", "states"), [(None, [JobState.REJECTED]), (1, [JobState.REJECTED, JobState.COMPLETED])]
)
def test_a_job_without_enough_nodes_is_rejected_unless_fewer_are_allowed(
    min_nodes: int | None, states: Sequence[JobState], tmp_path: Path
) -> None:
    two_nodes = job(GPU_CHECK).model_copy(update={"nodes": 2, "expected_nodes": 2, "ranks_per_node": 2})
    launcher = PendingOnTwoNodes(MEASURED)
    results, listener = run_scripted(launcher, two_nodes, tmp_path, min_nodes=min_nodes)
    assert [result.state for result in results] == states
    assert [node.name for node in results[0].missing_nodes] == ["n1"]
    assert listener.errors == []
