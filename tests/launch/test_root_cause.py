"""Who is named when a job ends with an error: under the real torchrun, and from what it was seen to write."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from seatrial.launch import root_cause
from seatrial.launch.rank_status import Rank, ranks_in
from seatrial.model import JobState
from tests.checks.host import mounts
from tests.launch.scripted import ALONE, TOGETHER, UnderTorchrun, job, played

# As torchrun 2.13 wrote it of a rank that was killed and one that it ended itself.
FAILURE = """[{index}]:
  time      : 2026-11-21_11:57:40
  host      : node0
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""
ENDED = "W1121 11:57:40.321000 33 api.py:1017] Sending process {pid} closing signal SIGTERM\n"


def told(folder: Path, rank: int, *records: dict[str, object], status: str = TOGETHER, at: float = 100.0) -> None:
    lines = [{"start": TOGETHER, "subject": f"n0/rank{rank}"}, *records]
    (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sign = {"pid": 100 + rank, "node": "n0", "status": status, "progress": "", "time": at}
    (folder / f"rank{rank}.heartbeat.json").write_text(json.dumps(sign))


def error(rank: int, text: str, at: float) -> dict[str, object]:
    fields = {"check": TOGETHER, "subject": f"n0/rank{rank}", "rank": rank, "error": text}
    return {"measurement": {**fields, "started": at - 1, "seconds": 1}}


def blamed(folder: Path, exits: dict[int, int], ended_by_torchrun: tuple[int, ...] = ()) -> root_cause.RootCause:
    """What is made of a job whose ranks had these exit codes; the pid of rank N is 100 + N."""
    words = [ENDED.format(pid=100 + rank) for rank in ended_by_torchrun]
    failures = [FAILURE.format(index=rank, rank=rank, code=code, pid=100 + rank) for rank, code in exits.items()]
    (folder / "launcher.err").write_text("".join([*words, *failures]))
    return root_cause.job_ended(job(TOGETHER), read(folder), 1, folder)


def read(folder: Path) -> list[Rank]:
    ranks = ranks_in(folder, job(TOGETHER, ALONE))
    for rank in ranks:
        rank.read()
    return ranks


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_the_earliest_error_is_the_cause(first: int, second: int, tmp_path: Path) -> None:
    told(tmp_path, first, error(first, "CUDA error", at=50.0))
    told(tmp_path, second, error(second, "Connection closed by peer", at=50.3))
    found = blamed(tmp_path, {0: 1, 1: 1})
    assert (found.rank, found.cause) == (first, f"{TOGETHER}: CUDA error")


def test_an_error_that_a_rank_went_on_after_did_not_end_the_job(tmp_path: Path) -> None:
    told(tmp_path, 0, error(0, "too slow", at=10.0), {"start": ALONE, "subject": "n0/rank0"})
    told(tmp_path, 1, error(1, "CUDA error", at=50.0))
    assert blamed(tmp_path, {0: 143, 1: 1}, ended_by_torchrun=(0,)).rank == 1


def test_an_exit_without_a_word_comes_before_what_its_peers_say(tmp_path: Path) -> None:
    told(tmp_path, 0, error(0, "Connection closed by peer", at=50.0))
    told(tmp_path, 1)
    found = blamed(tmp_path, {0: 1, 1: 3})
    assert (found.rank, found.cause) == (1, f"exit code 3; last status: {TOGETHER}")


def test_a_rank_that_says_why_and_aborts_on_its_way_out_is_not_wordless(tmp_path: Path) -> None:
    told(tmp_path, 0, error(0, "CUDA error", at=50.0))
    told(tmp_path, 1, error(1, "Connection closed by peer", at=50.3))
    assert blamed(tmp_path, {0: 1, 1: -6}).rank == 0


@pytest.mark.parametrize(("killed", "aborted"), [(0, 1), (1, 0)])
def test_a_rank_that_aborts_because_a_peer_was_killed_is_not_the_cause(
    killed: int, aborted: int, tmp_path: Path
) -> None:
    told(tmp_path, killed)
    told(tmp_path, aborted)
    found = blamed(tmp_path, {aborted: -6, killed: -9})
    assert found.rank == killed
    assert found.cause.startswith(f"killed by SIGKILL; last status: {TOGETHER}")


@pytest.mark.parametrize("code", [143, -15])
def test_what_torchrun_ended_itself_is_not_the_cause(code: int, tmp_path: Path) -> None:
    told(tmp_path, 0, status="terminating on SIGTERM", at=40.0)  # the clocks of nodes may differ
    told(tmp_path, 1, error(1, "CUDA error", at=50.0))
    found = blamed(tmp_path, {0: code, 1: 1}, ended_by_torchrun=(0,))
    assert (found.rank, found.cause) == (1, f"{TOGETHER}: CUDA error")


def test_a_survivor_that_torchrun_had_to_kill_is_not_the_cause(tmp_path: Path) -> None:
    told(tmp_path, 0)
    told(tmp_path, 1, error(1, "CUDA error", at=50.0))
    assert blamed(tmp_path, {0: -9, 1: 1}, ended_by_torchrun=(0,)).rank == 1


def test_sigterm_from_outside_is_the_cause_of_what_its_peers_say_later(tmp_path: Path) -> None:
    told(tmp_path, 0, error(0, "Connection closed by peer", at=50.0))
    told(tmp_path, 1, status="terminating on SIGTERM", at=49.9)
    found = blamed(tmp_path, {0: 1, 1: 143})
    assert (found.rank, found.cause) == (1, f"terminated by SIGTERM from outside; last status: {TOGETHER}")


def test_sigterm_of_a_scheduler_because_of_an_earlier_error_is_not(tmp_path: Path) -> None:
    told(tmp_path, 0, error(0, "CUDA error", at=50.0))
    told(tmp_path, 1, status="terminating on SIGTERM", at=50.1)
    assert blamed(tmp_path, {0: 1, 1: 143}).rank == 0


def test_sigterm_before_a_rank_could_tell_is_named_for_want_of_a_better_cause(tmp_path: Path) -> None:
    found = blamed(tmp_path, {1: -15})
    assert (found.subject, found.cause) == ("rank 1", "terminated by SIGTERM from outside; last status: startup")


def test_logs_are_read_from_their_end(tmp_path: Path) -> None:
    """A log of 8 GiB (a hole, on disk nothing) takes neither memory nor time."""
    log = tmp_path / "logs" / "x" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    for path in (log, tmp_path / "launcher.err"):
        with path.open("wb") as file:
            file.truncate(8 << 30)
    with log.open("ab") as file:
        file.write(b"\nOSError: the last words\n")
    told(tmp_path, 0)
    found = root_cause.job_ended(job(TOGETHER), read(tmp_path), 1, tmp_path)
    assert (found.subject, found.cause) == ("launcher", "exit code 1. Last error in its log: OSError: the last words")


@mounts.needs_mount
def test_a_run_directory_without_room_is_told(tmp_path: Path) -> None:
    with mounts.tmpfs(tmp_path / "small", "size=64k") as small:
        told(small, 0)
        assert root_cause.job_ended(job(TOGETHER), read(small), 1, small).cause == "exit code 1"
        with contextlib.suppress(OSError), (small / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        cause = root_cause.job_ended(job(TOGETHER), read(small), 1, small).cause
    assert cause.startswith(f"exit code 1. The file system of {small} is full")


def labelled(node: int, text: str) -> str:
    return "".join(f"{node}: {line}\n" for line in text.splitlines())


def test_the_torchrun_of_each_node_is_read_by_itself(tmp_path: Path) -> None:
    """Pids of two nodes may be the same: what one torchrun ended is not what the other saw die."""
    told(tmp_path, 0, status="terminating on SIGTERM")
    told(tmp_path, 1)
    two = job(TOGETHER).model_copy(update={"nodes": 2, "ranks_per_node": 1})
    died = FAILURE.format(index=0, rank=1, code=-9, pid=4711)
    (tmp_path / "launcher.err").write_text(labelled(0, ENDED.format(pid=4711)) + labelled(1, died))
    found = root_cause.job_ended(two, read(tmp_path), 1, tmp_path)
    assert (found.rank, found.cause.startswith("killed by SIGKILL")) == (1, True)


def test_a_rank_that_leaves_with_exit_code_0_is_the_cause_of_what_its_peer_says(tmp_path: Path) -> None:
    told(tmp_path, 0, error(0, "Connection closed by peer", at=50.0))
    told(tmp_path, 1)
    found = blamed(tmp_path, {0: 1})
    assert (found.rank, found.cause) == (1, f"exit code 0 before the end of its checks; last status: {TOGETHER}")


def test_a_rank_that_torchrun_ended_did_not_leave(tmp_path: Path) -> None:
    told(tmp_path, 0, error(0, "CUDA error", at=50.0))
    told(tmp_path, 1)
    assert blamed(tmp_path, {0: 1}, ended_by_torchrun=(1,)).rank == 0


# As srun 22.05 wrote it: tests/fixtures/slurm-22.05/srun-bad-exit-kills.err
_KILLS = """srun: error: node1: task 1: {how}
srun: launch/slurm: _step_signal: Terminating StepId=12.0
0: slurmstepd-node0: error: *** STEP 12.0 ON node0 CANCELLED AT 2026-11-21T10:13:25 ***
srun: error: node0: task 0: Terminated
srun: Force Terminated StepId=12.0
"""


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("Exited with exit code 3", f"exit code 3; last status: {TOGETHER}"),
        ("Killed", f"killed by SIGKILL; last status: {TOGETHER}"),
        ("Segmentation fault (core dumped)", f"killed by SIGSEGV; last status: {TOGETHER}"),
        ("Out Of Memory", f"killed by SIGKILL; last status: {TOGETHER}"),
    ],
)
def test_srun_names_the_node_whose_worker_ended(how: str, cause: str, tmp_path: Path) -> None:
    for rank in 0, 1:
        told(tmp_path, rank)
    (tmp_path / "launcher.err").write_text(_KILLS.format(how=how))
    two = job(TOGETHER, placement="nodes").model_copy(update={"nodes": 2, "ranks_per_node": 1})
    found = root_cause.job_ended(two, read(tmp_path), 1, tmp_path, "Slurm job 7 is FAILED")
    assert (found.rank, found.cause.startswith(cause)) == (1, True)


