"""Runs a program with a server and a client side, such as ib_write_bw, between ranks of different nodes.

``run_transfers`` is called by all ranks together. Each server listens on a TCP port that is free on its node; clients
start after all servers listen. While the programs run, the ranks wait in the rendezvous store, so that GPUs are idle.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from seatrial.bench.connectivity import local_address
from seatrial.bench.rank import gather, store_barrier
from seatrial.util import processes
from seatrial.util.node_name import dns_name

START_LIMIT_S = 10.0  # from a server's start until it listens; servers listen before they allocate memory
PORT_ATTEMPTS = 3  # another process may take a free port before the server does
_POLL_S = 0.02  # period of polls of a program or its port
# Characters that are kept of each stream: the end of stdout (the table) and the start of stderr (the first errors)
_MAX_CHARACTERS = 1200
_LISTEN = "0A"  # proc(5), /proc/net/tcp: state TCP_LISTEN


@dataclass(frozen=True)
class Transfer:
    """One run of the program on both sides. ``key`` identifies the run; ``server`` and ``client`` are ranks."""

    key: str
    server: int
    client: int


@dataclass(frozen=True)
class ProgramResult:
    """The exit code and output of one side. ``error``: why it did not start, listen or end in time; else empty.

    ``code``: None if the program did not start, or has not ended.
    """

    out: str = ""
    err: str = ""
    code: int | None = None
    error: str = ""


@dataclass(frozen=True)
class TransferResult:
    server: ProgramResult
    client: ProgramResult


@dataclass
class _Program:
    """A program with its output files; without a child, it did not start. ``error``: as in ProgramResult."""

    child: processes.Child | None = None
    files: tuple[Path, Path] | None = None
    error: str = ""

    @property
    def is_running(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def end(self, error: str) -> None:
        """End the program if it still runs; ``error``: why."""
        if self.child and self.is_running:
            self.error = "; ".join(filter(None, [error, processes.stop(self.child, grace_s=1.0)]))

    def result(self) -> ProgramResult:
        if not self.child or not self.files:
            return ProgramResult(error=self.error)
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in self.files)
        return ProgramResult(out[-_MAX_CHARACTERS:], err[:_MAX_CHARACTERS], self.child.poll(), self.error)


def run_transfers(
    transfers: Sequence[Transfer], argv: Mapping[str, Sequence[str]], node: str, limit_s: float
) -> dict[str, TransferResult]:
    """Run all ``transfers`` concurrently, and return on all ranks the results by key.

    ``argv``: key → command, for each transfer in which this rank takes part, without ``-p PORT`` and the server's
    address. A program that still runs ``limit_s`` after the start of the clients is ended.
    """
    with TemporaryDirectory() as folder:
        results_of_this_rank = _run_programs(transfers, argv, local_address() or dns_name(node), Path(folder), limit_s)
    store_barrier()
    results = reduce(or_, gather(results_of_this_rank))
    return {
        transfer.key: TransferResult(results[transfer.key, "server"], results[transfer.key, "client"])
        for transfer in transfers
    }


def _run_programs(
    transfers: Sequence[Transfer], argv: Mapping[str, Sequence[str]], address: str, files: Path, limit_s: float
) -> dict[tuple[str, str], ProgramResult]:
    """The results of this rank's programs by key and side; ``address``: this node's address, for the clients."""
    rank = dist.get_rank()
    store_barrier()
    programs: dict[tuple[str, str], _Program] = {}
    endpoints: dict[str, tuple[str, int]] = {}  # key → address and port of the server
    for number, transfer in enumerate(transfers):
        if transfer.server == rank:
            programs[transfer.key, "server"], port = _start_server(argv[transfer.key], files / f"{number}.server")
            if port:
                endpoints[transfer.key] = address, port
    endpoints = reduce(or_, gather(endpoints))
    for number, transfer in enumerate(transfers):
        if transfer.client == rank:
            programs[transfer.key, "client"] = _Program(error="not started: the server does not listen")
            if transfer.key in endpoints:
                host, port = endpoints[transfer.key]
                command = [*argv[transfer.key], "-p", str(port), host]
                programs[transfer.key, "client"] = _start(command, files / f"{number}.client")
    deadline = time.monotonic() + limit_s
    for program in programs.values():
        while program.is_running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        program.end(f"did not end within {limit_s:g} s")
    return {name: program.result() for name, program in programs.items()}


def _start(argv: Sequence[str], prefix: Path) -> _Program:
    """Start the program; its output files begin with ``prefix``."""
    out, err = prefix.with_suffix(f"{prefix.suffix}.out"), prefix.with_suffix(f"{prefix.suffix}.err")
    for path in (out, err):
        path.unlink(missing_ok=True)
    try:
        return _Program(processes.start(argv, env={}, stdout=out, stderr=err), (out, err))
    except OSError as error:
        return _Program(error=f"{argv[0]} does not start: {error.strerror}")


def _start_server(argv: Sequence[str], prefix: Path) -> tuple[_Program, int]:
    """The server and its TCP port; 0 if it does not listen."""
    for _ in range(PORT_ATTEMPTS):
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        server = _start([*argv, "-p", str(port)], prefix)
        deadline = time.monotonic() + START_LIMIT_S
        while server.is_running and time.monotonic() < deadline:
            if _is_listening(port):
                return server, port
            time.sleep(_POLL_S)
        server.end(f"did not listen within {START_LIMIT_S:g} s")
        if "listen to port" not in server.result().err:  # perftest's message if another process has taken the port
            break
    return server, 0


def _is_listening(port: int) -> bool:
    """Whether a server listens on ``port``, from /proc: the server would take a test connection for its client."""
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        if path.exists() and re.search(rf":{port:04X} \S+ {_LISTEN} ", path.read_text(encoding="utf-8")):
            return True
    return False
