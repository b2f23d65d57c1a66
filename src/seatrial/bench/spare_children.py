"""Child processes that import the training code at the start of a job and wait for their task.

The imports take 5.5 s (2 H200) or 12.7 s (4 H200) of each training run that a check starts (``phases_s`` in
docs/results). They end before the first check: during a check they would take CPU time from its measurement. A waiting
child has no CUDA context and uses no CPU time. Its rank sends the task over a pair of sockets. The rendezvous store is
not used for this: on a large cluster, one connection per child would exceed the limit of open files of the store's
process.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from seatrial.bench.child_result import VISIBLE_DEVICES, visible_device
from seatrial.bench.rank import store_barrier
from seatrial.util import processes
from seatrial.util.gc_pause import gc_paused

# The GPUs that a child sees: its rank's, or all of the node. Fixed from the start, as an import may initialize CUDA
Gpus = Literal["own", "all"]

IMPORTED = "seatrial.train.loop"  # this module imports all that a training run needs
READY_LIMIT_S = 120.0  # children that import for longer are not used
SEND_LIMIT_S = 10.0  # a child that does not read its task within this time, such as a stopped process, is not used
# Prefixes of variables that a check may still change after the imports, since they are read when a process group or
# communicator is opened. An import may already have read other variables, such as HF_HOME or OMP_NUM_THREADS.
READ_LATER = ("NCCL_", "TORCH_NCCL_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_READY = b"1"  # the child sends it after its imports, and again when it has read its task
_waiting: list[SpareChild] = []  # the spare children of this rank


@dataclass(frozen=True)
class SpareChild:
    """A child that waits for its task on ``connection``.

    ``environment``: the environment of the rank when it started the child.
    """

    child: processes.Child
    gpus: Gpus
    connection: socket.socket
    environment: Mapping[str, str]

    def run(self, module: str, task: Mapping[str, Any], env: Mapping[str, str], files: Mapping[str, Path]) -> bool:
        """Let the child continue as ``python -m module TASK`` with the environment ``env`` and the output ``files``.

        Return whether the child has read its task. If it has not, it is ended.
        """
        paths = {stream: str(path.absolute()) for stream, path in files.items()}
        message = {"module": module, "task": json.dumps(task), "env": dict(env), "files": paths}
        self.connection.settimeout(SEND_LIMIT_S)
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode())
            self.connection.shutdown(socket.SHUT_WR)
        if not (has_read := self.is_ready(SEND_LIMIT_S)):
            self.end()
        self.connection.close()
        return has_read

    def is_ready(self, limit_s: float) -> bool:
        """Wait for _READY from the child, at most ``limit_s``; False also if the child has ended."""
        self.connection.settimeout(limit_s)
        try:
            return self.connection.recv(1) == _READY
        except OSError:
            return False

    def end(self) -> None:
        """End the child without a task."""
        self.connection.close()
        processes.stop(self.child, grace_s=1.0)


def start(gpus_per_child: Iterable[Gpus], folder: Path, device: str) -> None:
    """Start one child of this rank for each item; called before the rank's process group is opened.

    An item says which GPUs the child sees: "own" is only ``device``, "all" are all GPUs of the node. The output of the
    children goes to ``folder``.
    """
    rank = os.environ["RANK"]
    for number, gpus in enumerate(gpus_per_child):
        env = {VISIBLE_DEVICES: visible_device(device)} if gpus == "own" and device != "cpu" else {}
        output = folder / f"spare{number}.rank{rank}.err"
        connection, child_connection = socket.socketpair()
        with child_connection:
            argv = [sys.executable, "-m", "seatrial.bench.spare_children"]
            child = processes.start(argv, env=env, stdin=child_connection.fileno(), stdout=output, stderr=output)
        _waiting.append(SpareChild(child, gpus, connection, processes.inherited()))


def wait_until_ready() -> None:
    """Wait until the children of all ranks have ended their imports; called by all ranks before the first check.

    A child that failed or takes longer than READY_LIMIT_S is not used: a check then starts a new process.
    """
    deadline = time.monotonic() + READY_LIMIT_S
    for spare in list(_waiting):
        if not spare.is_ready(max(0.1, deadline - time.monotonic())):
            spare.end()
            _waiting.remove(spare)
    store_barrier()


def take(gpus: Gpus | None, env: Mapping[str, str]) -> SpareChild | None:
    """Return a waiting child of this rank that sees ``gpus``; it then belongs to the caller. None if there is none.

    ``env``: the variables that the caller adds to the rank's environment. A child is usable if it was started with the
    same value of each variable. Exception: variables that begin with one of READ_LATER may differ.
    """
    for spare in list(_waiting):
        changed = [name for name, value in env.items() if spare.environment.get(name) != value]
        if spare.gpus == gpus and all(name.startswith(READ_LATER) for name in changed):
            _waiting.remove(spare)
            if spare.child.poll() is None:
                return spare
            spare.connection.close()
    return None


def wait_for_task(connection: socket.socket) -> None:
    """In the child, after the imports: wait for the task, then run its module as ``python -m`` would."""
    # A CUDA context would take memory of the GPU that the checks measure
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise SystemExit(f"the import of {IMPORTED} opened CUDA: this process is not used")
    with connection:
        connection.sendall(_READY)
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
        if not received:
            raise SystemExit("the rank has ended, or does not use this process")
        message = json.loads(received)
        connection.sendall(_READY)
    for name in os.environ.keys() - message["env"].keys() - {processes.TAG}:  # processes.stop finds this child by TAG
        del os.environ[name]
    os.environ.update(message["env"])
    for stream, number in (("out", 1), ("err", 2)):
        with Path(message["files"][stream]).open("ab") as file:
            os.dup2(file.fileno(), number)
    sys.argv = [message["module"], message["task"]]
    runpy.run_module(message["module"], run_name="__main__", alter_sys=True)


def main() -> None:
    """Import the training code, then run the task that the rank sends over the socket at standard input."""
    connection = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as null_device:
        os.dup2(null_device.fileno(), 0)  # a process that an import starts must not keep the socket open
    with gc_paused():
        importlib.import_module(IMPORTED)
    wait_for_task(connection)


if __name__ == "__main__":
    main()