def test_a_job_that_somebody_cancels_is_no_fault_of_its_tasks(tmp_path: Path) -> None:
    for rank in 0, 1:
        told(tmp_path, rank)
    aborted = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
    (tmp_path / "launcher.err").write_text(aborted + "srun: error: node0: task 0: Terminated\n")
    two = job(TOGETHER, placement="nodes").model_copy(update={"nodes": 2, "ranks_per_node": 1})
    found = root_cause.job_ended(two, read(tmp_path), 1, tmp_path, "Slurm job 7 is CANCELLED")
    assert (found.subject, found.cause) == ("launcher", "Slurm job 7 is CANCELLED")


def test_a_torchrun_that_is_killed_is_named_by_its_node(tmp_path: Path) -> None:
    told(tmp_path, 0, error(0, "Connection closed by peer", at=50.0))
    told(tmp_path, 1, status="terminating on SIGTERM")
    (tmp_path / "launcher.err").write_text(_KILLS.format(how="Killed"))
    found = root_cause.job_ended(job(TOGETHER), read(tmp_path), 1, tmp_path)
    assert (found.subject, "killed by SIGKILL" in found.cause) == ("node1", True)


def test_a_node_that_was_reset_is_named_not_the_peers_that_lost_it(tmp_path: Path) -> None:
    """srun 22.05, of two nodes of which one was reset and its slurmd came back."""
    told(tmp_path, 0, error(0, "Connection reset by peer", at=50.0))
    told(tmp_path, 1)
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
    two = job(TOGETHER).model_copy(update={"nodes": 2, "ranks_per_node": 1})
    ranks = read(tmp_path)
    assert ranks[1].heartbeat
    ranks[1].heartbeat = ranks[1].heartbeat.model_copy(update={"node": "n1"})
    found = root_cause.job_ended(two, ranks, 1, tmp_path)
    assert (found.subject, "does not respond to srun" in found.cause) == ("n1", True)


