"""Failure signatures: examples, search in logs, findings of jobs."""

from __future__ import annotations

import io
import subprocess
import time
from pathlib import Path

import pytest

from seatrial.diagnose import _TAIL_BYTES, diagnose, explain
from seatrial.diagnose.signatures import MAX_LINE, Signature, search, signatures
from seatrial.model import JobResult, JobState, Measurement

EACH = pytest.mark.parametrize("signature", signatures(), ids=lambda signature: signature.id)


@EACH
def test_signature_matches_its_examples_only(signature: Signature) -> None:
    assert signature.examples
    assert signature.counter_examples
    assert all(signature.matches(example) for example in signature.examples)
    assert not any(signature.matches(example) for example in signature.counter_examples)


@EACH
def test_example_matches_one_signature(signature: Signature) -> None:
    for example in signature.examples:
        assert [other.id for other in signatures() if other.matches(example)] == [signature.id]


@EACH
def test_long_line_is_matched_quickly(signature: Signature) -> None:
    start = time.process_time()
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
    assert time.process_time() - start < 0.5


def titles_and_sources(log: Path) -> list[tuple[str, str]]:
    with log.open("rb") as file:
        return [(finding.title, finding.source) for finding in explain(file, "x.log")]


def test_ids_are_unique() -> None:
    ids = [signature.id for signature in signatures()]
    assert len(ids) == len(set(ids))


def test_search_returns_the_first_matching_line() -> None:
    lines = ["fine", "OSError: [Errno 28] No space left on device", "fine", "again: No space left on device"]
    (match,) = search(lines, "x.log")
    assert (match.signature.id, match.source) == ("host.disk_full", "x.log:2")


def test_symptom_is_ignored_if_there_is_a_cause(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("Connection closed by peer [::1]:1\n")
    assert titles_and_sources(log) == [("A peer closed the connection", "x.log:1")]
    log.write_text("Connection closed by peer [::1]:1\nCUDA out of memory. Tried\n")
    assert titles_and_sources(log) == [("GPU out of memory", "x.log:2")]


def test_end_of_a_binary_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"\xff\x00" * 3 * 2**20 + b"\n" + b"x" * MAX_LINE + b"\nToo many open files\n")
    assert titles_and_sources(log) == [("Too many open files", "x.log, last 4MiB:3")]


@pytest.mark.parametrize("size", [0, 1, _TAIL_BYTES - 20, _TAIL_BYTES, 3 * _TAIL_BYTES])
def test_pipe_is_read_like_a_file(tmp_path: Path, size: int) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"x" * size + b"\nToo many open files\n")
    with subprocess.Popen(["cat", log], stdout=subprocess.PIPE) as cat:
        assert isinstance(cat.stdout, io.BufferedReader)
        findings = explain(cat.stdout, "x.log")
    assert [(finding.title, finding.source) for finding in findings] == titles_and_sources(log) != []


@pytest.mark.parametrize("line", ["", "x", "No module named '", "NVRM: Xid (", "loss \t"])
def test_log_with_millions_of_short_lines_is_searched_in_seconds(line: str) -> None:
    lines = [line] * (2**20 // (len(line) + 1))
    start = time.process_time()
    (match,) = search([*lines, "Too many open files"], "x.log")
    assert match.source == f"x.log:{len(lines) + 1}"
    assert time.process_time() - start < 3


def test_pattern_does_not_match_across_lines() -> None:
    assert _ids("NVRM: Xid (PCI:0000:79:00", "): 48, pid=79") == []
    assert _ids("NVRM: Xid (PCI:0000", "NVRM: Xid (PCI:0000:79:00): 48,", "x): 48,") == ["xid.48"]
    assert _ids("mlx5_core 0000:01:00.0: Link down", "and more") == ["ib.link_down"]


def test_matches_are_in_the_order_of_the_log() -> None:
    matches = search(["Too many open files", "CUDA out of memory", "", "Read-only file system"], "x")
    assert [match.source for match in matches] == ["x:1", "x:2", "x:4"]


def test_fault_in_an_error_and_in_a_log_is_one_finding(tmp_path: Path) -> None:
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
        failed_subject="rank 0",
    )
    error = Measurement(check="train.cnn", subject="rank 0", error="ModuleNotFoundError: No module named 'sklearn'")
    (finding,) = diagnose([result], [error], [], (), {}, tmp_path)
    assert (finding.subject, finding.confidence) == ("rank 0", "high")


