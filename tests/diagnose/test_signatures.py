"""Failure signatures: their examples, and findings of jobs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.diagnose import diagnose
from seatrial.diagnose import signatures as module
from seatrial.diagnose.causes import Run
from seatrial.diagnose.errnos import errno_rows
from seatrial.diagnose.log_search import search_text
from seatrial.diagnose.signature import Match, Signature
from seatrial.diagnose.signatures import all_signatures, signatures
from seatrial.diagnose.xid import xid_rows
from seatrial.model import JobResult, JobState, Measurement
from seatrial.util import data_files

LONG_LINES = (
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
)


def ids_where(failed: Callable[[Signature], object]) -> list[str]:
    """Return the IDs of the signatures for which ``failed`` is true: one test for all, since there are hundreds."""
    return [signature.id for signature in signatures() if failed(signature)]


def test_signatures_from_the_cache_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = module._shipped_rows()
    assert [path.name.partition("-")[0] for path in (tmp_path / "seatrial").iterdir()] == ["signatures"]
    with monkeypatch.context() as patch:
        patch.setattr(data_files, "parse", None)
        assert module._shipped_rows() == rows
    original = data_files.texts
    monkeypatch.setattr(data_files, "texts", lambda folder: original(folder)[:1])  # an edited file
    assert len(module._shipped_rows()) < len(rows)


def test_signatures_match_their_examples_only() -> None:
    assert ids_where(lambda signature: not signature.examples or not signature.counter_examples) == []
    missed = [(each.id, example) for each in signatures() for example in each.examples if not each.matches(example)]
    assert missed == []
    wrong = [(each.id, example) for each in signatures() for example in each.counter_examples if each.matches(example)]
    assert wrong == []


def test_examples_match_one_signature() -> None:
    """Except of signatures that require facts, which come before others of their line."""
    certain = [signature for signature in signatures() if not signature.requires]
    matches = {
        (signature.id, example): [other.id for other in certain if other.matches(example)]
        for signature in certain
        for example in signature.examples
    }
    assert {example: ids for example, ids in matches.items() if ids != [example[0]]} == {}


def test_long_lines_are_matched_quickly() -> None:
    def is_slow(signature: Signature) -> bool:
        start = time.process_time()
        for line in LONG_LINES:
            signature.matches(line)
        return time.process_time() - start >= 0.5

    assert ids_where(is_slow) == []


def test_values_of_a_line_fill_the_command() -> None:
    assert ids_where(Signature.nested_repeat) == []
    for signature in all_signatures():
        for example in signature.examples:
            (match,) = (each for each in [signature.values(example)] if each is not None)
            finding = Match(signature=signature, line=example, source="x", values=match).finding("", "high")
            assert not re.search(r"\{[a-z_]+\}|''", f"{finding.first_command} {finding.fix} {finding.title}"), example
            # a reason of any program may have no command that needs no value
            assert finding.first_command or not signature.first_command or signature.role == "family", example


def test_commands_use_extended_regular_expressions_only() -> None:
    r"""GNU grep -E has no \d: such a command finds nothing."""
    assert ids_where(lambda signature: bool(re.search(r"grep -\w*E[^|;]*\\d", signature.first_command))) == []


def test_ids_are_unique() -> None:
    rows = [*(row for rows in data_files.read_all("signatures") for row in rows), *xid_rows(), *errno_rows()]
    ids = [row["id"] for row in rows]
    assert len(ids) == len(set(ids))


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
    (finding,) = diagnose(Run((), [error], {}), [result], [], tmp_path)
    assert (finding.subject, finding.confidence) == ("rank 0", "high")


def test_completed_job_has_findings_for_roots_only(tmp_path: Path) -> None:
    """Such as an Xid in the log of a job whose checks all passed."""
    results = []
    for number, (state, line) in enumerate(
        [
            (JobState.COMPLETED, "NVRM: Xid (PCI:0000:3b:00): 43, pid=1"),  # a cascade
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
    failed, completed = diagnose(Run((), [], {}), results, [], tmp_path)
    assert (failed.subject, failed.confidence) == ("job3", "medium")
    assert (completed.subject, completed.confidence) == ("job1", "low")
    assert "79" in completed.title
    assert completed.source.endswith("job1/attempt1/launcher.err:2")


def _ids(*lines: str) -> list[str]:
    return [match.signature.id for match in search_text("\n".join(lines), "x.log")]


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
