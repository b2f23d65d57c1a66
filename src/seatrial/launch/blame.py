"""Which rank ended a job, and why: the first cause, not the peers that failed because of it.

torchrun's own "root cause" is the failure it noticed first, with times in whole seconds, and it lists the ranks that it
ended itself among the failures. A rank that dies leaves no word while its peers write of a lost connection, so a death
without a word outranks every error message; among messages, and ranks told to end, the earliest wins.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.launch.ranks import Rank
from seatrial.model import Job

# "rank      : 1 (local_rank: 1)" and "exitcode  : -9 (pid: 4711) (SIGKILL)", as torchrun 2.11 to 2.13 print them
_FAILURE = re.compile(
    r"rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
# what the sbatch script says of a node that lacks something (sbatch.sh.j2)
_PREFLIGHT = re.compile(r"^preflight: (?P<node>[^:]+): (?P<what>.+)$", re.MULTILINE)
# srun, of a node whose slurmd refuses its step or does not answer (seen with 22.05 and two munge keys)
_REFUSED = re.compile(r"^srun: error: Task launch for \S+ failed on node (?P<node>[^:]+): (?P<what>.+)$", re.MULTILINE)
_ENDED_BY_TORCHRUN = re.compile(r"Sending process (?P<pid>\d+) closing signal")
# killed by it, or ended by our own handler of it
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)
_LAUNCHER_LOG = 1 << 20  # bytes at its end that are read: torchrun's summaries, some 300 bytes a rank
_RANK_LOG = 1 << 16
_Told = tuple[float, int, str]  # when by the clock of its node, by which rank, what


@dataclass(frozen=True)
class Blame:
    culprit: str
    cause: str
    rank: int | None


def silent(rank: Rank, seconds: float) -> Blame:
    """A rank whose pulse has stopped while the job goes on."""
    state = _process_state(rank)
    cause = f"no sign of life for {seconds:.0f} s; last heard of in {rank.last_words}{state}"
    return Blame(rank.name, cause, rank.number)


def over_limit(late: Sequence[Rank], what: str, limit_s: float) -> Blame:
    """Alive, but not done with a check, or with the job, in its time."""
    words = "; ".join(f"{rank.name} in {rank.last_words}" for rank in late[:4])
    more = f" and {len(late) - 4} more" if len(late) > 4 else ""
    who = late[0] if len(late) == 1 else None
    cause = f"{what} did not end within its limit of {limit_s:g} s; last heard of: {words}{more}"
    return Blame(who.name if who else f"{len(late)} ranks", cause, who.number if who else None)


def never_started(ranks: Sequence[Rank], limit_s: float, folder: Path) -> Blame:
    """Some ranks had not begun their first check when the time for starting was over."""
    missing = [rank for rank in ranks if not rank.started]
    names = ", ".join(rank.name for rank in missing[:8])
    log = _last_line(_logs(folder))
    cause = f"{len(missing)} of {len(ranks)} ranks did not start within {limit_s:g} s: {names}. {log}"
    return Blame(names, cause.strip(), missing[0].number if len(missing) == 1 else None)


def damaged(rank: Rank) -> Blame:
    """A rank that writes what no worker of this version writes: what it measured cannot be told from it."""
    return Blame(rank.name, f"its journal {rank.follower.path.name} is damaged: {rank.damage}", rank.number)


def ended(job: Job, ranks: Sequence[Rank], code: int, folder: Path, epitaph: str = "") -> Blame:
    """The job exited with an error. ``epitaph`` is what a scheduler says of it, for want of a better cause."""
    if missing := _missing(folder):
        return missing
    alone = {0: code} if len(ranks) == 1 and not epitaph else {}
    exits = _exits(folder, len(ranks)) if job.placement == "ranks" else alone
    raised = _from_error_files(ranks, folder)
    wordless = [number for number in exits if _died_wordless(ranks[number], exits[number], raised)]
    if wordless:
        first = min(wordless, key=lambda number: _order_of_death(ranks[number], exits[number]))
        return _died(ranks[first], exits[first], _logs(folder, first, len(ranks)))
    told = [*_errors(ranks), *_told_to_end(ranks, exits)] or raised
    if told:
        _, number, text = min(told)
        return Blame(ranks[number].name, text, number)
    for number, exit_code in exits.items():
        return _died(ranks[number], exit_code)
    return Blame("launcher", ". ".join(filter(None, [epitaph or _how(code), _last_line(_logs(folder))])), None)


def _exits(folder: Path, count: int) -> dict[int, int]:
    """Exit codes by rank, without those that torchrun ended itself because of another."""
    log = _tail(folder / "launcher.err", _LAUNCHER_LOG)
    ended_by_torchrun = {match["pid"] for match in _ENDED_BY_TORCHRUN.finditer(log)}
    failures = [match for match in _FAILURE.finditer(log) if match["pid"] not in ended_by_torchrun]
    return {int(match["rank"]): int(match["code"]) for match in failures if int(match["rank"]) < count}


def _died_wordless(rank: Rank, code: int, raised: Sequence[_Told]) -> bool:
    """Whether a rank ended without saying why, and not by SIGTERM: no error is the last that it wrote anywhere.

    An exception may end in an exit code, or in an abort while the interpreter is torn down: both follow words.
    """
    if code in _TERMINATED:
        return False
    if code < 0 and code != -signal.SIGABRT:
        return True
    return not _errors([rank]) and rank.number not in {number for _, number, _ in raised}


def _order_of_death(rank: Rank, code: int) -> tuple[bool, bool, float]:
    """Earliest first, as far as is known; but a rank may abort, or exit, because of a peer that was killed."""
    return code == -signal.SIGABRT, code > 0, rank.pulse.time if rank.pulse else 0.0


def _errors(ranks: Sequence[Rank]) -> list[_Told]:
    """What each rank said that failed last of all. One that went on to another check did not end because of it."""
    return [
        (measured.started + measured.seconds, rank.number, f"{measured.check}: {measured.error}")
        for rank in ranks
        for measured in list(rank.measured.values())[-1:]
        if measured.error and rank.current is None
    ]


def _told_to_end(ranks: Sequence[Rank], exits: dict[int, int]) -> list[_Told]:
    """The same for ranks that somebody other than torchrun ended by SIGTERM."""
    return [
        (rank.pulse.time, number, _died(rank, exits[number]).cause)
        for number, rank in enumerate(ranks)
        if exits.get(number) in _TERMINATED and rank.pulse and rank.ending
    ]


def _missing(folder: Path) -> Blame | None:
    """What nodes lacked before anything of ours ran on them: each thing once, with the nodes that lack it."""
    text = _tail(folder / "launcher.err", _LAUNCHER_LOG)
    found = [(match["node"], _refusal(match["node"], match["what"])) for match in _REFUSED.finditer(text)]
    found = found or [(match["node"], match["what"]) for match in _PREFLIGHT.finditer(text)]
    lacking: dict[str, list[str]] = {}
    for node, what in found:
        lacking.setdefault(what.replace(node, "\0"), []).append(node)
    if not lacking:
        return None
    nodes = sorted({node for node, _ in found})
    whats = [(sorted(those), what.replace("\0", min(those))) for what, those in lacking.items()]
    cause = "; ".join(what if len(nodes) == 1 else f"{', '.join(those[:8])}: {what}" for those, what in whats)
    return Blame(", ".join(nodes[:8]), cause, None)


def _refusal(node: str, words: str) -> str:
    first = f"sinfo -R; munge -n | ssh {node} unmunge; ssh {node} systemctl status slurmd"
    return f"srun cannot start anything there: {words}. Run first: {first}"


def _died(rank: Rank, code: int, logs: Sequence[Path] = ()) -> Blame:
    hint = "; SIGKILL from outside is often the kernel's out-of-memory killer: see dmesg" if code == -9 else ""
    words = [f"{_how(code)} in {rank.last_words}{hint}", _last_line(logs)]
    return Blame(rank.name, ". ".join(filter(None, words)), rank.number)


def _how(code: int) -> str:
    """``killed by SIGKILL``, or ``exit code 3``."""
    if code in _TERMINATED:
        return "ended by SIGTERM from outside"
    if code > 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # the real-time signals between the first and the last have no name in Python
        return f"killed by signal {-code} (SIGRTMIN+{-code - signal.SIGRTMIN})"


def _from_error_files(ranks: Sequence[Rank], folder: Path) -> list[_Told]:
    """The same from the error files that torchrun's @record left: failures before the first check."""
    found = []
    for path in (folder / "logs").glob("**/error.json"):
        try:
            message = json.loads(path.read_text(encoding="utf-8"))["message"]
            number = ranks[_rank_of(path, len(ranks))].number
            found.append((float(message["extraInfo"]["timestamp"]), number, str(message["message"])))
        except (ValueError, LookupError, TypeError, RecursionError):  # cut off by the crash that it was to describe
            continue
    return found


