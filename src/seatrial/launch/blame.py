"""Which rank ended a job, and why: the first cause, not the peers that failed because of it.

torchrun's own "root cause" is the failure it noticed first, with times in whole seconds. A killed rank leaves no error
file while its peers write one about a lost connection, so a death by signal outranks every error message, and among
messages the earliest journal entry wins.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.launch.ranks import Rank

# "rank      : 1 (local_rank: 1)" and "exitcode  : -9 (pid: 4711) (SIGKILL)", as torchrun 2.11 to 2.13 print them
_FAILURE = re.compile(
    r"rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
# what the sbatch script says of a node that lacks something (sbatch.sh.j2)
_PREFLIGHT = re.compile(r"^preflight: (?P<node>[^:]+): (?P<what>.+)$", re.MULTILINE)
# srun, of a node whose slurmd refuses its step or does not answer (seen with 22.05 and two munge keys)
_REFUSED = re.compile(r"^srun: error: Task launch for \S+ failed on node (?P<node>[^:]+): (?P<what>.+)$", re.MULTILINE)
_ENDED_BY_TORCHRUN = -signal.SIGTERM


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


def over_limit(ranks: Sequence[Rank], what: str, limit_s: float) -> Blame:
    """Alive, but not done with a check, or with the job, in its time."""
    late = [rank for rank in ranks if rank.current == what] or list(ranks)
    words = "; ".join(f"{rank.name} in {rank.last_words}" for rank in late[:4])
    more = f" and {len(late) - 4} more" if len(late) > 4 else ""
    who = late[0] if len(late) == 1 else None
    cause = f"{what} did not end within its limit of {limit_s:g} s; last heard of: {words}{more}"
    return Blame(who.name if who else f"{len(late)} ranks", cause, who.number if who else None)


def never_started(ranks: Sequence[Rank], limit_s: float, folder: Path) -> Blame:
    """Some ranks had not begun their first check when the time for starting was over."""
    missing = [rank for rank in ranks if not rank.started]
    names = ", ".join(rank.name for rank in missing[:8])
    cause = f"{len(missing)} of {len(ranks)} ranks did not start within {limit_s:g} s: {names}. {_last_line(folder)}"
    return Blame(names, cause.strip(), missing[0].number if len(missing) == 1 else None)


def ended(ranks: Sequence[Rank], code: int, folder: Path, epitaph: str = "") -> Blame:
    """The job exited with an error. ``epitaph`` is what a scheduler says of it, for want of a better cause."""
    if missing := _missing(folder):
        return missing
    exits = {int(m["rank"]): int(m["code"]) for m in _FAILURE.finditer(_text(folder / "launcher.err"))}
    for number, exit_code in exits.items():
        if exit_code < 0 and exit_code != _ENDED_BY_TORCHRUN and number < len(ranks):
            return _signalled(ranks[number], exit_code)
    errors = sorted(
        (measured.started + measured.seconds, rank.number, measured.check, measured.error)
        for rank in ranks
        for measured in rank.measured.values()
        if measured.error and measured.check == list(rank.measured)[-1]
    )
    if errors:
        _, number, check, error = errors[0]
        return Blame(ranks[number].name, f"{check}: {error}", number)
    return _from_error_files(ranks, folder) or Blame(
        f"{len(exits)} ranks" if exits else "launcher",
        ". ".join(filter(None, [epitaph or f"exit code {code}", _last_line(folder)])),
        None,
    )


def _missing(folder: Path) -> Blame | None:
    """What nodes lacked before anything of ours ran on them: each thing once, with the nodes that lack it."""
    text = _text(folder / "launcher.err")
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


def _signalled(rank: Rank, code: int) -> Blame:
    name = signal.Signals(-code).name
    hint = "; SIGKILL from outside is often the kernel's out-of-memory killer: see dmesg" if name == "SIGKILL" else ""
    return Blame(rank.name, f"killed by {name} in {rank.last_words}{hint}", rank.number)


def _from_error_files(ranks: Sequence[Rank], folder: Path) -> Blame | None:
    """The earliest of the error files that torchrun's @record left: failures before the first check."""
    found = []
    for path in (folder / "logs").glob("**/error.json"):
        try:
            message = json.loads(path.read_text(encoding="utf-8"))["message"]
            rank = _rank_of(path, len(ranks))
            found.append((int(message["extraInfo"]["timestamp"]), rank, str(message["message"])))
        except (ValueError, KeyError, TypeError):  # cut off by the crash that it was to describe
            continue
    if not found:
        return None
    _, number, text = min(found)
    name = ranks[number].name if number < len(ranks) else f"rank {number}"
    return Blame(name, text, number)


def _rank_of(error_file: Path, count: int) -> int:
    """torchrun keeps logs by local rank; where there are several nodes, ours lie in a folder a node."""
    local = int(error_file.parent.name)
    nodes = {part: path for path in error_file.parents for part in [path.name] if re.fullmatch(r"node\d+", part)}
    if not nodes:
        return local
    name, folder = next(iter(nodes.items()))
    siblings = sum(1 for _ in folder.parent.glob("node*"))
    return int(name.removeprefix("node")) * (count // siblings) + local


def _process_state(rank: Rank) -> str:
    """What the kernel says of a local process: stopped (T) and uninterruptible (D) explain silence."""
    try:
        fields = Path(f"/proc/{rank.pulse['pid']}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (OSError, KeyError):
        return ""
    meaning = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for I/O in the kernel"}
    return f"; process state {fields[0]}" + (f" ({meaning[fields[0]]})" if fields[0] in meaning else "")


def _last_line(folder: Path) -> str:
    """The last line of standard error that says something, of the launcher or of a rank."""
    logs = [folder / "launcher.err", *sorted((folder / "logs").glob("**/stderr.log"))]
    lines = [line.strip() for log in logs for line in _text(log).splitlines()[-40:] if _tells(line)]
    return f"Last line of its log: {lines[-1][:300]}" if lines else ""


def _tells(line: str) -> bool:
    return bool(line.strip(" =-")) and "Error" in line


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
