"""Watching ranks that are slow, hung, done or damaged; a script in a real process plays the ranks."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.checks import catalog
from seatrial.config.schema import Limits
from seatrial.launch.local import LocalJob
from seatrial.launch.rank_status import Rank
from seatrial.launch.watch import _sleep, run_job
from seatrial.model import JobState
from seatrial.util import processes
from seatrial.util.journal import JournalReader, record_line
from tests.checks.host.mounts import CAN_MOUNT
from tests.launch.scripted import CLUSTER_CHECK, GPU_CHECK, RecordingListener, Scripted, job, run_scripted


def test_exiting_rank_has_the_teardown_time(tmp_path: Path) -> None:
    script = (
        "start(0, CLUSTER_CHECK); start(1, CLUSTER_CHECK); measured(1, CLUSTER_CHECK, 'CUDA error')\n"
        "heartbeat(0, 'terminating on SIGTERM'); idle(2); sys.exit(1)"
    )
    (result,), _ = run_scripted(Scripted(script), job(CLUSTER_CHECK), tmp_path, heartbeat_timeout_s=0.8)
    assert (result.state, result.cause) == (JobState.FAILED, f"{CLUSTER_CHECK}: CUDA error")


@pytest.mark.parametrize(("unreadable", "state"), [((1,), JobState.COMPLETED), ((), JobState.TIMEOUT)])
def test_start_of_ranks_whose_files_cannot_be_read_has_no_limit(
    tmp_path: Path, unreadable: tuple[int, ...], state: JobState
) -> None:
    two_nodes = job(GPU_CHECK).model_copy(update={"nodes": 2, "ranks_per_node": 1})
    script = "start(0, GPU_CHECK); beat(2, 0); measured(0, GPU_CHECK); done(0)"
    (result,), _ = run_scripted(Scripted(script, unreadable_nodes=unreadable), two_nodes, tmp_path, startup_s=1)
    assert result.state is state


def test_refused_job_measures_nothing(tmp_path: Path) -> None:
    """No measurement with the error for each check, and no second attempt."""
    script = "print('preflight: n0: no torch. Run first: ls', file=sys.stderr); sys.exit(1)"
    (result,), listener = run_scripted(Scripted(script), job(GPU_CHECK, CLUSTER_CHECK), tmp_path)
    assert (result.state, result.failed_subject, listener.measurements) == (JobState.REFUSED, "n0", [])


def test_ctrl_c_while_a_refused_job_ends_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancel = LocalJob.cancel

    def interrupted_cancel(self: LocalJob, *, node_lost: bool = False) -> str:
        monkeypatch.setattr(LocalJob, "cancel", cancel)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalJob, "cancel", interrupted_cancel)
    script = "print('preflight: n0: no torch. Run first: ls', file=sys.stderr); sys.exit(1)"
    listener = RecordingListener()
    results = run_job(Scripted(script), job(GPU_CHECK), tmp_path, Limits(startup_s=30), catalog(), listener)
    assert next(results).state is JobState.REFUSED
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert listener.measurements == []


class Interrupting(RecordingListener):
    def show_status(self, text: str) -> None:
        if text == GPU_CHECK:
            raise KeyboardInterrupt


def test_measurements_fetched_on_ctrl_c_are_kept_without_errors(tmp_path: Path) -> None:
    script = (
        "def leave(*_): measured(0, GPU_CHECK); measured(1, GPU_CHECK, 'a peer has gone'); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "start(1, GPU_CHECK); start(0, GPU_CHECK); time.sleep(60)"
    )
    listener = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        list(run_job(Scripted(script), job(GPU_CHECK), tmp_path, Limits(startup_s=30), catalog(), listener))
    assert [(measurement.rank, measurement.error) for measurement in listener.measurements] == [(0, None)]


def test_time_stopped_does_not_count_as_missing_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.monotonic()
    journal, heartbeat = JournalReader(tmp_path / "rank0.jsonl"), tmp_path / "rank0.heartbeat.json"
    rank = Rank(0, (GPU_CHECK,), journal, heartbeat, last_seen=before)
    stop = f"kill -STOP {os.getpid()}; sleep 2; kill -CONT {os.getpid()}"
    monkeypatch.setattr("seatrial.launch.watch.time.sleep", lambda _: subprocess.run(["sh", "-c", stop], check=True))
    _sleep([rank])
    assert before + 1.8 < (rank.last_seen or 0.0) <= time.monotonic()


MEASURED = "for rank in 0, 1: start(rank, GPU_CHECK); measured(rank, GPU_CHECK)\n"


def test_finished_rank_needs_no_heartbeat(tmp_path: Path) -> None:
    script = (
        "for rank in 0, 1: start(rank, GPU_CHECK)\n"
        "measured(0, GPU_CHECK); done(0); beat(3, 1); measured(1, GPU_CHECK); done(1)"
    )
    (result,), listener = run_scripted(Scripted(script), job(GPU_CHECK), tmp_path, heartbeat_timeout_s=2)
    assert (result.state, result.cause, listener.errors) == (JobState.COMPLETED, "", [])


def test_rank_hung_in_teardown_is_the_cause(tmp_path: Path) -> None:
    script = MEASURED + "done(0); heartbeat(1, 'closing'); idle(60)"
    (result,), listener = run_scripted(Scripted(script), job(GPU_CHECK), tmp_path, heartbeat_timeout_s=0.8)
    assert result.state is JobState.HUNG
    assert result.failed_subject.startswith("rank 1 (n0/rank1")
    assert "last status: closing" in result.cause
    assert [error[0] for error in listener.errors] == [GPU_CHECK]
    assert "after this check, rank 1 (n0/rank1" in listener.errors[0][2]


def test_terminating_rank_needs_no_heartbeat(tmp_path: Path) -> None:
    script = (
        "for rank in 0, 1: start(rank, GPU_CHECK)\n"
        "heartbeat(0, 'terminating on SIGTERM'); beat(3, 1); measured(1, GPU_CHECK); done(1); sys.exit(1)"
    )
    (result,), _ = run_scripted(Scripted(script), job(GPU_CHECK), tmp_path, heartbeat_timeout_s=2)
    assert result.state is JobState.FAILED


def test_launcher_that_outlives_its_ranks_is_hung(tmp_path: Path) -> None:
    script = MEASURED + "done(0); done(1); idle(60)"
    (result,), listener = run_scripted(Scripted(script), job(GPU_CHECK), tmp_path, heartbeat_timeout_s=0.5)
    assert result.state is JobState.HUNG
    assert "all ranks ended at least 0.5 s ago" in result.cause
    assert len(listener.errors) == 1


def test_cluster_check_time_counts_from_the_last_start(tmp_path: Path) -> None:
    script = (
        "start(0, CLUSTER_CHECK); start(1, GPU_CHECK); beat(1.5, 0, 1); measured(1, GPU_CHECK)\n"
        "start(1, CLUSTER_CHECK)\n"
        "for rank in 0, 1: measured(rank, CLUSTER_CHECK); done(rank)"
    )
    checks = job(GPU_CHECK, CLUSTER_CHECK, limits={CLUSTER_CHECK: 1})
    (result,), _ = run_scripted(Scripted("start(0, GPU_CHECK); measured(0, GPU_CHECK)\n" + script), checks, tmp_path)
    assert (result.state, result.cause) == (JobState.COMPLETED, "")


def test_gpu_check_time_counts_from_each_ranks_start(tmp_path: Path) -> None:
    script = "start(0, GPU_CHECK); beat(2.2, 0); start(1, GPU_CHECK); beat(60, 0, 1)"
    (result,), _ = run_scripted(Scripted(script), job(GPU_CHECK, limits={GPU_CHECK: 2.5}), tmp_path)
    assert result.state is JobState.TIMEOUT
    assert result.failed_subject.startswith("rank 0 (n0/rank0")


def test_late_rank_in_an_earlier_check_is_the_cause(tmp_path: Path) -> None:
    script = "start(0, GPU_CHECK); measured(0, GPU_CHECK); start(0, CLUSTER_CHECK); start(1, GPU_CHECK); beat(60, 0, 1)"
    checks = job(GPU_CHECK, CLUSTER_CHECK, limits={GPU_CHECK: 1, CLUSTER_CHECK: 0.5})
    (result,), listener = run_scripted(Scripted(script), checks, tmp_path)
    assert result.state is JobState.TIMEOUT
    assert result.failed_subject.startswith("rank 1 (n0/rank1")
    assert f"{GPU_CHECK} exceeded its time limit of 1 s" in result.cause
    assert {(check, subject) for check, subject, _ in listener.errors} == {
        (GPU_CHECK, "n0/rank1"),
        (CLUSTER_CHECK, "n0/rank1"),
    }


def test_all_late_ranks_are_counted(tmp_path: Path) -> None:
    script = "start(0, CLUSTER_CHECK); start(1, CLUSTER_CHECK); beat(60, 0, 1, status=CLUSTER_CHECK)"
    (result,), listener = run_scripted(Scripted(script), job(CLUSTER_CHECK, limits={CLUSTER_CHECK: 0.5}), tmp_path)
    assert (result.state, result.failed_subject) == (JobState.TIMEOUT, "2 ranks")
    assert listener.errors[0][:2] == (CLUSTER_CHECK, "cluster")


def test_least_advanced_rank_is_the_cause_of_a_job_timeout(tmp_path: Path) -> None:
    script = "start(0, GPU_CHECK); measured(0, GPU_CHECK); done(0); start(1, GPU_CHECK); beat(60, 1)"
    (result,), listener = run_scripted(Scripted(script), job(GPU_CHECK, limit_s=3), tmp_path)
    assert result.state is JobState.TIMEOUT
    assert "the job exceeded its time limit of 3 s" in result.cause
    assert result.failed_subject.startswith("rank 1 (n0/rank1")
    assert [error[:2] for error in listener.errors] == [(GPU_CHECK, "n0/rank1")]


def test_crash_gives_an_error_for_each_missing_measurement(tmp_path: Path) -> None:
    script = "for rank in 0, 1, 2: start(rank, GPU_CHECK)\nmeasured(0, GPU_CHECK); sys.exit(1)"
    (result,), listener = run_scripted(Scripted(script), job(GPU_CHECK, ranks=3), tmp_path)
    assert result.state is JobState.FAILED
    assert [error[:2] for error in listener.errors] == [(GPU_CHECK, "n0/rank1"), (GPU_CHECK, "n0/rank2")]


def test_crash_between_checks_is_an_error_and_other_checks_run(tmp_path: Path) -> None:
    again = "for rank in 0, 1: start(rank, CLUSTER_CHECK); measured(rank, CLUSTER_CHECK); done(rank)"
    results, listener = run_scripted(Scripted(MEASURED + "sys.exit(3)", again), job(GPU_CHECK, CLUSTER_CHECK), tmp_path)
    assert [result.state for result in results] == [JobState.FAILED, JobState.COMPLETED]
    assert [error[:2] for error in listener.errors] == [(GPU_CHECK, "cluster")]
    assert "after this check, launcher: exit code 3" in listener.errors[0][2]
    assert {measurement.check for measurement in listener.measurements if not measurement.error} == {
        GPU_CHECK,
        CLUSTER_CHECK,
    }


GOOD = {"check": "train.cnn", "subject": "n0/rank1", "rank": 1}
DAMAGE: dict[str, bytes | dict[str, object]] = {  # a dictionary: written with its digest, as by a worker
    "a list": b"[1]",
    "a number": b"5",
    "an unknown record": {"surprise": 1},
    "a measurement that is a number": {"measurement": 5},
    "a measurement without a check": {"measurement": {}},
    "a measurement of another version": {"measurement": {**GOOD, "new": 1}},
    "a measurement without its digest": json.dumps({"measurement": GOOD}).encode(),
    "a changed digit": record_line({"measurement": GOOD}).strip().replace("rank1", "rank3").encode(),
    "a measurement of another rank": {"measurement": {**GOOD, "rank": 0}},
    "a measurement of another check": {"measurement": {**GOOD, "check": "train.ddp"}},
    "the start of nothing": {"start": 5, "subject": "x"},
    "the start of another check": {"start": "nosuch", "subject": "x"},
    "not done": {"done": "soon"},
    "depth": b"[" * 100_000,
    "no UTF-8": b'{"start": "\xff\xfe"}',
    "zeros": bytes(100),
    "an object as deep as can be read": b'{"a":' * 900 + b"1" + b"}" * 900,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_journal_is_an_error_of_its_rank(damage: bytes | dict[str, object], tmp_path: Path) -> None:
    line = damage if isinstance(damage, bytes) else record_line(damage).strip().encode()
    script = f"for rank in 0, 1: start(rank, GPU_CHECK)\nmeasured(0, GPU_CHECK); done(0); raw(1, {line!r})"
    (result,), listener = run_scripted(Scripted(script), job(GPU_CHECK), tmp_path)
    assert result.state is JobState.FAILED
    assert result.failed_subject.startswith("rank 1 (n0/rank1")
    assert "invalid record in its journal" in result.cause
    assert len(result.cause) < 400
    assert listener.errors
    assert all("invalid record" in error for _, _, error in listener.errors)


def test_a_half_written_measurement_of_a_rank_that_exited_with_0_is_an_error_with_its_file(tmp_path: Path) -> None:
    half = record_line({"measurement": GOOD})[:-20].encode()
    script = "for rank in 0, 1: start(rank, GPU_CHECK)\nmeasured(0, GPU_CHECK); done(0)\n"
    script += f"open(folder + '/rank1.jsonl', 'ab').write({half!r})"
    (result,), listener = run_scripted(Scripted(script), job(GPU_CHECK), tmp_path)
    assert result.state is JobState.COMPLETED
    ((_, subject, error),) = listener.errors
    assert subject == "n0/rank1"
    assert str(tmp_path / "jobs/ranks/attempt1/rank1.jsonl") in error


@pytest.mark.parametrize("heartbeat", ["[]", "5", "{}", '{"pid": "x"}', "[" * 100_000, "\x00"])
def test_damaged_heartbeat_does_not_count(heartbeat: str, tmp_path: Path) -> None:
    script = f"start(0, GPU_CHECK); open(folder + '/rank0.heartbeat.json', 'w').write({heartbeat!r}); idle(60)"
    (result,), _ = run_scripted(Scripted(script), job(GPU_CHECK, ranks=1), tmp_path, heartbeat_timeout_s=0.5)
    assert (result.state, result.failed_subject.startswith("rank 0 (n0/rank0")) == (JobState.HUNG, True)


def test_journal_takes_precedence_over_heartbeat(tmp_path: Path) -> None:
    script = (
        "start(0, GPU_CHECK); heartbeat(0, GPU_CHECK, 'epoch 5 of 5'); idle(0.3); measured(0, GPU_CHECK)\n"
        "write(0, start=CLUSTER_CHECK, subject='n0/rank0', time=0); idle(60)"
    )
    (result,), _ = run_scripted(
        Scripted(script), job(GPU_CHECK, CLUSTER_CHECK, ranks=1), tmp_path, heartbeat_timeout_s=2
    )
    assert f"last status: {CLUSTER_CHECK}" in result.cause


def test_heartbeat_adds_progress_of_the_same_check(tmp_path: Path) -> None:
    script = "start(0, GPU_CHECK); heartbeat(0, GPU_CHECK, 'epoch 5 of 5'); idle(60)"
    (result,), _ = run_scripted(Scripted(script), job(GPU_CHECK, ranks=1), tmp_path, heartbeat_timeout_s=0.5)
    assert f"last status: {GPU_CHECK}: epoch 5 of 5" in result.cause


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    if not CAN_MOUNT:
        pytest.skip("mounting a small filesystem needs CAP_SYS_ADMIN")
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", mount], check=True)
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


def test_full_disk_is_not_reported_as_a_hang(tiny_disk: Path) -> None:
    script = (
        "start(0, GPU_CHECK)\ntry: open(folder + '/filler', 'wb').write(bytes(1 << 20))\nexcept OSError: pass\nidle(60)"
    )
    with pytest.raises(OSError, match="No space left") as failure:
        run_scripted(Scripted(script), job(GPU_CHECK, ranks=1), tiny_disk, heartbeat_timeout_s=0.5)
    assert failure.value.errno == errno.ENOSPC


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup v1 freezer: its processes are in state D and ignore SIGKILL."""
    if os.geteuid() != 0 or not os.access(FREEZER, os.W_OK):
        pytest.skip("needs root, and a writable freezer of cgroup v1")
    group = FREEZER / f"seatrial-test-{os.getpid()}"
    group.mkdir()
    yield group
    (group / "freezer.state").write_text("THAWED")
    while (group / "cgroup.procs").read_text():
        os.sched_yield()
    group.rmdir()


