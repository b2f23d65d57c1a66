"""Root cause of a failed job: with the real torchrun, and from recorded output."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import pytest

from seatrial.launch import root_cause
from seatrial.launch.rank_status import Rank, read_ranks
from seatrial.model import JobState
from seatrial.util.journal import record_line
from tests.checks.host import mounts
from tests.launch.scripted import CLUSTER_CHECK, GPU_CHECK, TorchrunScript, job, run_scripted

# output of torchrun 2.13 for a killed rank, and for a rank that it ended itself
FAILURE = """[{index}]:
  time      : 2026-11-21_11:57:40
  host      : node0
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""
ENDED = "W1121 11:57:40.321000 33 api.py:1017] Sending process {pid} closing signal SIGTERM\n"


def write_rank(
    folder: Path, rank: int, *records: dict[str, object], status: str = CLUSTER_CHECK, at: float = 100.0
) -> None:
    records = ({"start": CLUSTER_CHECK, "subject": f"n0/rank{rank}"}, *records)
    (folder / f"rank{rank}.jsonl").write_text("".join(map(record_line, records)))
    heartbeat = {"pid": 100 + rank, "node": "n0", "status": status, "progress": "", "time": at}
    (folder / f"rank{rank}.heartbeat.json").write_text(json.dumps(heartbeat))


def error(rank: int, text: str, at: float) -> dict[str, object]:
    fields = {"check": CLUSTER_CHECK, "subject": f"n0/rank{rank}", "rank": rank, "error": text}
    return {"measurement": {**fields, "started": at - 1, "seconds": 1}}


def cause_of(folder: Path, exits: dict[int, int], ended_by_torchrun: tuple[int, ...] = ()) -> root_cause.RootCause:
    """Return the cause for a job whose ranks had these exit codes; the pid of rank N is 100 + N."""
    signals = [ENDED.format(pid=100 + rank) for rank in ended_by_torchrun]
    failures = [FAILURE.format(index=rank, rank=rank, code=code, pid=100 + rank) for rank, code in exits.items()]
    (folder / "launcher.err").write_text("".join([*signals, *failures]))
    return root_cause.job_ended(job(CLUSTER_CHECK), read(folder), 1, folder)


def read(folder: Path) -> list[Rank]:
    ranks = read_ranks(folder, job(CLUSTER_CHECK, GPU_CHECK))
    for rank in ranks:
        rank.read()
    return ranks


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_the_earliest_error_is_the_cause(first: int, second: int, tmp_path: Path) -> None:
    write_rank(tmp_path, first, error(first, "CUDA error", at=50.0))
    write_rank(tmp_path, second, error(second, "Connection closed by peer", at=50.3))
    cause = cause_of(tmp_path, {0: 1, 1: 1})
    assert (cause.rank, cause.cause) == (first, f"{CLUSTER_CHECK}: CUDA error")


def test_error_of_a_rank_that_continued_is_not_the_cause(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, error(0, "too slow", at=10.0), {"start": GPU_CHECK, "subject": "n0/rank0"})
    write_rank(tmp_path, 1, error(1, "CUDA error", at=50.0))
    assert cause_of(tmp_path, {0: 143, 1: 1}, ended_by_torchrun=(0,)).rank == 1


def test_exit_without_message_precedes_peer_errors(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, error(0, "Connection closed by peer", at=50.0))
    write_rank(tmp_path, 1)
    cause = cause_of(tmp_path, {0: 1, 1: 3})
    assert (cause.rank, cause.cause) == (1, f"exit code 3; last status: {CLUSTER_CHECK}")


def test_abort_after_an_error_message_counts_as_reported(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, error(0, "CUDA error", at=50.0))
    write_rank(tmp_path, 1, error(1, "Connection closed by peer", at=50.3))
    assert cause_of(tmp_path, {0: 1, 1: -6}).rank == 0


