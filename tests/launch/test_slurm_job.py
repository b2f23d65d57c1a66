"""States of a Slurm job, with a fake Slurm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from seatrial.config.schema import Cluster, Config, Slurm
from seatrial.launch import slurm_job, submission
from seatrial.launch.base import JobRefused, RenderedJob
from seatrial.launch.slurm import SlurmLauncher
from seatrial.launch.slurm_job import SlurmJob, unavailable_nodes
from seatrial.launch.submission import start_job
from seatrial.model import SeatrialError
from seatrial.util.processes import CommandResult
from tests.fakes.slurm import NODES, FakeSlurm, Reply, cluster, failure, recorded, success

SETTINGS = Config(name="t", checks={}, cluster=Cluster(nodes=4))
DOWN = failure("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")


def scontrol_output(state: str, reason: str = "None", nodes: str = "node[0-1]", code: str = "0:0") -> CommandResult:
    return success(f"JobId=7 JobName=x\n   JobState={state} Reason={reason}\n   ExitCode={code}\n   NodeList={nodes}\n")


class QueuedJob:
    """Job 7 of a fake Slurm, queried at each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **slurm: object) -> None:
        monkeypatch.setattr(SlurmJob, "poll_s", -1.0)
        self.fake = FakeSlurm(cluster("troubled")).install(monkeypatch)
        settings = SETTINGS.model_copy(update={"slurm": Slurm.model_validate(slurm)})
        (folder / "shared").touch()
        self.job = SlurmJob("7", settings, folder)

    def with_state(self, reply: Reply) -> QueuedJob:
        self.fake.replies["scontrol show job 7"] = reply
        return self


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> QueuedJob:
    return QueuedJob(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("reason", "first_command"),
    [
        ("PartitionTimeLimit", "sinfo -o '%P %l'; then --set slurm.time_min=MINUTES"),
        ("QOSMaxNodePerJobLimit", "sacctmgr show qos"),
        ("AssocMaxWallDurationPerJobLimit", "sinfo -o '%P %l'"),
        ("BadConstraints", "sinfo -o '%P %a %l %D %c %m %G %f'"),
        ("JobHeldAdmin", "scontrol release 7"),
        ("launch_failed_requeued_held", "scontrol release 7"),
    ],
)
def test_permanent_pending_reason_ends_at_once_with_first_command(
    reason: str, first_command: str, queued: QueuedJob
) -> None:
    waiting = queued.with_state(scontrol_output("PENDING", reason, "(null)")).job.wait_state()
    assert waiting
    assert waiting.permanent
    assert f"Run first: scontrol show job 7; {first_command}" in waiting.reason


