"""The place at which each rank of a job hangs: its Python stack, process state and collective.

All three are read from files that launch/hang.py has collected before it cancels the job.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from seatrial.discover.collective_hangs import CollectiveHang, collective_hangs
from seatrial.discover.file_readers import read_or_none
from seatrial.discover.flight_recorder import Dump, Frame, read_dump, user_frame
from seatrial.util.grouping import grouped
from seatrial.util.input_files import read_text
from seatrial.util.text import and_more, printable, rank_list

FOLDER = "hang"  # in the folder of an attempt: the files that were collected before its cancellation
STATES = "states.txt"  # output of STATES_SCRIPT
STACKS = "rank{}.txt"  # Python stacks of one rank
RECORDER = "comm_lib_trace_rank_{}"  # torch's name for a rank's dump of its flight recorder
_MAX_BYTES = 2**20  # a larger file counts as unreadable
_MAX_NAMED = 6  # places in ``HangEvidence.text``
# States of a process, proc(5), that can be the cause of a hang
PROCESS_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "uninterruptible sleep, waiting for I/O",
    "Z": "has ended, not yet reaped",
}
# Runs on each node; $0 is the attempt's folder there. It creates the file stacks/wanted, upon which the ranks write
# their stacks. It prints one line per worker: rank, pid, parent, state, kernel function. Then it prints the stacks that
# py-spy reads, even of a stopped process; py-spy itself stops no process. Each line begins with the node, since srun
# mixes the lines of several nodes.
STATES_SCRIPT = r"""
states() {
    mkdir -p "$1/stacks" && touch "$1/stacks/wanted"
    worker="-m seatrial.worker ${1%/attempt*}/job.json ${1##*/attempt}"
    pids=()
    for folder in /proc/[0-9]*; do
        # of a process that has ended, words would be those of the one before
        mapfile -d "" words <"$folder/cmdline" || continue
        [[ ${words[*]:1} == "$worker" || ${words[*]:2} == "$worker" ]] || continue
        rank=$(tr "\0" "\n" <"$folder/environ" | sed -n "s/^RANK=//p")
        stat=$(<"$folder/stat")
        read -r state parent _ <<<"${stat##*) }"
        echo "worker ${rank:-0} ${folder##*/} $parent $state $(<"$folder/wchan")"
        pids+=("${folder##*/}")
    done 2>/dev/null
    command -v py-spy >/dev/null || { echo "py-spy is not installed"; return; }
    for pid in "${pids[@]}"; do
        echo "py-spy $pid"
        timeout 2 py-spy dump --nonblocking --pid "$pid" 2>&1 || echo "py-spy failed: $?"
    done
}
states "$0" | sed -u "s/^/$HOSTNAME: /"
"""
_LINE = re.compile(r"^(?P<node>[^\s:]+): (?P<text>.*)$")
_WORKER = re.compile(r"^worker (?P<rank>\d{1,7}) (?P<pid>\d{1,9}) (?P<parent>\d{1,9}) (?P<state>\w) (?P<wchan>\S*)$")
_PY_SPY = re.compile(r"^py-spy (?P<pid>\d{1,9})$")
_PY_SPY_FRAME = re.compile(r"^\s+(?P<function>.+) \((?P<file>[^()]*):(?P<line>\d+)\)$")
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


@dataclass(frozen=True)
class RankSnapshot:
    """One rank in a hang. ``frames``: the stack of its main thread, innermost first; empty if it could not be read.

    ``state``: the kernel's letter for the state of the process, empty if unknown. ``wchan``: the kernel function in
    which the process waits.
    """

    rank: int
    frames: tuple[Frame, ...] = ()
    state: str = ""
    wchan: str = ""
    node: str = ""

    @property
    def place(self) -> str:
        """The user's frame and the function that it calls; "no Python stack" without a stack."""
        frame = user_frame(self.frames)
        if frame is None:
            return "no Python stack"
        innermost = self.frames[0]
        return str(frame) if frame is innermost else f"{innermost.function}, called from {frame}"

    @property
    def abnormal_state(self) -> str:
        """The process state if it alone can cause the hang (stopped, waiting for I/O, or ended); otherwise empty."""
        kernel = f" in {self.wchan}" if self.state == "D" and self.wchan not in ("", "0") else ""
        meaning = PROCESS_STATES.get(self.state)
        return f"process state {self.state} ({meaning}{kernel})" if meaning else ""