@pytest.mark.parametrize(("killed", "aborted"), [(0, 1), (1, 0)])
def test_abort_after_a_killed_peer_is_not_the_cause(killed: int, aborted: int, tmp_path: Path) -> None:
    write_rank(tmp_path, killed)
    write_rank(tmp_path, aborted)
    cause = cause_of(tmp_path, {aborted: -6, killed: -9})
    assert cause.rank == killed
    assert cause.cause.startswith(f"killed by SIGKILL; last status: {CLUSTER_CHECK}")


@pytest.mark.parametrize("code", [143, -15])
def test_rank_ended_by_torchrun_is_not_the_cause(code: int, tmp_path: Path) -> None:
    write_rank(tmp_path, 0, status="terminating on SIGTERM", at=40.0)  # the clocks of nodes may differ
    write_rank(tmp_path, 1, error(1, "CUDA error", at=50.0))
    cause = cause_of(tmp_path, {0: code, 1: 1}, ended_by_torchrun=(0,))
    assert (cause.rank, cause.cause) == (1, f"{CLUSTER_CHECK}: CUDA error")


def test_rank_killed_by_torchrun_is_not_the_cause(tmp_path: Path) -> None:
    write_rank(tmp_path, 0)
    write_rank(tmp_path, 1, error(1, "CUDA error", at=50.0))
    assert cause_of(tmp_path, {0: -9, 1: 1}, ended_by_torchrun=(0,)).rank == 1


def test_earlier_sigterm_from_outside_is_the_cause_of_peer_errors(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, error(0, "Connection closed by peer", at=50.0))
    write_rank(tmp_path, 1, status="terminating on SIGTERM", at=49.9)
    cause = cause_of(tmp_path, {0: 1, 1: 143})
    assert (cause.rank, cause.cause) == (1, f"terminated by SIGTERM from outside; last status: {CLUSTER_CHECK}")


def test_sigterm_after_an_earlier_error_is_not_the_cause(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, error(0, "CUDA error", at=50.0))
    write_rank(tmp_path, 1, status="terminating on SIGTERM", at=50.1)
    assert cause_of(tmp_path, {0: 1, 1: 143}).rank == 0


def test_sigterm_during_startup_is_the_cause_if_no_other_is_known(tmp_path: Path) -> None:
    cause = cause_of(tmp_path, {1: -15})
    assert (cause.subject, cause.cause) == ("rank 1", "terminated by SIGTERM from outside; last status: startup")


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    """A sparse log of 8 GiB is read without its size in memory."""
    log = tmp_path / "logs" / "x" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    for path in (log, tmp_path / "launcher.err"):
        with path.open("wb") as file:
            file.truncate(8 << 30)
    with log.open("ab") as file:
        file.write(b"\nOSError: disk error\n")
    write_rank(tmp_path, 0)
    cause = root_cause.job_ended(job(CLUSTER_CHECK), read(tmp_path), 1, tmp_path)
    assert (cause.subject, cause.cause) == ("launcher", "exit code 1. Last error in its log: OSError: disk error")


