"""Fetches the result files of a job from nodes that do not share the run directory with this host.

While the job runs, a script on each node sends changed files below 256 KiB every two seconds. At the end of the job the
script sends all files of the job, and artifacts below 16 MiB, with a manifest of their sizes and SHA-256. Files are
unpacked into the run directory under the same relative paths. The lines of the script come through a transport: a step
of the Slurm job, or the logs of pods.

A file atomically replaces its earlier version. After a damaged or incomplete package the script runs again, or the log
is read again. The sbatch script removes the files from the nodes when all have arrived. It waits for this at most two
minutes after the end of the checks. If files are still missing then, it leaves the files on the nodes. A pod keeps its
files until it is deleted.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import shutil
import tarfile
import time
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from seatrial.util import hostlist, processes
from seatrial.util.files import atomic_write
from seatrial.util.text import and_more

# The job detects within one or two seconds whether the run directory is shared; the first fetch starts after that
FIRST_FETCH_S = 5.0
RESTART_S = 3.0  # from the end of a step to the start of the next
# Without a line from any node for this long, the transport has failed; less than limits.startup_s (180 s)
NO_DATA_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 30.0  # limit of a command on the nodes, other than the step
STOP_TIMEOUT_S = 20.0  # limit for fetching the remaining files when a job is stopped early
# Compressed size of the packages at the end of a job, all nodes together. Beyond it, the last files of the list `files`
# are cut off
LIMIT_BYTES = 64 * 2**20
MAX_UNPACKED_BYTES = 64 * LIMIT_BYTES  # logs compress 10 to 20 times; more is a damaged or hostile package
_MANIFEST_BYTES = 64 * 2**20
# A step whose output file exceeds this is restarted with an empty file; the packages at the end of a job fit in it
MAX_STEP_BYTES = 4 * LIMIT_BYTES

# Runs on each node. The transport sets `node` (its index from 0) and `nodes` (their number); $0 is the run directory
# on the node, $1 the limit in bytes. The file `ended` exists from the end of the job. Lines start with the node's index
# and have at most 600 characters, so that srun does not mix them with other nodes' lines.
# The script ends after ten minutes (300 rounds) and is restarted, so that its output file on this host can be deleted.
# manifest: "SIZE  FILE" of all files, then "SHA-256  FILE" of those that can be read.
NODE_SCRIPT = r"""
cd "$0" 2>/dev/null || exit 0 # not created yet, or the run directory is shared
pack() {
    tar --create --gzip --ignore-failed-read --files-from=- 2>/dev/null | head -c "$1" | base64 -w 512 |
        sed "s/^/$node /"
    echo "$node $2 $nodes"
}
since=0
for ((round = 0; round < 300; round++)); do
    if [ -e ended ]; then
        { find jobs -name "*.jsonl"; find jobs -type f ! -name "*.jsonl" ! -name "*.samples"
            find artifacts -type f -size -16384k # model weights stay on the node
            find jobs -name "*.samples"; } 2>/dev/null >files
        xargs --no-run-if-empty --delimiter="\n" stat --format="%s  %n" <files 2>/dev/null >manifest
        xargs --no-run-if-empty --delimiter="\n" sha256sum <files 2>/dev/null >>manifest
        { echo manifest; cat files; } | pack $(($1 / nodes)) .all
        exit
    fi
    now=$(date +%s)
    find jobs -type f ! -name "*.samples" -size -256k -newermt "@$since" | pack "$1" .part
    since=$((now - 1))
    sleep 2
done
"""

# Creates the file `collected`: the job's script waits for it, and then removes the files from the node. Kills ranks
# that still run; they have the run directory in their command line.
END_SCRIPT = r"""
touch "$0/collected"
for file in /proc/[0-9]*/cmdline; do
    mapfile -d "" argv <"$file" && [[ ${argv[*]} == *" $0/jobs/"* ]] && kill -KILL "$(cut -d / -f 3 <<<"$file")"
