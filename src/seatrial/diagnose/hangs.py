"""Jobs that hung → findings: the rank that did not arrive, and where each rank was before the job was cancelled."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from seatrial.diagnose.causes import Run, node_command
from seatrial.diagnose.flight_recorder import hang_text, hang_title
from seatrial.discover.rank_stacks import FOLDER, STACKS, STATES, HangEvidence, read_evidence
from seatrial.model import Finding, JobResult, JobState, Outcome
from seatrial.model.trial import Action, Confidence
from seatrial.util.text import rank_list

CAUSE = "rank_hangs"
# Process state of /proc/PID/stat → fix and action
_FIXES: dict[str, tuple[str, Action]] = {
    "D": (
        "The process waits in the kernel, mostly for storage or a driver: read the kernel's log of its node and test "
        "the mounts there. SIGKILL does not end it; a reboot does.",
        "reboot-node",
    ),
    "T": ("Find what sent SIGSTOP or SIGTSTP: a job suspended by the scheduler, a debugger, a shell.", "retry-job"),
    "t": ("A debugger holds the process: end it.", "retry-job"),
    "Z": ("The process has ended: read its log and the kernel's log (out of memory).", "retry-job"),
}
_READ_STACK = (
    "Read the stack of this rank: it shows its present call, while the others wait in the collective. If that is a "
    "call of a driver or file system, test the device or mount on its node."
)


def hang_findings(results: Sequence[JobResult], run: Run, run_dir: Path) -> Iterator[Finding]:
    """One finding for each attempt that hung, with the errors that it explains."""
    for result in results:
        attempt = run_dir / "jobs" / result.job / f"attempt{result.attempt}"
        if result.state not in (JobState.HUNG, JobState.TIMEOUT) or not (attempt / FOLDER).is_dir():
            continue
        matches = [re.fullmatch(r"rank(\d{1,7})\.heartbeat\.json", path.name) for path in attempt.glob("rank*")]
        rank_count = max((int(match[1]) for match in matches if match), default=-1) + 1
        if evidence := read_evidence(attempt, rank_count):
            errors = (verdict for verdict in run.verdicts if verdict.outcome is Outcome.ERROR)
            explained = (verdict for verdict in errors if result.cause and result.cause in verdict.detail)
            yield _finding(result, evidence, attempt, run.node_prefix).explaining(explained)


def _finding(result: JobResult, evidence: HangEvidence, attempt: Path, node_prefix: str) -> Finding:
    ranks_at_fault = evidence.ranks_at_fault
    snapshot = evidence.snapshots[ranks_at_fault[0]] if ranks_at_fault else None  # of the first rank at fault
    title, confidence = _title(evidence)
    fix, action = _FIXES.get(snapshot.state if snapshot else "", (_READ_STACK, "none"))
    texts = [evidence.text(), *(hang_text(hang) for hang in evidence.hangs[:1])]
    stacks = attempt / FOLDER / STACKS.format(ranks_at_fault[0] if ranks_at_fault else 0)
    command = f"cat {shlex.quote(str(stacks if stacks.is_file() else attempt / FOLDER / STATES))}"
    if snapshot and snapshot.state == "D":
        command = node_command("dmesg -T | grep -A 20 'blocked for more than' | tail -n 40", snapshot.node, node_prefix)
    place = re.search(r"\(([^,()]+)", result.failed_subject)
    return Finding(
        title=title,
        subject=place[1] if place else result.failed_subject,
        confidence=confidence,
        evidence=". ".join(texts),
        first_command=command,
        fix=fix,
        source=f"stacks and process states of job {result.job}, attempt {result.attempt}: {attempt / FOLDER}",
        cause=CAUSE,
        action=action,
    )


def _title(evidence: HangEvidence) -> tuple[str, Confidence]:
    ranks_at_fault = evidence.ranks_at_fault
    if not ranks_at_fault:
        is_one_place = len(evidence.ranks_by_place()) == 1
        return ("All ranks hang at the same place" if is_one_place else "Ranks hang at different places"), "low"
    name = rank_list(ranks_at_fault).capitalize()
    if state := evidence.snapshots[ranks_at_fault[0]].abnormal_state:
        return f"{name}: {state}", "high"
    if evidence.hangs and evidence.hangs[0].ranks_at_fault == ranks_at_fault:
        title, _, confidence = hang_title(evidence.hangs[0])
        return title, confidence
    return f"{name} did not arrive where all others wait", "medium"
