"""Jobs that lose a node, or do not get all nodes, with simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from seatrial.checks import catalog
from seatrial.config.schema import Limits
from seatrial.launch import root_cause
from seatrial.launch.base import RenderedJob, WaitState
from seatrial.launch.local import LocalJob
from seatrial.launch.watch import run_job
from seatrial.model import Job, JobResult, JobState, MissingNode, NodeShortage
from seatrial.util.processes import CommandResult
from tests.launch.scripted import (
    CLUSTER_CHECK,
    GPU_CHECK,
    RecordingListener,
    ScriptClock,
    Scripted,
    job,
    run_scripted,
    script_clock,
)

TWO_NODES = job(CLUSTER_CHECK, GPU_CHECK).model_copy(update={"nodes": 2, "ranks_per_node": 1, "expected_nodes": 2})
ONE_CHECK = TWO_NODES.model_copy(update={"checks": (CLUSTER_CHECK,)})
# the node n1 goes silent in the first check; the rank on n0 goes on
SILENT = """
NODES[1] = "n1"
for rank in 0, 1: start(rank, CLUSTER_CHECK)
beat(60, 0, status=CLUSTER_CHECK)
"""


@dataclass(frozen=True)
class QueuedJob(LocalJob):
    """A local job of which a scheduler gives these states."""

    states: Callable[[], WaitState | None] = lambda: None

    def wait_state(self) -> WaitState | None:
        return self.states()


class Queue(Scripted):
    """Starts the script of a job's name, and gives the states in turn; the last one stays.

    A state that is not permanent lasts 3 s of the script's clock.
    """

    def __init__(self, scripts: dict[str, str], *states: WaitState | None) -> None:
        self.scripts, self.states = scripts, list(states)
        super().__init__()

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        return Scripted(*[self.scripts[job.name]] * attempt).render(job, run_dir, attempt)

    def start(self, rendered: RenderedJob, folder: Path) -> QueuedJob:
        return QueuedJob(super().start(rendered, folder).child, states=self._state)

    def _state(self) -> WaitState | None:
        state = self.states[0]
        if len(self.states) > 1 and (self.clock.now > 3 or (state and state.permanent)):
            self.states.pop(0)
        return state


def test_a_silent_node_is_named_and_not_a_rank(tmp_path: Path) -> None:
    (result,), listener = run_scripted(Scripted(SILENT), ONE_CHECK, tmp_path, heartbeat_timeout_s=1)
    assert (result.state, result.failed_subject) == (JobState.HUNG, "n1")
    assert [node.name for node in result.missing_nodes] == ["n1"]
    assert listener.warnings, "named before the job is cancelled"
    assert [error[0] for error in listener.errors] == [CLUSTER_CHECK]


def test_a_silent_node_is_named_while_the_scheduler_waits_for_it(tmp_path: Path) -> None:
    queue = Queue({"ranks": SILENT}, WaitState(reason="COMPLETING on n1", permanent=False))
    (result,), listener = run_scripted(queue, ONE_CHECK, tmp_path, heartbeat_timeout_s=1)
    assert result.failed_subject == "n1"
    assert set(listener.statuses) == {"waiting: COMPLETING on n1"}, "no other status alternates with it"


@pytest.mark.parametrize(("unreadable", "subject"), [((), "rank 1 (n0/rank1"), ((1,), "n1")])
def test_a_node_that_ends_the_cancelled_job_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: tuple[int, ...], subject: str
) -> None:
    """Its rank hung; if its files cannot be read, nobody knows whether it did."""
    monkeypatch.setattr(LocalJob, "node_is_free", lambda _self, name: name == "n1")
    launcher = Scripted(SILENT, unreadable_nodes=unreadable)
    (result,), _ = run_scripted(launcher, ONE_CHECK, tmp_path, heartbeat_timeout_s=1)
    assert (result.state, result.missing_nodes) == (JobState.HUNG, ())
    assert result.failed_subject.startswith(subject)


def test_a_silent_node_that_answers_is_up_and_its_rank_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = CommandResult(0, "up\nup\n", "")
    monkeypatch.setattr(LocalJob, "run_on_nodes", lambda *_args: answers)
    (result,), listener = run_scripted(Scripted(SILENT), ONE_CHECK, tmp_path, heartbeat_timeout_s=1)
    assert (result.state, result.missing_nodes) == (JobState.HUNG, ())
    assert result.failed_subject.startswith("rank 1 (n0/rank1")
    assert "stack" in result.cause, "the process states of the ranks are collected"
    assert not listener.warnings


def test_a_requeued_job_names_the_node_that_it_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_cause, "SILENT_AT_END_S", 0.5)
    queue = Queue({"ranks": SILENT}, None, WaitState(reason="job 7 was requeued", permanent=True))
    (result,), _ = run_scripted(queue, ONE_CHECK, tmp_path)
    assert (result.failed_subject, result.cause.startswith("job 7 was requeued; no heartbeat")) == ("n1", True)


REST = "for check in CHECKS: start(0, check); measured(0, check)\ndone(0)"
SHORTAGE = NodeShortage(usable=1, missing=(MissingNode(name="n1", state="IDLE+DRAIN: fan broken"),))
PENDING = WaitState(reason="PENDING: Resources", permanent=True, shortage=SHORTAGE)


def test_with_min_nodes_the_remaining_checks_run_without_the_lost_node(tmp_path: Path) -> None:
    queue = Queue({"ranks": SILENT, "ranks-on1": REST.replace("CHECKS", "[GPU_CHECK]")}, None)
    results, listener = run_scripted(queue, TWO_NODES, tmp_path, heartbeat_timeout_s=1, min_nodes=1)
    assert [(result.job, result.state) for result in results] == [
        ("ranks", JobState.HUNG),
        ("ranks-on1", JobState.COMPLETED),
    ]
    assert [error[0] for error in listener.errors] == [CLUSTER_CHECK]
    smaller = Job.model_validate_json((tmp_path / "jobs/ranks-on1/job.json").read_text())
    assert (smaller.nodes, smaller.expected_nodes, smaller.exclude, smaller.checks) == (1, 1, "n1", (GPU_CHECK,))


def test_with_min_nodes_a_pending_job_starts_again_on_the_nodes_that_are_there(tmp_path: Path) -> None:
    queue = Queue({"ranks": "time.sleep(60)", "ranks-on1": REST.replace("CHECKS", "[CLUSTER_CHECK]")}, PENDING, None)
    results, listener = run_scripted(queue, ONE_CHECK, tmp_path, min_nodes=1)
    assert [(result.job, result.failed_subject) for result in results] == [("ranks", "n1"), ("ranks-on1", "")]
    assert listener.errors == []


def test_with_min_nodes_a_job_starts_again_without_the_node_on_which_srun_starts_no_task(tmp_path: Path) -> None:
    error = "srun: error: Task launch for StepId=7.0 failed on node n1: Zero Bytes were transmitted or received"
    refused = f"print({error!r}, 'preflight: n1: no answer', sep=chr(10), file=sys.stderr, flush=True); os._exit(1)"
    queue = Queue({"ranks": refused, "ranks-on1": REST.replace("CHECKS", "[CLUSTER_CHECK]")}, None)
    results, listener = run_scripted(queue, ONE_CHECK, tmp_path, min_nodes=1)
    assert [(each.state, [node.name for node in each.missing_nodes]) for each in results] == [
        (JobState.REFUSED, ["n1"]),
        (JobState.COMPLETED, []),
    ]
    assert Job.model_validate_json((tmp_path / "jobs/ranks-on1/job.json").read_text()).exclude == "n1"
    assert listener.errors == []


@pytest.mark.parametrize(("min_nodes", "retry"), [(None, 0), (2, 0), (1, 1)])
def test_otherwise_a_job_without_its_nodes_ends(min_nodes: int | None, retry: int, tmp_path: Path) -> None:
    queue = Queue({"ranks": "time.sleep(60)"}, PENDING)
    retried = ONE_CHECK.model_copy(update={"retry": retry})
    (result,), listener = run_scripted(queue, retried, tmp_path, min_nodes=min_nodes)
    assert (result.failed_subject, result.missing_nodes) == ("n1", SHORTAGE.missing)
    assert [error[0] for error in listener.errors] == [CLUSTER_CHECK]


@dataclass
class Interrupted(RecordingListener):
    """Ctrl-C after 2 s of the script's clock, while the scheduler has a message."""

    clock: ScriptClock | None = None

    def show_waiting(self, state: str, seconds: float) -> None:
        super().show_waiting(state, seconds)
        if self.clock and self.clock.now > 2:
            raise KeyboardInterrupt