done 2>/dev/null
exit 0
"""


@dataclass
class Transport(ABC):
    """Carries the lines of NODE_SCRIPT from the nodes of one job, and runs commands on them.

    ``nodes``: the scheduler's node list, once known. ``test_command``: a command by which a user can test the
    transport. ``starts_at_once``: the script starts with the job, so the first fetch need not wait.
    ``keeps_files``: the nodes keep the files until the job is deleted, and need no message that all have arrived.
    ``errors``: index of a node → why its lines cannot be read. ``needs_restart``: lines are missing or overdue, so the
    step must be started again.
    """

    name: ClassVar[str]
    starts_at_once: ClassVar[bool] = False
    keeps_files: ClassVar[bool] = False
    nodes: str = field(default="", kw_only=True)
    errors: dict[int, str] = field(default_factory=dict, kw_only=True)

    @property
    def needs_restart(self) -> bool:
        return False

    @property
    @abstractmethod
    def test_command(self) -> str: ...

    @abstractmethod
    def step(self, node_dir: str, limit_bytes: int) -> list[str]:
        """Return the command that prints the lines of all nodes; a command that ends too early is started again."""

    @abstractmethod
    def payload(self, line: bytes) -> bytes | None:
        """Return the line of NODE_SCRIPT in a line of the step's output; None if it has none, or was read before."""

    @abstractmethod
    def command(self, *argv: str) -> list[str]:
        """Return the command that runs ``argv`` once per node, concurrently with the job, and prints all output."""