@pytest.mark.parametrize("measured", [False, True])
def test_process_in_uninterruptible_sleep_does_not_block(
    measured: bool, freezer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SIGKILL_WAIT_S", 0.5)
    monkeypatch.setattr(LocalJob, "cancel", lambda self, node_lost: processes.stop(self.child, grace_s=0.5))
    rest = "measured(0, GPU_CHECK); done(0); os._exit(0)" if measured else "idle(60)"
    script = (
        "start(0, GPU_CHECK); pid = os.fork()\n"
        f"while pid and open('{freezer}/freezer.state').read() != 'FROZEN\\n': time.sleep(0.01)\n"
        f"if pid: {rest}\n"
        f"open('{freezer}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        f"open('{freezer}/freezer.state', 'w').write('FROZEN')\ntime.sleep(60)"
    )
    (result,), listener = run_scripted(Scripted(script), job(GPU_CHECK, ranks=1), tmp_path, heartbeat_timeout_s=1)
    pid = (freezer / "cgroup.procs").read_text().strip()
    assert result.state is JobState.HUNG
    assert f"still running after SIGKILL: pid {pid} (state disk-sleep)" in result.cause
    assert any("still running after SIGKILL" in text for text in listener.warnings)
    assert listener.errors, "also if all checks were measured"
