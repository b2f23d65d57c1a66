"""Confirmations, and findings from logs that show the cause of verdicts."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from seatrial.checks import catalog
from seatrial.checks.cause import Cause
from seatrial.diagnose import diagnose, explain
from seatrial.diagnose.cause_data import causes
from seatrial.diagnose.causes import Run
from seatrial.diagnose.confirm import merge, unmerged
from seatrial.diagnose.signature import Match, Signature
from seatrial.diagnose.signatures import signatures
from seatrial.model import Finding, JobResult, JobState, Outcome, Verdict

XID = "NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>"


def cause(identifier: str, subject: str = "n0/gpu1", confidence: str = "medium") -> Finding:
    fields = {"title": "t", "subject": subject, "confidence": confidence, "evidence": "e", "cause": identifier}
    return Finding.model_validate(fields)


def from_log(identifier: str, subject: str) -> Finding:
    assert identifier in {signature.id for signature in signatures()}
    return Finding(
        title="t", subject=subject, confidence="medium", evidence="Log line: x", source="a.log:3", signature=identifier
    )


@pytest.mark.parametrize("subject", ["n0", "n0/gpu1", "ranks", ""])
def test_log_and_verdict_at_one_place_are_one_finding(subject: str) -> None:
    other = from_log("xid.48", subject)
    (merged,) = merge([cause("uncorrectable_memory_errors")], [other], frozenset({"ranks"}))
    assert (merged.cause, merged.confidence, merged.confirmed_by) == ("uncorrectable_memory_errors", "high", (other,))
    assert "a.log:3" in merged.evidence
    assert unmerged([merged]) == [other]


@pytest.mark.parametrize(
    ("identifier", "subject"), [("xid.48", "n1/gpu1"), ("xid.48", "n0/gpu2"), ("host.disk_full", "n0")]
)
def test_other_places_and_other_causes_stay_apart(identifier: str, subject: str) -> None:
    known = [cause("uncorrectable_memory_errors"), cause("uncorrectable_memory_errors", "n3/gpu0")]
    other = from_log(identifier, subject)
    assert merge(known, [other], frozenset({"ranks"})) == [*known, other]
    assert unmerged([*known, other]) == [other]


def diagnosed(tmp_path: Path, log: str, *verdicts: Verdict) -> tuple[Finding, ...]:
    folder = tmp_path / "jobs" / "ranks" / "attempt1"
    folder.mkdir(parents=True)
    (folder / "rank0.err").write_text(log)
    result = JobResult(
        job="ranks", attempt=1, state=JobState.FAILED, launcher="local", started=0.0, startup_s=0.0, seconds=1.0
    )
    return diagnose(Run(verdicts, [], catalog()), [result], [], tmp_path)


def test_confirmation_raises_the_confidence_of_its_root(tmp_path: Path) -> None:
    root = "mlx5_core 0000:3b:00.0: Port module event[error]: module 0, Cable error, Bus stuck"
    confirmation = "mlx5_core 0000:3b:00.0: Port module event: module 0, Cable unplugged"
    (alone,) = diagnosed(tmp_path / "a", f"{root}\n")
    (confirmed,) = diagnosed(tmp_path / "b", f"{root}\n{confirmation}\n")
    assert (alone.title, alone.confidence) == (confirmed.title, "medium")
    assert confirmed.confidence == "high"
    assert confirmation in confirmed.evidence
    assert "rank0.err:2" in confirmed.evidence


@pytest.mark.parametrize(
    ("file", "time", "confidence"),
    [
        ("a.log", 0, "high"),
        ("a.log", 599, "high"),
        ("a.log", None, "high"),
        ("a.log", 3600, "medium"),
        ("b.log", 0, "medium"),
    ],
)
def test_explain_counts_confirmations_of_the_same_log_and_time(file: str, time: float | None, confidence: str) -> None:
    by_id = {signature.id: signature for signature in signatures()}
    root = next(by_id[name] for name in by_id if any(_confirms(other, name) for other in by_id.values()))
    confirmation = next(other for other in by_id.values() if _confirms(other, root.id))
    matches = [
        Match(signature=root, line=root.examples[0], source="a.log:1", time=1000.0),
        Match(signature=confirmation, line="x", source=f"{file}:2", time=None if time is None else 1000.0 + time),
    ]
    (finding,) = explain(matches)
    assert (finding.signature, finding.confidence) == (root.id, confidence)


def _confirms(other: Signature, identifier: str) -> bool:
    is_root = next(each.role for each in signatures() if each.id == identifier) == "root"
    return is_root and other.role == "confirmation" and other.confirms_signature(identifier)


def test_confirmation_of_another_component_does_not(tmp_path: Path) -> None:
    xid = "        SW Power Cap                              : Active"
    (finding,) = diagnosed(tmp_path, f"OSError: [Errno 28] No space left on device\n{xid}\n")
    assert finding.confidence == "medium"


def test_verdict_and_log_of_a_failed_job_are_one_finding(tmp_path: Path) -> None:
    ecc = Verdict("gpu.inventory", "n0/gpu1", Outcome.FAIL, "ecc_uncorrected", evidence="ecc_uncorrected = 3")
    (finding,) = diagnosed(tmp_path, f"{XID}\n", ecc)
    assert (finding.cause, finding.subject) == ("uncorrectable_memory_errors", "n0/gpu1")
    assert XID in finding.evidence


@pytest.mark.parametrize("row", [row for row in causes() if row.signatures], ids=lambda row: row.id)
def test_signatures_and_causes_that_a_cause_names_exist(row: Cause) -> None:
    for pattern in row.signatures:
        assert any(fnmatchcase(signature.id, pattern) for signature in signatures()), pattern