@dataclass
class Collector:
    """Fetches files from the nodes of one job: from ``node_dir`` there to ``folder``, the attempt's folder here."""

    transport: Transport
    node_dir: str
    folder: Path
    limit_bytes: int = LIMIT_BYTES
    finished: bool = False  # all files have arrived, or the run directory is shared
    _started: float | None = None  # time of the first fetch
    _last_data: float = 0.0  # time of the last line from any node, or of the last end of a step with code 0
    _step: processes.Child | None = None  # the running NODE_SCRIPT
    _step_ended: float = 0.0
    _bytes_read: int = 0  # how much of the current step's output has been read
    # index of a node, as text → lines of its incomplete package
    _lines_by_node: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _node_count: int = 0  # 0: no node has sent anything
    _complete_nodes: set[str] = field(default_factory=set)  # indices of the nodes whose files have all arrived

    @property
    def fetched(self) -> bool:
        """Whether files were fetched from the nodes, and all have arrived."""
        return self.finished and self._node_count > 0

    @property
    def errors(self) -> dict[int, str]:
        """Index of a node → why the rest of its files cannot be read."""
        return {index: text for index, text in self.transport.errors.items() if str(index) not in self._complete_nodes}

    def fetch(self, nodes: str = "") -> None:
        """Start the step, or unpack the files that have arrived; does not wait for more. ``nodes``: see Transport."""
        self.transport.nodes = nodes or self.transport.nodes
        first_fetch_s = 0.0 if self.transport.starts_at_once else FIRST_FETCH_S
        if self._started is None:
            self._started = self._last_data = time.monotonic()
        if self.finished:
            return
        if (self.folder / "shared").exists():
            self.finished = True
            self.close()
        elif self._step is not None:
            self._read_step(self._step)
        elif time.monotonic() > max(self._started + first_fetch_s, self._step_ended + RESTART_S):
            argv = self.transport.step(self.node_dir, self.limit_bytes)
            self._step = processes.start(argv, env={}, stdout=self._output, stderr=self._errors)

    def _read_step(self, step: processes.Child) -> None:
        code = step.poll()  # before reading: output written before the end is then complete
        with self._output.open("rb") as file:
            file.seek(self._bytes_read)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        self._bytes_read += len(lines)
        payloads = [payload for payload in map(self.transport.payload, lines.splitlines()) if payload is not None]
        for payload in payloads:
            self._add_line(payload)
        if payloads or (code == 0 and not self.errors):
            self._last_data = time.monotonic()
        if self._node_count and len(self._complete_nodes) == self._node_count:
            self._finish()
        elif code is not None or self.transport.needs_restart or self._bytes_read > MAX_STEP_BYTES:
            self.close()

    def _add_line(self, line: bytes) -> None:
        """Add a line to the package of its node, or unpack the package if the line ends it.

        ``3 BASE64`` is data of the node with index 3; ``3 .part 4`` ends its package of changed files, ``3 .all 4`` its
        package of all files. The 4 is the number of nodes of the job.
        """
        node, _, data = line.decode("ascii", errors="replace").partition(" ")
        if not data.startswith("."):
            self._lines_by_node[node].append(data)
            return
        kind, _, node_count = data.partition(" ")
        try:
            package = base64.b64decode("".join(self._lines_by_node.pop(node, [])))
            limit = self.limit_bytes // int(node_count)
        except (ValueError, ZeroDivisionError):  # damaged on its way: sent again
            return
        contents = unpack(package, self.folder.parents[2])
        accepted = contents.complete or len(package) >= limit  # the node cuts a package off at the limit
        if accepted or kind == ".part":
            self._node_count = int(node_count)
        if accepted and kind == ".all":
            self._complete_nodes.add(node)
            if contents.changed:
                self._log(
                    f"files of the job's node {node} changed while they were sent: {and_more(contents.changed, 8)}"
                )
            if contents.missing or not contents.complete:
                reason = "could not be read" if contents.complete else f"over the limit of {limit} bytes"
                self._log(f"files of the job's node {node} not fetched ({reason}): {and_more(contents.missing, 8)}")

    def _finish(self) -> None:
        """Tell the nodes that all files have arrived, so that the job can end."""
        self.finished = True
        self.close()
        if self.transport.keeps_files:
            return
        result = self._run_on_nodes("bash", "-c", END_SCRIPT, self.node_dir)
        if result.code != 0:
            self._log(f"all files fetched, but the nodes may keep {self.node_dir}: {result.err}")

    def _log(self, text: str) -> None:
        with (self.folder / "launcher.err").open("a", encoding="utf-8") as log:
            log.write(f"seatrial: {text}\n")

    def problem(self) -> str:
        """Return a message if no node has sent a line for ``NO_DATA_TIMEOUT_S``; else empty."""
        if self.finished or self._started is None or time.monotonic() - self._last_data < NO_DATA_TIMEOUT_S:
            return ""
        return self._failure(f"no data from any node for {NO_DATA_TIMEOUT_S:g} s")

    def missing_files(self) -> str:
        """Return why files of an ended job are missing; empty if all have arrived."""
        if self.finished:
            return ""
        if problem := self.problem():
            return problem
        if self._node_count:
            names = enumerate(self._node_names())
            incomplete = [name for index, name in names if str(index) not in self._complete_nodes]
            return self._failure(f"the job ended before all files arrived from {and_more(incomplete, 8)}")
        log = "" if self.transport.keeps_files else f"; its script's log may be on its first node: {self.node_dir}.log"
        return f"no output of the job arrived{log}"

    def _node_names(self) -> list[str]:
        """Return the names of the nodes by index; without a valid node list ``node 0``, ``node 1``."""
        try:
            names = hostlist.expand(self.transport.nodes)
        except ValueError:
            names = []
        return names if len(names) == self._node_count else [f"node {index}" for index in range(self._node_count)]

    def _failure(self, reason: str) -> str:
        """Return ``reason`` with the transport's last message, the folder on the nodes and the first command to run."""
        lines = self._errors.read_text(encoding="utf-8", errors="replace").splitlines() if self._errors.exists() else []
        lines += self.errors.values()
        last_message = next((f" ({line.strip()})" for line in reversed(lines) if line.strip()), "")
        place = "" if self.transport.keeps_files else f" The files may still be on the nodes in {self.node_dir}."
        return (
            f"{self.transport.nodes or 'the nodes'}: the run directory is not shared with this host, and fetching "
            f"files through {self.transport.name} failed: {reason}{last_message}.{place} Run first, from this host: "
            f"{self.transport.test_command}"
        )

    def run_script(self, script: str, attempt: Path, limit_s: float) -> processes.CommandResult:
        """Run a bash script once on each node. ``$0`` is the attempt's folder there; ``attempt``: its path here."""
        is_shared = (self.folder / "shared").exists()
        folder = str(attempt) if is_shared else f"{self.node_dir}/{attempt.relative_to(self.folder.parents[2])}"
        return processes.run_command(self.transport.command("bash", "-c", script, folder), limit_s)

    def stop_ranks(self, nodes: str) -> None:
        """Fetch the files of a job that is about to be cancelled and end its ranks, within ``STOP_TIMEOUT_S``.

        The file ``ended`` on the nodes requests all files. The job's script may not have created ``node_dir`` yet, so
        creating the file is retried.
        """
        deadline, requested = time.monotonic() + STOP_TIMEOUT_S, False
        self.fetch(nodes)
        while not self.finished and time.monotonic() < deadline:
            requested = requested or self._run_on_nodes("touch", f"{self.node_dir}/ended").code == 0
            self.fetch()
            time.sleep(0.1)

    def remove_remote_files(self) -> None:
        """Remove the job's files from the nodes, for a job whose script did not do so."""
        self._run_on_nodes("rm", "-rf", self.node_dir)

    def _run_on_nodes(self, *argv: str) -> processes.CommandResult:
        return processes.run_command(self.transport.command(*argv), COMMAND_TIMEOUT_S)

    def close(self) -> None:
        """End the step and remove its output files."""
        if self._step is not None:
            processes.stop(self._step)
            self._step, self._step_ended, self._bytes_read = None, time.monotonic(), 0
            self._lines_by_node.clear()
        self._output.unlink(missing_ok=True)
        if self.finished:
            self._errors.unlink(missing_ok=True)

    @property
    def _output(self) -> Path:
        return self.folder / "collected.lines"

    @property
    def _errors(self) -> Path:
        return self.folder / "collector.err"