@mounts.needs_mount
def test_full_run_directory_is_reported(tmp_path: Path) -> None:
    with mounts.tmpfs(tmp_path / "small", "size=64k") as small:
        write_rank(small, 0)
        assert root_cause.job_ended(job(CLUSTER_CHECK), read(small), 1, small).cause == "exit code 1"
        with contextlib.suppress(OSError), (small / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        cause = root_cause.job_ended(job(CLUSTER_CHECK), read(small), 1, small).cause
    assert cause.startswith(f"exit code 1. The file system of {small} is full")


def labelled(node: int, text: str) -> str:
    return "".join(f"{node}: {line}\n" for line in text.splitlines())


def test_torchrun_output_is_read_per_node(tmp_path: Path) -> None:
    """Two nodes can have equal pids: a rank ended by one torchrun differs from a rank that died under the other."""
    write_rank(tmp_path, 0, status="terminating on SIGTERM")
    write_rank(tmp_path, 1)
    two = job(CLUSTER_CHECK).model_copy(update={"nodes": 2, "ranks_per_node": 1})
    died = FAILURE.format(index=0, rank=1, code=-9, pid=4711)
    (tmp_path / "launcher.err").write_text(labelled(0, ENDED.format(pid=4711)) + labelled(1, died))
    cause = root_cause.job_ended(two, read(tmp_path), 1, tmp_path)
    assert (cause.rank, cause.cause.startswith("killed by SIGKILL")) == (1, True)


def test_rank_with_exit_code_0_is_the_cause_of_its_peers_error(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, error(0, "Connection closed by peer", at=50.0))
    write_rank(tmp_path, 1)
    cause = cause_of(tmp_path, {0: 1})
    assert (cause.rank, cause.cause) == (1, f"exit code 0 before the end of its checks; last status: {CLUSTER_CHECK}")


def test_rank_ended_by_torchrun_did_not_exit_early(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, error(0, "CUDA error", at=50.0))
    write_rank(tmp_path, 1)
    assert cause_of(tmp_path, {0: 1}, ended_by_torchrun=(1,)).rank == 0


# output of srun 22.05: tests/fixtures/slurm-22.05/srun-bad-exit-kills.err
_KILLS = """srun: error: node1: task 1: {end}
srun: launch/slurm: _step_signal: Terminating StepId=12.0
0: slurmstepd-node0: error: *** STEP 12.0 ON node0 CANCELLED AT 2026-11-21T10:13:25 ***
srun: error: node0: task 0: Terminated
srun: Force Terminated StepId=12.0
"""


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("Exited with exit code 3", f"exit code 3; last status: {CLUSTER_CHECK}"),
        ("Killed", f"killed by SIGKILL; last status: {CLUSTER_CHECK}"),
        ("Segmentation fault (core dumped)", f"killed by SIGSEGV; last status: {CLUSTER_CHECK}"),
        ("Out Of Memory", f"killed by SIGKILL; last status: {CLUSTER_CHECK}"),
    ],
)
def test_srun_output_gives_the_failed_node_and_exit_code(end: str, expected: str, tmp_path: Path) -> None:
    for rank in 0, 1:
        write_rank(tmp_path, rank)
    (tmp_path / "launcher.err").write_text(_KILLS.format(end=end))
    two = job(CLUSTER_CHECK, placement="nodes").model_copy(update={"nodes": 2, "ranks_per_node": 1})
    cause = root_cause.job_ended(two, read(tmp_path), 1, tmp_path, "Slurm job 7 is FAILED")
    assert (cause.rank, cause.cause.startswith(expected)) == (1, True)


def test_cancelled_job_is_not_attributed_to_a_task(tmp_path: Path) -> None:
    for rank in 0, 1:
        write_rank(tmp_path, rank)
    aborted = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
    (tmp_path / "launcher.err").write_text(aborted + "srun: error: node0: task 0: Terminated\n")
    two = job(CLUSTER_CHECK, placement="nodes").model_copy(update={"nodes": 2, "ranks_per_node": 1})
    cause = root_cause.job_ended(two, read(tmp_path), 1, tmp_path, "Slurm job 7 is CANCELLED")
    assert (cause.subject, cause.cause) == ("launcher", "Slurm job 7 is CANCELLED")


def test_killed_torchrun_is_attributed_to_its_node(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, error(0, "Connection closed by peer", at=50.0))
    write_rank(tmp_path, 1, status="terminating on SIGTERM")
    (tmp_path / "launcher.err").write_text(_KILLS.format(end="Killed"))
    cause = root_cause.job_ended(job(CLUSTER_CHECK), read(tmp_path), 1, tmp_path)
    assert (cause.subject, "killed by SIGKILL" in cause.cause) == ("node1", True)


