"""Collects the stacks and process states of all ranks of a hanging job before the job is cancelled, in limited time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from seatrial.discover.rank_stacks import (
    FOLDER,
    RECORDER,
    STACKS,
    STATES,
    STATES_SCRIPT,
    HangEvidence,
    read_evidence,
)
from seatrial.launch.base import StartedJob
from seatrial.launch.rank_status import Rank
from seatrial.launch.root_cause import RootCause
from seatrial.model import Artifact, SeatrialError
from seatrial.util import stack_dump
from seatrial.util.files import atomic_write
from seatrial.util.input_files import read_bytes

STATES_LIMIT_S = 8.0  # a step of srun takes seconds on many nodes; py-spy takes up to 2 s per rank
# A rank checks for a request once a second; without a shared run directory the files arrive up to 2 s later
STACKS_LIMIT_S = 5.0
ANSWER_LIMIT_S = 5.0  # a step of srun takes about a second
_POLL_S = 0.1
MAX_ARTIFACTS = 64  # stacks listed in one measurement; the files of the other ranks are in the same folder
_SILENT_S = 3.0  # a rank that has written no heartbeat for this long will not write its stack either


def with_evidence(cause: RootCause, running: StartedJob, ranks: Sequence[Rank], attempt: Path) -> RootCause:
    """Return ``cause`` with the stacks of the ranks in its text; ``attempt``: the attempt's folder.

    If ``cause`` names no single rank and the stacks show exactly one rank at fault, that rank becomes its subject. If
    the stacks cannot be collected, the text says why.
    """
    problem, now = "", time.monotonic()
    running_ranks = [rank for rank in ranks if rank.heartbeat_expected and now - (rank.last_seen or 0.0) < _SILENT_S]
    try:
        stack_dump.request(attempt)
        result = running.run_on_nodes(STATES_SCRIPT, attempt, STATES_LIMIT_S)
        if result.code is None:
            problem = f"; not all nodes answered within {STATES_LIMIT_S:g} s"
        _wait_for_stacks(running, running_ranks, attempt)
        _save(attempt, len(ranks), result.out + result.err)
        evidence = read_evidence(attempt, len(ranks))
    except (OSError, SeatrialError) as error:
        return replace(cause, cause=f"{cause.cause}. The stacks of the ranks could not be collected: {error}")
    if evidence is None:
        return replace(cause, cause=f"{cause.cause}. No rank wrote its stack{problem}")
    subject, number = _subject(cause, evidence, ranks)
    return replace(cause, subject=subject, rank=number, cause=f"{cause.cause}. Stacks: {evidence.text()}{problem}")


def all_nodes_answer(running: StartedJob, nodes: int, attempt: Path) -> bool:
    """Return whether all ``nodes`` of the job run a command. If they do, no node is lost, and silent ranks hang."""
    try:
        result = running.run_on_nodes("echo up", attempt, ANSWER_LIMIT_S)
    except (OSError, SeatrialError):
        return False
    return result.out.split().count("up") == nodes


def stack_artifacts(attempt: Path, numbers: Sequence[int]) -> tuple[Artifact, ...]:
    """Return the file with the process states, and the files with the stacks of the first ``MAX_ARTIFACTS`` ranks."""
    folder, run_dir = attempt / FOLDER, attempt.parents[2]
    titles = {folder / STATES: "process states of the ranks"}
    titles |= {folder / STACKS.format(number): f"stacks of rank {number}" for number in numbers[:MAX_ARTIFACTS]}
    titles = {path: title for path, title in titles.items() if path.is_file()}
    return tuple(Artifact(path=str(path.relative_to(run_dir)), title=title) for path, title in titles.items())


def _save(attempt: Path, rank_count: int, states: str) -> None:
    """Save the process states, and copies of the ranks' files: a rank that continues changes its files."""
    source, folder = attempt / stack_dump.FOLDER, attempt / FOLDER
    folder.mkdir(exist_ok=True)
    atomic_write(folder / STATES, states.encode(errors="replace"))
    for rank in range(rank_count):
        on_request, blocked = stack_dump.stack_files(source, rank)
        copies = [
            (blocked, folder / STACKS.format(rank)),
            (on_request, folder / STACKS.format(rank)),  # if it exists, it replaces the copy above
            (stack_dump.recorder_file(source, rank), folder / RECORDER.format(rank)),
        ]
        for path, copy in copies:
            if path.is_file() and (content := read_bytes(path)):
                copy.write_bytes(content)


def _subject(cause: RootCause, evidence: HangEvidence, ranks: Sequence[Rank]) -> tuple[str, int | None]:
    """Return the name and number of the only rank at fault in the evidence; else subject and rank of ``cause``."""
    if cause.rank is not None or len(evidence.ranks_at_fault) != 1:
        return cause.subject, cause.rank
    rank = ranks[evidence.ranks_at_fault[0]]
    return rank.name, rank.number


def _wait_for_stacks(running: StartedJob, ranks: Sequence[Rank], attempt: Path) -> None:
    """Wait until these ranks have written their stacks and flight recorders, at most ``STACKS_LIMIT_S``."""
    folder, deadline = attempt / stack_dump.FOLDER, time.monotonic() + STACKS_LIMIT_S
    missing = []
    for rank in ranks:
        _, blocked = stack_dump.stack_files(folder, rank.number)
        if blocked.exists():  # a rank that can write its stack has created this file at its start
            missing.append(stack_dump.recorder_file(folder, rank.number))  # written after the stack
    while missing and time.monotonic() < deadline:
        running.poll()  # fetches files
        missing = [path for path in missing if not path.exists()]
        time.sleep(_POLL_S)