class Unpacked(NamedTuple):
    """The result of unpacking a package. ``complete``: it was not truncated; ``missing``: files of its manifest that it
    does not contain; ``changed``: files whose size or SHA-256 differs from the manifest.
    """

    complete: bool
    missing: tuple[str, ...]
    changed: tuple[str, ...] = ()


def unpack(package: bytes, folder: Path) -> Unpacked:
    """Unpack a gzipped tar below ``folder``, each file atomically.

    A truncated package is unpacked as far as it goes, a damaged or too large one not at all. Paths outside ``folder``
    are ignored.
    """
    # name of a file → (size, SHA-256); the manifest may have only the size
    expected, arrived = dict[str, tuple[str, ...]](), dict[str, tuple[str, str]]()
    complete = _is_complete(package)
    if complete is None:
        return Unpacked(False, ())
    try:
        with tarfile.open(fileobj=io.BytesIO(package), mode="r|gz") as archive:
            for member in archive:
                target = Path(os.path.normpath(folder / member.name))
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None and member.name == "manifest":
                    manifest = content.read(_MANIFEST_BYTES).decode("utf-8", errors="surrogateescape")
                    for line in manifest.splitlines():
                        size_or_hash, _, name = line.partition("  ")
                        expected[name] = (*expected.get(name, ()), size_or_hash)
                elif content is not None and target.is_relative_to(folder):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    atomic_write(target, partial(shutil.copyfileobj, content), sync=False)
                    with target.open("rb") as file:
                        arrived[member.name] = (str(member.size), hashlib.file_digest(file, "sha256").hexdigest())
    except (tarfile.TarError, EOFError):
        complete = False
    missing = tuple(name for name in expected if name not in arrived)
    changed = tuple(name for name, values in arrived.items() if expected.get(name, values) != values)
    return Unpacked(complete, missing, changed)


def _is_complete(package: bytes) -> bool | None:
    """Return whether a package is complete by gzip's checksum (tarfile ignores it).

    None if it is damaged or unpacks to more than MAX_UNPACKED_BYTES.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(package)) as file:
            size = 0
            while chunk := file.read(2**20):
                size += len(chunk)
                if size > MAX_UNPACKED_BYTES:
                    return None
    except EOFError:
        return False
    except (zlib.error, gzip.BadGzipFile):
        return None
    return True