def test_a_node_that_slurm_lost_is_named(tmp_path: Path) -> None:
    told(tmp_path, 0, error(0, "Connection closed by peer", at=50.0))
    (tmp_path / "launcher.err").write_text("srun: error: Node failure on node1\n")
    found = root_cause.job_ended(job(TOGETHER), read(tmp_path), 1, tmp_path)
    assert (found.subject, "scontrol show node node1" in found.cause) == ("node1", True)


LATE = f"measured(0, {TOGETHER!r}, 'RuntimeError: Connection closed by peer'); sys.exit(1)"
ENDS = {
    "exit code 3; last status: nodes.reachable": "os._exit(3)",
    "killed by signal 40 (SIGRTMIN+6); last status: nodes.reachable": "os.kill(os.getpid(), 40)",
    "killed by SIGSEGV; last status: nodes.reachable": "os.kill(os.getpid(), signal.SIGSEGV)",
    "terminated by SIGTERM from outside; last status: nodes.reachable": (
        "heartbeat(1, 'terminating on SIGTERM'); os._exit(143)"
    ),
    f"{ALONE}: OSError: no such file": f"measured(1, {ALONE!r}, 'OSError: no such file'); os._exit(1)",
}


@pytest.mark.parametrize("cause", ENDS)
def test_under_torchrun_the_rank_that_ended_first_is_named(cause: str, tmp_path: Path) -> None:
    mine = TOGETHER if TOGETHER in cause else ALONE
    script = f"start(rank, {mine!r})\nif rank == 1: {ENDS[cause]}\ntime.sleep(30)"
    (result,), heard = played(UnderTorchrun(script), job(mine), tmp_path)
    assert result.state is JobState.FAILED
    assert result.failed_subject.startswith("rank 1 (n0/rank1, pid ")
    assert result.cause.startswith(cause)
    assert heard.errors


