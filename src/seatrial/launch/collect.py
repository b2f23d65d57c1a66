"""Fetches what the nodes of a job write, where they do not share the run directory with us.

A transport runs commands on the nodes; this module knows none. While the job runs, a script on every node sends files
that have changed, every two seconds, and at the end all of them, behind a manifest. Files are unpacked to where the
nodes would have written had they shared the directory, so that no other module need know.

Nothing is lost or counted twice: a file replaces its earlier version in one step; a package that arrives damaged or
incomplete is sent again by the next run of the script; and the job stays, with its files, until all have arrived.
"""

from __future__ import annotations

import base64
import gzip
import io
import os
import tarfile
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from seatrial.util import processes
from seatrial.util.files import atomic_write
from seatrial.util.text import and_more

# A job finds out within its first second or two whether the directory is shared, and says so; only then we ask.
WAIT_S = 5.0
RETRY_S = 3.0
# Without a line from any node for so long, the transport does not work; less than the 180 s in which ranks must start
SILENCE_S = 60.0
ANSWER_S = 30.0
END_S = 20.0  # for what is left on the nodes to come, when we end a job before its time
LIMIT_BYTES = 64 * 2**20  # of all nodes together, packed: journals, then logs, then what checks left, then telemetry

# What runs on each node; `node` and `nodes` are set by the transport, $0 is the run directory there, $1 the limit.
# Lines have at most 600 characters, so that they arrive whole beside those of other nodes, and begin with the node.
# A step ends after ten minutes, and the next takes its place, so that what has been read can be deleted here.
NODE_SCRIPT = r"""
cd "$0" 2>/dev/null || exit 0 # not made yet, or the run directory is shared
pack() {
    tar --create --gzip --ignore-failed-read --files-from=- 2>/dev/null | head -c "$1" | base64 -w 512 |
        sed "s/^/$node /"
    echo "$node $2 $nodes"
}
since=0
for ((round = 0; round < 300; round++)); do
    if [ -e ended ]; then
        { find jobs -name "*.jsonl"; find jobs -type f ! -name "*.jsonl" ! -name "*.samples"
            find artifacts -type f -size -16384k # weights of a training stay where they are
            find jobs -name "*.samples"; } 2>/dev/null >manifest
        { echo manifest; cat manifest; } | pack $(($1 / nodes)) .all
        exit
    fi
    now=$(date +%s)
    find jobs -type f ! -name "*.samples" -size -256k -newermt "@$since" | pack "$1" .part
    since=$((now - 1))
    sleep 2
done
"""

# Lets the job end, which then removes what its nodes keep. Ranks that still run, in a job that is to end early, are
# found by their command: it names the folder.
END_SCRIPT = r"""
touch "$0/collected"
for file in /proc/[0-9]*/cmdline; do
    mapfile -d "" words <"$file" && [[ ${words[*]} == *" $0/jobs/"* ]] && kill -KILL "$(cut -d / -f 3 <<<"$file")"
done 2>/dev/null
exit 0
"""


class Transport(Protocol):
    """How commands reach the nodes of one job, and their output us.

    ``nodes``: all nodes, as the scheduler names them, once they are known. ``script``: bash that sets ``node`` to the
    node's number from 0 and ``nodes`` to how many there are. ``test``: a command for a person who wants to see it work.
    """

    name: str
    nodes: str
    script: str
    test: str

    def command(self, *argv: str) -> list[str]:
        """What runs ``argv`` once on every node, beside the job, with the output of all on standard output."""