def interrupted(launcher: Scripted, run_dir: Path, listener: RecordingListener, timeout_s: float = 30) -> JobResult:
    """Return the result of a job whose first attempt ends with KeyboardInterrupt."""
    limits = Limits(heartbeat_timeout_s=timeout_s)
    with script_clock(run_dir) as launcher.clock:
        if isinstance(listener, Interrupted):
            listener.clock = launcher.clock
        results = run_job(launcher, ONE_CHECK, run_dir, limits, catalog(), listener)
        result = next(results)
        with pytest.raises(KeyboardInterrupt):
            next(results)
    return result


def test_ctrl_c_keeps_the_measurements_and_the_cause_that_were_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_cause, "SILENT_AT_END_S", 1.0)
    queue = Queue({"ranks": SILENT}, WaitState(reason="COMPLETING on n1", permanent=False))
    listener = Interrupted()
    result = interrupted(queue, tmp_path, listener)
    assert (result.failed_subject, [node.name for node in result.missing_nodes]) == ("n1", ["n1"])
    assert [error[0] for error in listener.errors] == [CLUSTER_CHECK]


def test_ctrl_c_in_a_sound_job_gives_no_cause(tmp_path: Path) -> None:
    script = "start(0, CLUSTER_CHECK); start(1, CLUSTER_CHECK); beat(60, 0, 1, status=CLUSTER_CHECK)"
    listener = Interrupted()
    queue = Queue({"ranks": script}, WaitState(reason="unknown", permanent=False))
    result = interrupted(queue, tmp_path, listener)
    assert (result.state, result.cause, listener.measurements) == (JobState.CANCELLED, "", [])


def test_ctrl_c_during_the_cancellation_keeps_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    cancel = LocalJob.cancel

    def interrupted_cancel(self: LocalJob, *, node_lost: bool = False) -> str:
        calls.append(node_lost)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return cancel(self, node_lost=node_lost)

    monkeypatch.setattr(LocalJob, "cancel", interrupted_cancel)
    result = interrupted(Scripted(SILENT), tmp_path, RecordingListener(), timeout_s=1)
    assert result.failed_subject == "n1"
    assert calls == [True, True]
