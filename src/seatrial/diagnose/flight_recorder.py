"""Dumps of torch's flight recorder → findings: the rank that did not arrive in a collective, or called another one."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from seatrial.discover.collective_hangs import CollectiveHang, collective_hangs
from seatrial.discover.flight_recorder import Dump, Operation, dump_name, read_dump
from seatrial.model import Finding
from seatrial.model.trial import Confidence
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more, error_text, rank_list

_MAX_NAMED = 4


def recorder_findings(paths: Iterable[Path], errors: list[str]) -> tuple[list[Finding], list[str]]:
    """One finding for each hang in the dumps, causes first, and a note for each set of dumps without a hang.

    Dumps with the same folder and prefix are one set. A dump that cannot be read adds a sentence to ``errors``.
    """
    files_by_prefix = grouped(((path.parent, name[0]), path) for path in paths if (name := dump_name(path)))
    findings, notes = list[Finding](), list[str]()
    for (folder, prefix), files in files_by_prefix.items():
        dumps = list(_readable(files, errors))
        hangs = collective_hangs(dumps)
        for hang in hangs:
            findings.append(_finding(hang, hangs, folder, f"{folder / prefix}*"))
        if dumps and not hangs:
            ranks = rank_list(dump.rank for dump in dumps)
            notes.append(f"{folder / prefix}*: all collectives in the flight-recorder dumps of {ranks} are completed")
    return findings, notes


def hang_text(hang: CollectiveHang) -> str:
    """The text about a hang: the ranks that wait, where they wait, and the last operations of the other ranks."""
    waiting = next(iter(hang.waiting.values()))  # the operation of the first rank that waits
    input_sizes = [list(tensor) for tensor in waiting.input_sizes[:_MAX_NAMED]]
    sizes = f", input {input_sizes}" if input_sizes else ""
    dtype = f" {', '.join(waiting.dtypes)}" if waiting.dtypes else ""
    texts = [f"process group {hang.group}: {_plural(hang.waiting, 'waits', 'wait')} in {hang.name} {hang.seq}"]
    texts[0] += f"{sizes}{dtype} ({waiting.state}){_called(waiting)}"
    for rank, operation in list(hang.absent.items())[:_MAX_NAMED]:
        if operation is None:
            last = "it has recorded no collective of this group"
        else:
            last = f"its last one is {operation.name} {operation.seq} ({operation.state}){_called(operation)}"
        elsewhere = f"; it waits in process group {hang.elsewhere[rank]}" if rank in hang.elsewhere else ""
        texts.append(f"rank {rank} has not enqueued this collective: {last}{elsewhere}")
    if len(hang.absent) > _MAX_NAMED:
        texts.append(f"in all, {rank_list(hang.absent)} have not enqueued this collective")
    for name, ranks_by_value in hang.differences.items():
        values = [f"{value or 'none'} on {rank_list(ranks)}" for value, ranks in ranks_by_value.items()]
        texts.append(f"{name} differs: {and_more(values, _MAX_NAMED, separator='; ')}")
    at_fault = [hang.waiting[rank] for rank in hang.ranks_at_fault if rank in hang.waiting] if hang.differences else []
    if at_fault and at_fault[0].frame:
        texts.append(f"the operation of {rank_list(hang.ranks_at_fault)} was called from {at_fault[0].frame}")
    if hang.not_started:
        texts.append(
            f"the GPU of {rank_list(hang.not_started)} has not started the collective; the GPUs of the other ranks have"
        )
    if hang.without_dump:
        texts.append(f"{rank_list(hang.without_dump)} left no dump")
    return ". ".join(text[:1].upper() + text[1:] for text in texts)


def _readable(paths: Sequence[Path], errors: list[str]) -> Iterable[Dump]:
    for path in sorted(paths):
        try:
            yield read_dump(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error_text(error)
            errors.append(f"{path}: {reason}; this dump is skipped")


def _finding(hang: CollectiveHang, hangs: Sequence[CollectiveHang], folder: Path, source: str) -> Finding:
    ranks_at_fault = hang.ranks_at_fault
    title, fix, confidence = hang_title(hang)
    others = [other.group for other in hangs if other is not hang]
    consequences = (
        f". Also incomplete: process group {and_more(others, _MAX_NAMED)}" if others and ranks_at_fault else ""
    )
    return Finding(
        title=title,
        subject=rank_list(ranks_at_fault) if ranks_at_fault else f"process group {hang.group}",
        confidence=confidence,
        evidence=f"{hang_text(hang)}{consequences}",
        first_command=_first_command(hang, folder),
        fix=fix,
        source=source,
        cause="rank_not_in_collective" if hang.absent else "",
        action="fix-config" if hang.differences and not hang.absent else "none",
    )


def hang_title(hang: CollectiveHang) -> tuple[str, str, Confidence]:
    """Title, fix and confidence of the finding."""
    ranks = rank_list(hang.ranks_at_fault)
    if hang.absent and hang.ranks_at_fault:
        return (
            f"{ranks.capitalize()} did not arrive in the {hang.name} in which the others wait",
            "Find what the absent rank does instead: its stack, its log, its process state (D: storage or driver, T: "
            "stopped). A branch that only some ranks take, such as saving on rank 0, must not skip a collective.",
            "high",
        )
    if hang.absent:
        return (
            f"Process group {hang.group} waits for ranks that wait in another process group",
            "Look at the other process group first; ranks that use two groups must call them in the same order.",
            "low",
        )
    if hang.differences:
        name = next(iter(hang.differences))
        return (
            f"Ranks differ in the {name} of the same collective",
            "All ranks must call the same collectives in the same order with the same sizes: look for a branch on the "
            "rank, an uneven last batch, unused parameters, or different versions of the program.",
            "high",
        )
    if hang.without_dump:
        return (
            f"{ranks.capitalize()} left no dump; the others wait in {hang.name}",
            "Find why the rank wrote no dump: it was killed (dmesg), its node is gone, or it could not write the file. "
            "Until then the rank is only the most likely cause.",
            "medium",
        )
    if hang.not_started:
        return (
            f"The GPU of {ranks} has not started the {hang.name} in which the others wait",
            "An earlier kernel or copy occupies this GPU: look for Xid errors and for the work before this collective.",
            "medium",
        )
    if not hang.members_recorded:
        return (
            f"A {hang.name} does not complete; its process group may have members without a dump",
            "The dumps do not name the members of the group (gloo). Compare the ranks above with the world size, and "
            "collect the dumps of all ranks.",
            "low",
        )
    return (
        f"All ranks arrived in {hang.name}, and it does not complete",
        "No rank is absent: the transfer itself hangs. Look for link and network errors: Xid, ibstat, NCCL's log.",
        "medium",
    )


def _first_command(hang: CollectiveHang, folder: Path) -> str:
    """The stack of an absent rank, the state of an occupied GPU, or the line that calls a different collective."""
    ranks_at_fault = hang.ranks_at_fault or tuple(hang.waiting)
    if hang.differences and not hang.absent:
        frame = hang.waiting[ranks_at_fault[0]].frame if ranks_at_fault[0] in hang.waiting else None
        if frame:
            return f"sed -n {max(1, frame.line - 5)},{frame.line + 5}p {shlex.quote(frame.file)}"
        return f"ls -l {shlex.quote(str(folder))}"
    if not hang.ranks_at_fault and not hang.members_recorded:
        return f"ls -l {shlex.quote(str(folder))}"
    if not hang.absent and not hang.without_dump:
        return "nvidia-smi -q -d UTILIZATION,PERFORMANCE; dmesg -T | grep -i xid | tail"
    condition = f"grep -qzx RANK={ranks_at_fault[0]} $p/environ 2>/dev/null"  # on the node of the rank
    return f"for p in /proc/[0-9]*; do {condition} && py-spy dump --pid ${{p#/proc/}}; done"


def _called(operation: Operation) -> str:
    return f", called from {operation.frame}" if operation.frame else ""


def _plural(ranks: Iterable[int], singular: str, plural: str) -> str:
    text = rank_list(ranks)
    return f"{text} {singular if text.startswith('rank ') else plural}"