@dataclass
class Collector:
    """Fetches from the nodes of one job. ``node_dir`` is the run directory there, ``folder`` the attempt's here."""

    transport: Transport
    node_dir: str
    folder: Path
    finished: bool = False  # everything is here, or there was nothing to fetch
    _started: float | None = None  # when the job was first looked at: it may have waited in the queue for long
    _heard: float = 0.0
    _stream: processes.Child | None = None
    _ended: float = 0.0  # when the last step did
    _read: int = 0  # bytes of what the present step has sent
    _arriving: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _nodes: int = 0  # how many there are; 0: no node has sent anything
    _complete: set[str] = field(default_factory=set)

    @property
    def fetched(self) -> bool:
        """Whether all that the nodes kept for us is here."""
        return self.finished and self._nodes > 0

    def fetch(self, nodes: str = "") -> None:
        """Take in what has come, without waiting for more. ``nodes``: see Transport."""
        self.transport.nodes = nodes or self.transport.nodes
        if self._started is None:
            self._started = self._heard = time.monotonic()
        if self.finished:
            return
        if (self.folder / "shared").exists():
            self.finished = True
            self.close()
        elif self._stream is not None:
            self._follow(self._stream)
        elif time.monotonic() > max(self._started + WAIT_S, self._ended + RETRY_S):
            script = f"{self.transport.script}\n{NODE_SCRIPT}"
            argv = self.transport.command("bash", "-c", script, self.node_dir, str(LIMIT_BYTES))
            self._stream = processes.start(argv, env={}, stdout=self._sent, stderr=self._errors)

    def _follow(self, stream: processes.Child) -> None:
        code = stream.poll()  # before reading, so that what was sent before the end is read after it
        with self._sent.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        self._read += len(lines)
        for line in lines.splitlines():
            self._take(line)
        if lines or code == 0:
            self._heard = time.monotonic()
        if self._nodes and len(self._complete) == self._nodes:
            self._finish()
        elif code is not None:
            self.close()

    def _take(self, line: bytes) -> None:
        """A line is ``3 BASE64`` or, once a package of node 3 is sent, ``3 .part 4`` or ``3 .all 4`` (of 4 nodes)."""
        node, _, rest = line.decode("ascii", errors="replace").partition(" ")
        if not rest.startswith("."):
            self._arriving[node].append(rest)
            return
        kind, _, nodes = rest.partition(" ")
        package = base64.b64decode("".join(self._arriving.pop(node, [])))
        contents, limit = unpack(package, self.folder.parents[2]), LIMIT_BYTES // int(nodes)
        complete = contents.whole or len(package) >= limit
        if complete or kind == ".part":
            self._nodes = int(nodes)
        if complete and kind == ".all":
            self._complete.add(node)
            if contents.missing or not contents.whole:
                why = "these could not be read" if contents.whole else f"more than {limit} bytes: the rest is lost"
                self._note(f"node {node} of the job: {why} ({and_more(contents.missing, 8)})")

    def _finish(self) -> None:
        """All is here: the job may end."""
        self.finished = True
        self.close()
        answer = self._ask("bash", "-c", END_SCRIPT, self.node_dir)
        if answer.code != 0:
            self._note(f"the nodes could not be told that all was fetched, and may keep {self.node_dir}: {answer.err}")

    def _note(self, text: str) -> None:
        with (self.folder / "launcher.err").open("a", encoding="utf-8") as log:
            log.write(f"seatrial: {text}\n")

    def problem(self) -> str:
        """Why nothing can be fetched; empty as long as that is not certain."""
        if self.finished or self._started is None or time.monotonic() - self._heard < SILENCE_S:
            return ""
        return self._failure(f"no node has sent anything for {SILENCE_S:g} s")

    def lost(self) -> str:
        """What did not arrive of a job that has ended, or will not."""
        if self.finished or self.problem():
            return self.problem()
        if self._nodes:
            return self._failure("not everything had come when the job ended")
        return f"The job wrote nothing here; what its script said may be on its first node: {self.node_dir}.log"

    def _failure(self, what: str) -> str:
        """``what`` has happened, with the transport's last message and what to run first."""
        lines = self._errors.read_text(encoding="utf-8", errors="replace").splitlines() if self._errors.exists() else []
        last = next((f" ({line.strip()})" for line in reversed(lines) if line.strip()), "")
        return (
            f"The nodes do not share the run directory, and what they wrote could not be fetched through "
            f"{self.transport.name}: {what}{last}. It may still be on the nodes, in {self.node_dir}. "
            f"Run first, from here: {self.transport.test}"
        )

    def stop_ranks(self, nodes: str) -> None:
        """Fetch what there is from a job that is about to be cancelled, and let it end; gives up after a while.

        Its script may not have come so far yet that it knows whether the run directory is shared.
        """
        deadline, asked = time.monotonic() + END_S, False
        self.fetch(nodes)
        while not self.finished and time.monotonic() < deadline:
            asked = asked or self._ask("touch", f"{self.node_dir}/ended").code == 0
            self.fetch()
            time.sleep(0.1)

    def remove_remote_files(self) -> None:
        """Remove what the nodes keep, from a job that does not come to do it itself."""
        self._ask("rm", "-rf", self.node_dir)

    def _ask(self, *argv: str) -> processes.CommandResult:
        return processes.run_command(self.transport.command(*argv), ANSWER_S)

    def close(self) -> None:
        """End the step, and remove what only it needed."""
        if self._stream is not None:
            processes.stop(self._stream)
            self._stream, self._ended, self._read = None, time.monotonic(), 0
            self._arriving.clear()
        self._sent.unlink(missing_ok=True)
        if self.finished:
            self._errors.unlink(missing_ok=True)

    @property
    def _sent(self) -> Path:
        return self.folder / "collected.lines"

    @property
    def _errors(self) -> Path:
        return self.folder / "collector.err"


class Unpacked(NamedTuple):
    """``missing``: files of the package's manifest that were not in it."""

    whole: bool
    missing: tuple[str, ...]


def unpack(package: bytes, folder: Path) -> Unpacked:
    """Put the files of a packed tar below ``folder``, each in one step.

    What lies before the place where a package was cut off is unpacked; of a damaged one nothing, since a reader would
    take it for what a rank wrote. No name leads out of ``folder``.
    """
    expected, arrived = list[str](), set[str]()
    whole = _is_intact(package)
    if whole is None:
        return Unpacked(False, ())
    try:
        with tarfile.open(fileobj=io.BytesIO(package), mode="r|gz") as archive:
            for member in archive:
                target = Path(os.path.normpath(folder / member.name))
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None and member.name == "manifest":
                    expected = content.read().decode("utf-8", errors="surrogateescape").splitlines()
                elif content is not None and target.is_relative_to(folder):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    atomic_write(target, content.read(), sync=False)
                    arrived.add(member.name)
    except (tarfile.TarError, EOFError):
        whole = False
    return Unpacked(whole, tuple(name for name in expected if name not in arrived))


def _is_intact(package: bytes) -> bool | None:
    """By gzip's checksum, which tarfile does not look at: whether the package is whole; None where it is damaged."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(package)) as file:
            while file.read(2**20):
                pass
    except EOFError:
        return False
    except (zlib.error, gzip.BadGzipFile):
        return None
    return True