def _rank_of(log: Path, count: int) -> int:
    """torchrun keeps logs by local rank; where there are several nodes, ours lie in a folder a node."""
    local = int(log.parent.name)
    nodes = {part: path for path in log.parents for part in [path.name] if re.fullmatch(r"node\d+", part)}
    if not nodes:
        return local
    name, folder = next(iter(nodes.items()))
    siblings = sum(1 for _ in folder.parent.glob("node*"))
    return int(name.removeprefix("node")) * (count // siblings) + local


def _process_state(rank: Rank) -> str:
    """What the kernel says of a local process: stopped (T) and uninterruptible (D) explain silence."""
    if rank.pulse is None:
        return ""
    try:
        fields = Path(f"/proc/{rank.pulse.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    meaning = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for I/O in the kernel"}
    return f"; process state {fields[0]}" + (f" ({meaning[fields[0]]})" if fields[0] in meaning else "")


def _logs(folder: Path, rank: int | None = None, count: int = 0) -> list[Path]:
    """Standard error of the launcher and of the ranks (of one, where it is named)."""
    logs = sorted((folder / "logs").glob("**/stderr.log"))
    return [folder / "launcher.err", *(log for log in logs if rank is None or _rank_of(log, count) == rank)]


def _last_line(logs: Sequence[Path]) -> str:
    """The last line of these logs that says something."""
    lines = [line.strip() for log in logs for line in _tail(log, _RANK_LOG).splitlines()[-40:] if _tells(line)]
    return f"Last line of its log: {lines[-1][:300]}" if lines else ""


def _tells(line: str) -> bool:
    """torchrun's own ChildFailedError only says that a rank failed, which is known."""
    return bool(line.strip(" =-")) and "Error" in line and "ChildFailedError" not in line


def _tail(path: Path, size: int) -> str:
    """The last ``size`` bytes: a rank may have written more than there is memory."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size).decode("utf-8", errors="replace")