@pytest.mark.parametrize(
    ("reason", "first_command"),
    [
        ("ReqNodeNotAvail,_UnavailableNodes:node1", "sinfo -R"),
        ("ReqNodeNotAvail,_Reserved_for_maintenance", "scontrol show reservations"),
        ("Resources", "squeue --start --job 7"),
        ("QOSMaxJobsPerUserLimit", "sacctmgr show qos"),
    ],
)
def test_pending_job_ends_after_queue_s(
    reason: str, first_command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    queued = QueuedJob(monkeypatch, tmp_path, queue_s=100)
    waiting = queued.with_state(scontrol_output("PENDING", reason, "(null)")).job.wait_state()
    assert waiting
    assert not waiting.permanent
    assert "Run first" not in waiting.reason
    queued.job.submitted -= 101
    waiting = queued.job.wait_state()
    assert waiting
    assert waiting.permanent
    assert first_command in waiting.reason.partition("Run first: ")[2]
    assert "2 of 4 nodes of partition gpu are usable, 4 needed: node1 is DOWN+NOT_RESPONDING" in waiting.reason
    assert "node2 is IDLE+DRAIN: fan broken" in waiting.reason


def test_time_limit_above_the_partitions_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    queued = QueuedJob(monkeypatch, tmp_path, partition="short")
    pending = scontrol_output("PENDING", "PartitionConfig", "(null)")
    waiting = queued.with_state(success(pending.out + "   TimeLimit=01:00:00\n")).job.wait_state()
    assert waiting
    assert "partition short allows 5 minutes, the job requests 60. Run first: scontrol show job 7" in waiting.reason


def test_job_that_reaches_its_time_limit_names_the_setting(queued: QueuedJob) -> None:
    queued.with_state(scontrol_output("TIMEOUT", "TimeLimit")).job.poll()
    assert "slurm.time_min=MINUTES" in queued.job.exit_reason()


def test_job_launch_failure_names_the_log_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    queued = QueuedJob(monkeypatch, tmp_path, partition="short")
    queued.with_state(scontrol_output("FAILED", "JobLaunchFailure", code="0:0")).job.poll()
    command = "srun --nodelist=node[0-1] --partition=short ls -ld /tmp"
    assert f"slurmd could not start the script. Run first: {command}" in queued.job.exit_reason()


def test_node_fail_names_nodes_and_first_command(queued: QueuedJob) -> None:
    queued.with_state(scontrol_output("NODE_FAIL", "NodeDown")).job.poll()
    exit_reason = queued.job.exit_reason()
    assert "on node[0-1] is NODE_FAIL (reason: NodeDown)" in exit_reason
    assert "nodes of partition gpu are usable, 4 needed" in exit_reason
    assert exit_reason.endswith("Run first: scontrol show job 7; sinfo -R")


def test_controller_outage_is_tolerated_up_to_its_limit(queued: QueuedJob) -> None:
    assert queued.with_state(scontrol_output("RUNNING")).job.poll() is None
    assert queued.with_state(DOWN).job.wait_state() is None, "a short outage is not reported"
    queued.job._last_response -= 11
    waiting = queued.job.wait_state()
    assert waiting
    assert not waiting.permanent
    assert ": the controller does not answer" in waiting.reason
    assert queued.with_state(scontrol_output("RUNNING")).job.wait_state() is None
    queued.with_state(
        failure("slurm_load_jobs error: Slurm backup controller in standby mode")
    ).job._last_response -= 601
    waiting = queued.job.wait_state()
    assert waiting
    assert waiting.permanent


PENDING = success(
    "JobId=7 JobName=x\n   JobState=PENDING Reason=Resources\n   Partition=gpu AllocNode:Sid=x:1\n"
    "   ReqNodeList=(null) ExcNodeList=(null)\n   NodeList=\n   NumNodes=4-4 NumCPUs=4\n"
)


def test_job_that_waits_for_drained_nodes_ends_and_names_them(queued: QueuedJob) -> None:
    waiting = queued.with_state(PENDING).job.wait_state()
    assert waiting
    assert (waiting.permanent, waiting.shortage) == (False, None), "the first reason may be provisional"
    queued.job.submitted -= 4
    waiting = queued.job.wait_state()
    assert waiting
    assert waiting.permanent
    assert waiting.shortage
    assert waiting.shortage.usable == 2
    assert [str(node) for node in waiting.shortage.missing] == [
        "node1 (DOWN+NOT_RESPONDING: Not responding; port 6818 of node1 refuses connections)",
        "node2 (IDLE+DRAIN: fan broken)",
    ]
    assert "node2 is IDLE+DRAIN: fan broken. To test the others: --min-nodes 2" in waiting.reason


def test_job_that_waits_for_busy_nodes_waits_on(queued: QueuedJob) -> None:
    queued.fake.replies.update(cluster("busy"))  # two nodes are allocated to other jobs, a fourth is drained
    queued.with_state(success(PENDING.out.replace("4-4", "3-3"))).job.submitted -= 130
    waiting = queued.job.wait_state()
    assert waiting
    assert (waiting.permanent, waiting.shortage) == (False, None)
    assert waiting.reason == "Slurm job 7 is PENDING (Resources)"
    assert waiting.seconds >= 130
    queued.job.wait_state()
    assert queued.fake.commands.count(NODES) == 1, "the states of the nodes are queried every 20 s"


def test_node_that_does_not_respond_is_named_while_the_job_waits(queued: QueuedJob) -> None:
    nodes = recorded("scontrol-show-nodes-healthy.txt").out.replace("State=IDLE", "State=IDLE+NOT_RESPONDING", 1)
    queued.fake.replies[NODES] = success(nodes)
    queued.with_state(PENDING).job.submitted -= 4
    waiting = queued.job.wait_state()
    assert waiting
    assert not waiting.permanent
    assert "node0 is IDLE+NOT_RESPONDING" in waiting.reason


def test_cancel_does_not_wait_long_for_a_lost_node(queued: QueuedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job, "_LOST_NODE_LIMIT_S", 0.1)
    queued.with_state(scontrol_output("RUNNING")).job.poll()
    queued.with_state(scontrol_output("COMPLETING", nodes="node1"))
    queued.fake.replies.update({"scancel --signal=KILL 7": success(""), "scancel 7": success("")})
    assert queued.job.cancel(node_lost=True) == ""
    assert queued.job.allocation().nodes == "node[0-1]", "and not only the node that is not free yet"


@pytest.mark.parametrize(
    ("state", "is_free"),
    [("IDLE", True), ("IDLE+COMPLETING+NOT_RESPONDING", False), ("ALLOCATED+COMPLETING", False), ("DOWN", False)],
)
def test_a_node_that_is_up_and_has_ended_the_job_is_not_lost(state: str, is_free: bool, queued: QueuedJob) -> None:
    nodes = recorded("scontrol-show-nodes-healthy.txt").out.replace("State=IDLE", f"State={state}", 1)
    queued.fake.replies["scontrol show node node0"] = success(nodes)
    assert queued.job.node_is_free("node0") is is_free


def test_suspended_job_is_ended(queued: QueuedJob) -> None:
    assert queued.with_state(scontrol_output("RUNNING")).job.wait_state() is None
    waiting = queued.with_state(scontrol_output("SUSPENDED")).job.wait_state()
    assert waiting
    assert (waiting.permanent, waiting.pending) == (True, False)
    assert "Slurm job 7 is SUSPENDED" in waiting.reason


def test_requeued_job_is_ended(queued: QueuedJob) -> None:
    assert queued.with_state(scontrol_output("RUNNING")).job.wait_state() is None
    waiting = queued.with_state(scontrol_output("PENDING", "BeginTime", "(null)")).job.wait_state()
    assert waiting
    assert waiting.permanent
    assert "Slurm job 7 was requeued after its start (reason: BeginTime)" in waiting.reason


def test_completing_state_has_a_time_limit(queued: QueuedJob) -> None:
    assert queued.with_state(scontrol_output("COMPLETING", "NonZeroExitCode", code="3:0")).job.poll() is None
    waiting = queued.job.wait_state()
    assert waiting
    assert (waiting.reason, waiting.permanent) == ("", False)
    queued.job._completing_since -= 10
    waiting = queued.job.wait_state()
    assert waiting
    assert waiting.reason == "Slurm job 7 is COMPLETING on node[0-1]"
    queued.job._completing_since -= 180
    assert queued.job.poll() == 3


@pytest.mark.parametrize(("code", "polled"), [("0:0", 0), ("0:15", 1)])
def test_stuck_completing_job_returns_its_exit_code(queued: QueuedJob, code: str, polled: int) -> None:
    queued.with_state(scontrol_output("COMPLETING", code=code))
    queued.job.collector.finished = True
    assert queued.job.poll() is None
    queued.job._completing_since -= 200
    assert queued.job.poll() == polled


def test_unknown_job_counts_as_cancelled(queued: QueuedJob) -> None:
    queued.fake.replies["scancel 7"] = success("")
    assert queued.with_state(failure("slurm_load_jobs error: Invalid job id specified")).job.cancel() == ""


RENDERED = RenderedJob(argv=("sbatch", "--parsable"), text="#!/bin/bash")
SQUEUE = f"squeue --all --noheader --user={os.getuid()} '--format=%A %o'"


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    folder = tmp_path / "it's a run" / "jobs" / "ranks" / "attempt1"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("output", ["7\n", "7;cluster\n", "Welcome! 3 news\n7\n", "note: 12 GPUs\n7;c\n"])
def test_job_id_is_parsed_and_saved(output: str, monkeypatch: pytest.MonkeyPatch, attempt: Path) -> None:
    FakeSlurm({"sbatch": success(output)}).install(monkeypatch)
    assert SlurmLauncher(SETTINGS).start(RENDERED, attempt).id == "7"
    assert (attempt / "slurm_job_id").read_text() == "7"


@pytest.mark.parametrize(
    "result", [success("thank you\n"), failure("sbatch: error: Socket timed out"), KeyboardInterrupt()]
)
def test_submitted_job_without_known_id_is_cancelled(
    result: CommandResult | BaseException, monkeypatch: pytest.MonkeyPatch, attempt: Path
) -> None:
    queue: list[str] = []

    def sbatch(argv: Sequence[str]) -> CommandResult:
        queue[:] = [f"6 /elsewhere/job.sbatch x\n7 {' '.join(argv[-2:])}\n"]
        if isinstance(result, BaseException):
            raise result
        return result

    gone = failure("slurm_load_jobs error: Invalid job id specified")
    answers: dict[str, Reply] = {"sbatch": sbatch, SQUEUE: lambda _: success(queue[0]), "scontrol show job 7": gone}
    fake = FakeSlurm({**cluster(), **answers}).install(monkeypatch)
    with pytest.raises((SeatrialError, KeyboardInterrupt)):
        SlurmLauncher(SETTINGS).start(RENDERED, attempt)
    assert "scontrol show job 7" in fake.commands
    assert not any("6" in command.split() for command in fake.commands)


TIMED_OUT = failure("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
LIMIT = failure("sbatch: error: QOSMaxSubmitJobPerUserLimit")


@pytest.mark.parametrize("refusal", [TIMED_OUT, LIMIT, DOWN])
def test_sbatch_is_repeated_with_the_same_token_until_it_succeeds(
    refusal: CommandResult, monkeypatch: pytest.MonkeyPatch, attempt: Path
) -> None:
    monkeypatch.setattr(submission, "_POLL_S", 0.0)
    answers, submitted, warnings = [refusal, refusal, success("7\n")], list[str](), list[str]()

    def sbatch(argv: Sequence[str]) -> CommandResult:
        submitted.append(argv[-1])
        return answers.pop(0)

    FakeSlurm({"sbatch": sbatch, SQUEUE: success("")}).install(monkeypatch)
    assert start_job(SlurmLauncher(SETTINGS), RENDERED, attempt, warnings.append).allocation().id == "7"
    assert len(submitted) == 3
    assert set(submitted) == {(attempt / "token").read_text()}
    assert len(warnings) == 1


def test_sbatch_is_not_repeated_while_slurm_may_have_accepted_the_job(
    monkeypatch: pytest.MonkeyPatch, attempt: Path
) -> None:
    """The queue, which shows whether the job is there, cannot be read."""
    monkeypatch.setattr(submission, "_POLL_S", 0.01)
    monkeypatch.setattr(submission, "_RETRY_S", 0.1)
    fake = FakeSlurm({"sbatch": TIMED_OUT, SQUEUE: DOWN}).install(monkeypatch)
    with pytest.raises(JobRefused):
        start_job(SlurmLauncher(SETTINGS), RENDERED, attempt, lambda _: None)
    assert sum(command.startswith("sbatch ") for command in fake.commands) == 1
    assert fake.commands.count(SQUEUE) > 2


def test_a_job_that_slurm_accepted_in_spite_of_a_timeout_is_cancelled_before_the_next(
    monkeypatch: pytest.MonkeyPatch, attempt: Path
) -> None:
    monkeypatch.setattr(submission, "_POLL_S", 0.0)
    queue: list[str] = []

    def sbatch(argv: Sequence[str]) -> CommandResult:
        if queue:
            return success("8\n")
        queue.append(f"7 {' '.join(argv[-2:])}\n")
        return TIMED_OUT

    def scancel(_: Sequence[str]) -> CommandResult:
        queue[:] = ["6 /elsewhere/job.sbatch x\n"]
        return success("")

    def show(_: Sequence[str]) -> CommandResult:
        return scontrol_output("PENDING" if queue[0].startswith("7") else "CANCELLED", nodes="")

    answers: dict[str, Reply] = {"sbatch": sbatch, SQUEUE: lambda _: success(queue[0]), "scancel 7": scancel}
    fake = FakeSlurm({**cluster(), **answers, "scontrol show job 7": show}).install(monkeypatch)
    assert start_job(SlurmLauncher(SETTINGS), RENDERED, attempt, lambda _: None).allocation().id == "8"
    tools = [command.split()[0] for command in fake.commands]
    assert tools.index("scancel") < len(tools) - 1 - tools[::-1].index("sbatch"), "before the second sbatch"
    assert fake.commands.count("scancel 7") == 1


def test_job_that_cannot_be_cancelled_stops_the_next_run(monkeypatch: pytest.MonkeyPatch, attempt: Path) -> None:
    monkeypatch.setattr(slurm_job, "_CANCEL_LIMIT_S", 0.3)
    (attempt / "token").write_text("secret")
    (attempt / "shared").touch()
    answers = {
        SQUEUE: success(f"7 {attempt}/job.sbatch\n"),
        "scontrol show job 7": scontrol_output("RUNNING"),
        "scancel 7": DOWN,
    }
    fake = FakeSlurm(answers).install(monkeypatch)
    with pytest.raises(SeatrialError, match=r"earlier run .*still RUNNING .*Run first: scontrol show job 7"):
        list(SlurmLauncher(SETTINGS).cancel_earlier_jobs(attempt.parents[2]))
    assert fake.commands.count("scancel 7") > 1, "a failed scancel is retried"


def test_new_run_does_not_query_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeSlurm({}).install(monkeypatch)
    assert list(SlurmLauncher(SETTINGS).cancel_earlier_jobs(tmp_path)) == []


def test_sufficient_nodes_give_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlurm(cluster("healthy")).install(monkeypatch)
    assert unavailable_nodes(SETTINGS) == ""


def test_too_few_nodes_of_a_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlurm(cluster("healthy")).install(monkeypatch)
    settings = SETTINGS.model_copy(update={"slurm": Slurm(partition="short")})
    assert unavailable_nodes(settings) == "2 of 2 nodes of partition short are usable, 4 needed"