def test_reset_node_is_the_cause_not_its_peers(tmp_path: Path) -> None:
    """Output of srun 22.05 after a reset of one of two nodes."""
    write_rank(tmp_path, 0, error(0, "Connection reset by peer", at=50.0))
    write_rank(tmp_path, 1)
    (tmp_path / "launcher.err").write_text(
        labelled(0, FAILURE.format(index=0, rank=0, code=1, pid=100))
        + "srun: error: node0: task 0: Exited with exit code 1\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=1.2\n"
        "srun: First task exited 30s ago\n"
        "srun: StepId=1.2 task 1: running\n"
        "srun: StepId=1.2 task 0: exited abnormally\n"
        "srun: Job step aborted: Waiting up to 4 seconds for job step to finish.\n"
        "srun: error: Timed out waiting for job step to complete\n"
    )
    two = job(CLUSTER_CHECK).model_copy(update={"nodes": 2, "ranks_per_node": 1})
    ranks = read(tmp_path)
    assert ranks[1].heartbeat
    ranks[1].heartbeat = ranks[1].heartbeat.model_copy(update={"node": "n1"})
    cause = root_cause.job_ended(two, ranks, 1, tmp_path)
    assert (cause.subject, "does not respond to srun" in cause.cause) == ("n1", True)
    assert cause.shortage
    assert [node.name for node in cause.shortage.missing] == ["n1"]


def test_node_failure_reported_by_srun_is_the_cause(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, error(0, "Connection closed by peer", at=50.0))
    (tmp_path / "launcher.err").write_text("srun: error: Node failure on node1\n")
    cause = root_cause.job_ended(job(CLUSTER_CHECK), read(tmp_path), 1, tmp_path)
    assert (cause.subject, "scontrol show node node1" in cause.cause) == ("node1", True)
    assert cause.shortage
    assert [node.name for node in cause.shortage.missing] == ["node1"]


LATE = f"measured(0, {CLUSTER_CHECK!r}, 'RuntimeError: Connection closed by peer'); sys.exit(1)"
ENDS = {
    "exit code 3; last status: nodes.reachable": "os._exit(3)",
    "killed by signal 40 (SIGRTMIN+6); last status: nodes.reachable": "os.kill(os.getpid(), 40)",
    "killed by SIGSEGV; last status: nodes.reachable": "os.kill(os.getpid(), signal.SIGSEGV)",
    "terminated by SIGTERM from outside; last status: nodes.reachable": (
        "heartbeat(1, 'terminating on SIGTERM'); os._exit(143)"
    ),
    f"{GPU_CHECK}: OSError: no such file": f"measured(1, {GPU_CHECK!r}, 'OSError: no such file'); os._exit(1)",
}


@pytest.mark.parametrize("cause", ENDS)
def test_first_failed_rank_under_torchrun(cause: str, tmp_path: Path) -> None:
    check = CLUSTER_CHECK if CLUSTER_CHECK in cause else GPU_CHECK
    script = f"start(rank, {check!r})\nif rank == 1: {ENDS[cause]}\ntime.sleep(30)"
    (result,), listener = run_scripted(TorchrunScript(script), job(check), tmp_path)
    assert result.state is JobState.FAILED
    assert result.failed_subject.startswith("rank 1 (n0/rank1, pid ")
    assert result.cause.startswith(cause)
    assert listener.errors


def test_lost_connection_under_torchrun_is_not_the_cause(tmp_path: Path) -> None:
    """The peer reports the lost connection and exits before torchrun polls."""
    # the peer waits, so that it never ends first on a busy host
    script = (
        f"start(rank, {CLUSTER_CHECK!r})\ngone = f'{{folder}}/gone'\n"
        "if rank == 1: open(gone, 'w').close(); os._exit(3)\n"
        f"while not os.path.exists(gone): time.sleep(0.01)\n{LATE}"
    )
    (result,), listener = run_scripted(TorchrunScript(script), job(CLUSTER_CHECK), tmp_path)
    assert result.failed_subject.startswith("rank 1 (n0/rank1, pid ")
    assert [where[:2] for where in listener.errors] == [(CLUSTER_CHECK, "n0/rank1")]


