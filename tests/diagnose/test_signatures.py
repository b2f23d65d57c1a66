from __future__ import annotations

import time
from pathlib import Path

import pytest

from seatrial.diagnose import diagnose, explain
from seatrial.diagnose.signatures import MAX_LINE, Signature, search, signatures
from seatrial.model import JobResult, JobState, Measurement

EACH = pytest.mark.parametrize("signature", signatures(), ids=lambda signature: signature.id)


@EACH
def test_a_signature_is_proven_by_its_examples(signature: Signature) -> None:
    assert signature.examples
    assert signature.counter_examples
    assert all(signature.matches(example) for example in signature.examples)
    assert not any(signature.matches(example) for example in signature.counter_examples)


@EACH
def test_no_example_means_two_things(signature: Signature) -> None:
    for example in signature.examples:
        assert [other.id for other in signatures() if other.matches(example)] == [signature.id]


@EACH
def test_a_hostile_line_takes_no_time(signature: Signature) -> None:
    clock = time.monotonic()
    for line in (
        "a" * 10**6,
        "No module named '" * 10**4,
        "[Errno " * 10**5,
        " \t" * 10**5 + "x",
        "gai error: " * 10**4,
        "NVRM: Xid (" * 10**4,
        "Got completion from peer " * 10**4,
        "FileNotFoundError cache-" * 10**4,
        "mlx5_core DataLoader worker " * 10**4,
        "loss" + " " * 10**5,
    ):
        signature.matches(line)
    assert time.monotonic() - clock < 0.5


def test_ids_are_unique() -> None:
    ids = [signature.id for signature in signatures()]
    assert len(ids) == len(set(ids))


def test_the_first_line_of_each_kind_is_found_and_located() -> None:
    lines = ["fine", "OSError: [Errno 28] No space left on device", "fine", "again: No space left on device"]
    (match,) = search(lines, "x.log")
    assert (match.signature.id, match.source) == ("host.disk_full", "x.log:2")


def test_a_symptom_is_silent_beside_a_cause(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("Connection closed by peer [::1]:1\n")
    assert [finding.what for finding in explain(log)] == ["A peer closed the connection"]
    log.write_text("Connection closed by peer [::1]:1\nCUDA out of memory. Tried\n")
    assert [finding.what for finding in explain(log)] == ["GPU out of memory"]


def test_a_log_is_read_from_its_end_and_its_bytes_are_not_trusted(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"\xff\x00" * 3 * 2**20 + b"\n" + b"x" * MAX_LINE + b"\nToo many open files\n")
    assert [finding.what for finding in explain(log)] == ["Too many open files"]


def test_errors_and_the_logs_of_broken_jobs_are_diagnosed_once(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "ranks" / "attempt1"
    folder.mkdir(parents=True)
    (folder / "launcher.err").write_text("ModuleNotFoundError: No module named 'sklearn'\n")
    result = JobResult(
        job="ranks",
        attempt=1,
        launcher="local",
        state=JobState.FAILED,
        started=0,
        seconds=1,
        startup_s=1,
        culprit="rank 0",
    )
    error = Measurement(check="train.cnn", subject="rank 0", error="ModuleNotFoundError: No module named 'sklearn'")
    (finding,) = diagnose([result], [error], tmp_path)
    assert (finding.where, finding.confidence) == ("rank 0", "high")
    fine = result.model_copy(update={"state": JobState.COMPLETED})
    assert diagnose([fine], [], tmp_path) == ()


def _named(*lines: str) -> list[str]:
    return [match.signature.id for match in search(lines, "x.log")]


def test_an_xid_is_read_from_its_place_and_not_from_other_numbers() -> None:
    assert _named("NVRM: Xid (PCI:0000:79:00): 48, pid=79, name=79, 31, 13,") == ["xid.48"]
    assert _named("nvidia-smi: 79 C, Xid errors: 0") == []


def test_what_is_harmless_is_not_told() -> None:
    assert _named("gpu1:1:2 [0] NCCL INFO Using network Socket", "NCCL INFO NET/IB : No device found.") == []


def test_the_kernel_s_and_slurm_s_words_for_no_memory_differ() -> None:
    cgroup = "Memory cgroup out of memory: Killed process 31933 (python3) total-vm:309536kB"
    assert _named(cgroup, "error: Detected 1 oom_kill event in StepId=1.0.") == [
        "host.out_of_memory",
        "slurm.out_of_memory",
    ]
