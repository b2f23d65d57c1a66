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
    clock = time.process_time()
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
    assert time.process_time() - clock < 0.5


def explained(log: Path) -> list[tuple[str, str]]:
    with log.open("rb") as file:
        return [(finding.title, finding.source) for finding in explain(file, "x.log")]


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
    assert explained(log) == [("A peer closed the connection", "x.log:1")]
    log.write_text("Connection closed by peer [::1]:1\nCUDA out of memory. Tried\n")
    assert explained(log) == [("GPU out of memory", "x.log:2")]


def test_a_log_is_read_from_its_end_and_its_bytes_are_not_trusted(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"\xff\x00" * 3 * 2**20 + b"\n" + b"x" * MAX_LINE + b"\nToo many open files\n")
    assert explained(log) == [("Too many open files", "x.log, last 4MiB:3")]


@pytest.mark.parametrize("size", [0, 1, _TAIL_BYTES - 20, _TAIL_BYTES, 3 * _TAIL_BYTES])
def test_a_pipe_is_read_like_a_file(tmp_path: Path, size: int) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"x" * size + b"\nToo many open files\n")
    with subprocess.Popen(["cat", log], stdout=subprocess.PIPE) as cat:
        assert isinstance(cat.stdout, io.BufferedReader)
        found = explain(cat.stdout, "x.log")
    assert [(finding.title, finding.source) for finding in found] == explained(log) != []


@pytest.mark.parametrize("line", ["", "x", "No module named '", "NVRM: Xid (", "loss \t"])
def test_a_log_of_millions_of_short_lines_takes_seconds(line: str) -> None:
    lines = [line] * (2**20 // (len(line) + 1))
    clock = time.process_time()
    (match,) = search([*lines, "Too many open files"], "x.log")
    assert match.source == f"x.log:{len(lines) + 1}"
    assert time.process_time() - clock < 3


def test_a_line_means_nothing_together_with_the_next() -> None:
    assert _named("NVRM: Xid (PCI:0000:79:00", "): 48, pid=79") == []
    assert _named("NVRM: Xid (PCI:0000", "NVRM: Xid (PCI:0000:79:00): 48,", "x): 48,") == ["xid.48"]
    assert _named("mlx5_core 0000:01:00.0: Link down", "and more") == ["ib.link_down"]


def test_what_is_found_stands_in_the_order_of_the_log() -> None:
    found = search(["Too many open files", "CUDA out of memory", "", "Read-only file system"], "x")
    assert [match.source for match in found] == ["x:1", "x:2", "x:4"]


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
        failed_subject="rank 0",
    )
    error = Measurement(check="train.cnn", subject="rank 0", error="ModuleNotFoundError: No module named 'sklearn'")
    (finding,) = diagnose([result], [error], [], (), {}, tmp_path)
    assert (finding.subject, finding.confidence) == ("rank 0", "high")


def test_what_a_job_came_through_is_told_last_and_without_its_symptoms(tmp_path: Path) -> None:
    """An Xid, say, in the log of a job whose checks all passed: no verdict, and yet no reason to be silent."""
    results = []
    for number, (state, line) in enumerate(
        [
            (JobState.COMPLETED, "NVRM: Xid (PCI:0000:3b:00): 43, pid=1"),  # a symptom: of what, nobody can say
            (JobState.COMPLETED, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
            (JobState.CANCELLED, "NVRM: Xid (PCI:0000:3b:00): 31, pid=1"),
            (JobState.FAILED, "ModuleNotFoundError: No module named 'sklearn'"),
        ]
    ):
        folder = tmp_path / "jobs" / f"job{number}" / "attempt1"
        folder.mkdir(parents=True)
        said = "NCCL INFO Bootstrap : no socket interface found" if state is JobState.COMPLETED else ""
        (folder / "launcher.err").write_text(f"{said}\n{line}\n")
        times = {"started": 0, "seconds": 1, "startup_s": 1}
        results.append(
            JobResult(job=f"job{number}", attempt=1, launcher="local", state=state, failed_subject="", **times)
        )
    failed, survived = diagnose(results, [], [], (), {}, tmp_path)
    assert (failed.subject, failed.confidence) == ("job3", "medium")
    assert (survived.subject, survived.confidence) == ("job1", "low")
    assert "79" in survived.title
    assert survived.source.endswith("job1/attempt1/launcher.err:2")
    assert survived.evidence.startswith("The job came to its end all the same. ")


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