def test_rank_killed_in_teardown_under_torchrun(tmp_path: Path) -> None:
    script = (
        "start(rank, GPU_CHECK); measured(rank, GPU_CHECK); heartbeat(rank, 'closing')\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndone(0); os._exit(0)"
    )
    (result,), listener = run_scripted(TorchrunScript(script), job(GPU_CHECK), tmp_path)
    assert result.state is JobState.FAILED
    assert result.cause.startswith("killed by SIGKILL; last status: closing")
    assert [where[0] for where in listener.errors] == [GPU_CHECK]
    assert "after this check, rank 1 (n0/rank1" in listener.errors[0][2]


TWO_NODES = job(CLUSTER_CHECK).model_copy(update={"nodes": 2, "ranks_per_node": 1})


def two_nodes(folder: Path, silent: int, seconds: float) -> list[Rank]:
    """Return the ranks of two nodes, of which one has sent no heartbeat for this long."""
    ranks = read(folder)
    for rank in ranks:
        assert rank.heartbeat
        rank.heartbeat = rank.heartbeat.model_copy(update={"node": f"n{rank.number}"})
    ranks[silent].last_seen = time.monotonic() - seconds
    return ranks


def test_a_silent_node_is_the_cause_and_not_the_peer_that_lost_its_connection(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, error(0, "Connection closed by peer", at=50.0))
    write_rank(tmp_path, 1)
    (tmp_path / "launcher.err").write_text(labelled(0, FAILURE.format(index=0, rank=0, code=1, pid=100)))
    ranks = two_nodes(tmp_path, 1, 12)
    assert list(root_cause.silent_nodes(ranks, TWO_NODES, tmp_path, 10)) == ["n1"]
    states = {"n1": ("gpu-n1", "DOWN: Not responding")}
    cause = root_cause.job_ended(TWO_NODES, ranks, 1, tmp_path, "", states.__getitem__)
    assert (cause.subject, cause.rank) == ("gpu-n1", None)
    assert "DOWN: Not responding" in cause.cause
    assert cause.shortage
    assert (cause.shortage.usable, [node.name for node in cause.shortage.missing]) == (1, ["gpu-n1"])


@pytest.mark.parametrize(("other_rank_s", "silent"), [(9.6, ["n1"]), (0.5, [])])
def test_the_ranks_of_a_silent_node_need_not_reach_the_limit_together(
    other_rank_s: float, silent: list[str], tmp_path: Path
) -> None:
    """Their last heartbeats were up to a second apart: the node died, not the rank that was silent first."""
    node_of_two = TWO_NODES.model_copy(update={"ranks_per_node": 2})
    for number in range(4):
        write_rank(tmp_path, number)
    ranks = read_ranks(tmp_path, node_of_two)
    for rank in ranks:
        rank.read()
        assert rank.heartbeat
        rank.heartbeat = rank.heartbeat.model_copy(update={"node": f"n{rank.number // 2}"})
    ranks[2].last_seen, ranks[3].last_seen = time.monotonic() - other_rank_s, time.monotonic() - 10.1
    assert list(root_cause.silent_nodes(ranks, node_of_two, tmp_path, 10)) == silent


@pytest.mark.parametrize(
    "end",
    [
        labelled(1, FAILURE.format(index=0, rank=1, code=-9, pid=101)),
        "srun: error: n1: task 1: Killed\n",
    ],
)
def test_a_node_that_reports_the_end_of_its_ranks_is_not_silent(end: str, tmp_path: Path) -> None:
    for rank in 0, 1:
        write_rank(tmp_path, rank)
    (tmp_path / "launcher.err").write_text(end)
    assert root_cause.silent_nodes(two_nodes(tmp_path, 1, 99), TWO_NODES, tmp_path, 10) == {}