@dataclass(frozen=True)
class HangEvidence:
    """The evidence about a job that hangs: one snapshot per rank, and the hangs in flight-recorder dumps."""

    snapshots: tuple[RankSnapshot, ...]
    hangs: tuple[CollectiveHang, ...]

    @property
    def ranks_at_fault(self) -> tuple[int, ...]:
        """The ranks at fault, by the first of these rules that finds any; empty if no rule finds a rank.

        1. Some, but not all ranks have an abnormal state: these.
        2. The flight recorder's dumps show ranks at fault (``CollectiveHang.ranks_at_fault``): these.
        3. The stacks of all ranks are known and show exactly two places: the ranks at one of them, if they are fewer
           than half of all ranks.
        """
        abnormal = tuple(snapshot.rank for snapshot in self.snapshots if snapshot.abnormal_state)
        if abnormal and len(abnormal) < len(self.snapshots):
            return abnormal
        ranks_by_dumps = self.hangs[0].ranks_at_fault if self.hangs else ()
        # a dump can name ranks that the job does not have
        ranks_of_job = tuple(rank for rank in ranks_by_dumps if rank < len(self.snapshots))
        if ranks_of_job:
            return ranks_of_job
        rank_groups = sorted(self.ranks_by_place().values(), key=len)
        all_read = all(snapshot.frames for snapshot in self.snapshots)
        has_minority = all_read and len(rank_groups) == 2 and 2 * len(rank_groups[0]) < len(self.snapshots)
        return rank_groups[0] if has_minority else ()

    def ranks_by_place(self) -> dict[str, tuple[int, ...]]:
        ranks_by_place = grouped(
            ("; ".join(filter(None, (snapshot.place, snapshot.abnormal_state))), snapshot.rank)
            for snapshot in self.snapshots
        )
        return {place: tuple(ranks) for place, ranks in ranks_by_place.items()}

    def text(self) -> str:
        """The ranks by place, small groups first: ``rank 3: …; ranks 0-2: all_reduce, called from step in …``."""
        groups = sorted((len(ranks), ranks, place) for place, ranks in self.ranks_by_place().items())
        return and_more([f"{rank_list(ranks)}: {place}" for _, ranks, place in groups], _MAX_NAMED, separator="; ")


def read_evidence(attempt: Path, rank_count: int) -> HangEvidence | None:
    """The evidence about an attempt that hung; None if neither a stack nor a process state was collected."""
    folder = attempt / FOLDER
    states = _parse_states(_text(folder / STATES))
    snapshots, dumps = [], list[Dump]()
    for rank in range(rank_count):
        snapshot = states.get(rank, RankSnapshot(rank))
        frames = _main_thread(_text(folder / STACKS.format(rank)))
        snapshots.append(replace(snapshot, frames=frames or snapshot.frames))
        dump = read_or_none(partial(read_dump, folder / RECORDER.format(rank)))
        dumps += [dump] if dump else []
    if not any(snapshot.frames or snapshot.state for snapshot in snapshots):
        return None
    # A rank without a dump can be at fault (CollectiveHang.without_dump), but not if no rank has a dump
    hangs = collective_hangs(dumps, rank_count) if dumps else ()
    return HangEvidence(tuple(snapshots), tuple(hangs))


def _parse_states(text: str) -> dict[int, RankSnapshot]:
    """Rank → its snapshot in the output of STATES_SCRIPT, with the stack that py-spy read."""
    workers: dict[tuple[str, int], re.Match[str]] = {}  # (node, pid) → its line
    stacks: dict[tuple[str, int], list[Frame]] = {}
    pid_by_node: dict[str, int] = {}  # the process whose stack follows
    in_main_thread: dict[str, bool] = {}  # by node: whether the frames that follow are of the main thread
    for line in filter(None, map(_LINE.match, text.splitlines())):
        node, content = printable(line["node"]), line["text"]
        if match := _WORKER.match(content):
            workers[node, int(match["pid"])] = match
        elif match := _PY_SPY.match(content):
            pid_by_node[node], in_main_thread[node] = int(match["pid"]), False
        elif content.startswith("Thread "):
            in_main_thread[node] = "MainThread" in content
        elif in_main_thread.get(node) and (match := _PY_SPY_FRAME.match(content)):
            stacks.setdefault((node, pid_by_node.get(node, 0)), []).append(_frame(match))
    snapshots = {}
    for (node, pid), worker in workers.items():
        # A process that a worker has forked, such as a data loader, is dropped: its parent is in ``workers`` too
        if (node, int(worker["parent"])) not in workers:
            rank, frames = int(worker["rank"]), tuple(stacks.get((node, pid), ()))
            snapshots[rank] = RankSnapshot(rank, frames, worker["state"], printable(worker["wchan"]), node)
    return snapshots


def _main_thread(text: str) -> tuple[Frame, ...]:
    """The frames of the main thread in a dump by faulthandler; empty if the dump lacks it.

    If the first line does not name the main thread: the frames of the last thread.
    """
    main = re.match(r"main thread 0x0*([0-9a-f]+)", text)
    frames_by_thread: dict[str, list[Frame]] = {}
    thread = ""
    for line in text.splitlines():
        if match := _THREAD.match(line):
            thread = match["ident"].lstrip("0")
            frames_by_thread[thread] = []
        elif match := _FRAME.match(line):
            frames_by_thread.setdefault(thread, []).append(_frame(match))
    return tuple(frames_by_thread.get(main[1] if main else thread, ()))


def _frame(match: re.Match[str]) -> Frame:
    return Frame(printable(match["file"])[:300], int(match["line"][:9]), printable(match["function"])[:300])


def _text(path: Path) -> str:
    return read_or_none(lambda: read_text(path, _MAX_BYTES)) or ""