def test_refused_job_has_one_finding(tmp_path: Path) -> None:
    """Its logs name the same fault again."""
    folder = tmp_path / "jobs" / "nodes" / "attempt1"
    folder.mkdir(parents=True)
    (folder / "launcher.err").write_text("ModuleNotFoundError: No module named 'torch'\n")
    cause = "no torch. Run first: srun --nodelist=n1 pip list; no image. Run first: ls"
    refused = JobResult(
        job="nodes",
        attempt=1,
        launcher="slurm",
        state=JobState.REFUSED,
        started=0,
        seconds=1,
        startup_s=1,
        failed_subject="n1",
        cause=cause,
    )
    (finding,) = diagnose([refused], [], [], (), {}, tmp_path)
    assert (finding.subject, finding.evidence, finding.confidence) == ("n1", cause, "high")
    assert finding.first_command == "srun --nodelist=n1 pip list"
    completed = refused.model_copy(update={"state": JobState.COMPLETED, "attempt": 2})
    assert diagnose([refused, completed], [], [], (), {}, tmp_path) == (), "corrected since"


def test_completed_job_has_findings_for_causes_only(tmp_path: Path) -> None:
    """Such as an Xid in the log of a job whose checks all passed."""
    results = []
    for number, (state, line) in enumerate(
        [
            (JobState.COMPLETED, "NVRM: Xid (PCI:0000:3b:00): 43, pid=1"),  # a symptom
            (JobState.COMPLETED, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
            (JobState.CANCELLED, "NVRM: Xid (PCI:0000:3b:00): 31, pid=1"),
            (JobState.FAILED, "ModuleNotFoundError: No module named 'sklearn'"),
        ]
    ):
        folder = tmp_path / "jobs" / f"job{number}" / "attempt1"
        folder.mkdir(parents=True)
        ignored = "NCCL INFO Bootstrap : no socket interface found" if state is JobState.COMPLETED else ""
        (folder / "launcher.err").write_text(f"{ignored}\n{line}\n")
        times = {"started": 0, "seconds": 1, "startup_s": 1}
        results.append(
            JobResult(job=f"job{number}", attempt=1, launcher="local", state=state, failed_subject="", **times)
        )
    failed, completed = diagnose(results, [], [], (), {}, tmp_path)
    assert (failed.subject, failed.confidence) == ("job3", "medium")
    assert (completed.subject, completed.confidence) == ("job1", "low")
    assert "79" in completed.title
    assert completed.source.endswith("job1/attempt1/launcher.err:2")


def _ids(*lines: str) -> list[str]:
    return [match.signature.id for match in search(lines, "x.log")]


def test_xid_is_read_from_its_field() -> None:
    assert _ids("NVRM: Xid (PCI:0000:79:00): 48, pid=79, name=79, 31, 13,") == ["xid.48"]
    assert _ids("nvidia-smi: 79 C, Xid errors: 0") == []


def test_harmless_lines_do_not_match() -> None:
    assert _ids("gpu1:1:2 [0] NCCL INFO Using network Socket", "NCCL INFO NET/IB : No device found.") == []


def test_out_of_memory_lines_of_kernel_and_slurm() -> None:
    cgroup = "Memory cgroup out of memory: Killed process 31933 (python3) total-vm:309536kB"
    assert _ids(cgroup, "error: Detected 1 oom_kill event in StepId=1.0.") == [
        "host.out_of_memory",
        "slurm.out_of_memory",
    ]