def test_a_node_whose_ranks_ended_in_order_is_not_silent(tmp_path: Path) -> None:
    write_rank(tmp_path, 0)
    write_rank(tmp_path, 1, error(1, "CUDA error", at=50.0))
    assert root_cause.silent_nodes(two_nodes(tmp_path, 1, 99), TWO_NODES, tmp_path, 10) == {}
    write_rank(tmp_path, 1, status="terminating on SIGTERM")
    assert root_cause.silent_nodes(two_nodes(tmp_path, 1, 99), TWO_NODES, tmp_path, 10) == {}


def test_silence_of_all_nodes_blames_none(tmp_path: Path) -> None:
    for rank in 0, 1:
        write_rank(tmp_path, rank)
    ranks = two_nodes(tmp_path, 1, 99)
    ranks[0].last_seen = ranks[1].last_seen
    assert root_cause.silent_nodes(ranks, TWO_NODES, tmp_path, 10) == {}


# launcher.err of the drill munge-key
ANOTHER_MUNGE_KEY = """\
srun: error: slurm_receive_msgs: [[node1]:6818] failed: Zero Bytes were transmitted or received
srun: error: Task launch for StepId=7.0 failed on node node1: Zero Bytes were transmitted or received
srun: error: Application launch failed: Zero Bytes were transmitted or received
srun: Job step aborted: Waiting up to 4 seconds for job step to finish.
slurmstepd-node0: error: *** STEP 7.0 ON node0 CANCELLED AT 2026-11-29T04:47:31 ***
preflight done: node0.
preflight: node1: the preflight task did not complete within 120 s (srun: error: slurm_receive_msgs: [[node1]:6818] \
failed: Zero Bytes were transmitted or received). Run first: srun --nodelist=node1 hostname
"""


def test_a_node_on_which_srun_cannot_start_a_task_is_missing_with_the_error_of_srun(tmp_path: Path) -> None:
    (tmp_path / "launcher.err").write_text(ANOTHER_MUNGE_KEY)
    cause = root_cause.node_error(TWO_NODES, tmp_path)
    assert cause
    assert (cause.subject, cause.preflight) == ("node1", True)
    assert cause.shortage
    (node,) = cause.shortage.missing
    assert (node.name, cause.shortage.usable) == ("node1", 1)
    assert node.state == "srun cannot start a task on this node: Zero Bytes were transmitted or received"


def test_nodes_with_the_same_missing_requirements_share_a_sentence(tmp_path: Path) -> None:
    lines = [
        *(f"preflight: {node}: no venv. Run first: srun --nodelist={node} ls" for node in ("n0", "n2", "n1")),
        *(f"{number}: preflight: n{number}: no image. Run first: srun --nodelist=n{number} ls" for number in (0, 1, 2)),
    ]
    (tmp_path / "launcher.err").write_text("\n".join(lines))
    cause = root_cause.node_error(TWO_NODES, tmp_path)
    assert cause
    assert (cause.subject, cause.preflight) == ("n0, n1, n2", True)
    assert cause.cause == "no venv. Run first: srun --nodelist=n0 ls; no image. Run first: srun --nodelist=n0 ls"
    (tmp_path / "launcher.err").write_text("\n".join(lines[:2]))
    cause = root_cause.node_error(TWO_NODES, tmp_path)
    assert cause
    assert (cause.subject, cause.cause.count("no venv")) == ("n0, n2", 1)
    (tmp_path / "launcher.err").write_text("preflight: n0: no venv\npreflight: n1: no image\n")
    cause = root_cause.node_error(TWO_NODES, tmp_path)
    assert cause
    assert (cause.subject, cause.cause) == ("n0, n1", "n0: no venv; n1: no image")