def test_under_torchrun_a_lost_connection_is_not_the_cause(tmp_path: Path) -> None:
    """The peer tells of it, and ends, before torchrun has looked."""
    # the peer waits for it: on a busy machine it might be the first to end
    script = (
        f"start(rank, {TOGETHER!r})\ngone = f'{{folder}}/gone'\nif rank == 1: open(gone, 'w').close(); os._exit(3)\n"
        f"while not os.path.exists(gone): time.sleep(0.01)\n{LATE}"
    )
    (result,), heard = played(UnderTorchrun(script), job(TOGETHER), tmp_path)
    assert result.failed_subject.startswith("rank 1 (n0/rank1, pid ")
    assert [where[:2] for where in heard.errors] == [(TOGETHER, "n0/rank1")]


def test_under_torchrun_a_rank_killed_while_it_closes_is_named(tmp_path: Path) -> None:
    script = (
        "start(rank, ALONE); measured(rank, ALONE); heartbeat(rank, 'closing')\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndone(0); os._exit(0)"
    )
    (result,), heard = played(UnderTorchrun(script), job(ALONE), tmp_path)
    assert result.state is JobState.FAILED
    assert result.cause.startswith("killed by SIGKILL; last status: closing")
    assert [where[0] for where in heard.errors] == [ALONE]
    assert "after this check, rank 1 (n0/rank1" in heard.errors[0][2]
