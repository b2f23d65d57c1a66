"""Child processes that import the training code at the start of a job and wait for their task.

On 2 and 4 H200 the imports take 5.5 and 12.7 s of each training that a check starts (``phases_s`` in docs/results).
They are done before the first check: during a check they would take CPU time from its measurement. A waiting child
has no CUDA context and uses no CPU time.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from seatrial.bench import group
from seatrial.bench.child_result import VISIBLE_DEVICES, visible_device
from seatrial.bench.rank import store_barrier
from seatrial.util import processes
from seatrial.util.gc_pause import gc_paused

Gpus = Literal["own", "all"]  # visible to a child during its imports: a library may open CUDA there

IMPORTED = "seatrial.train.loop"  # with all that a training imports
READY_LIMIT_S = 120.0  # children that import for longer are not used
_POLL_S = 0.1
_waiting: list[SpareChild] = []  # of this rank


@dataclass(frozen=True)
class SpareChild:
    """A child that waits for the key ``key`` of the rendezvous store; it was started with ``environment``."""

    child: processes.Child
    gpus: Gpus
    key: str
    environment: Mapping[str, str]

    def run(self, module: str, task: Mapping[str, Any], env: Mapping[str, str], files: Mapping[str, Path]) -> None:
        """Let the child go on as ``python -m module TASK`` with the environment ``env`` and the output ``files``."""
        changed = {name: value for name, value in env.items() if self.environment.get(name) != value}
        message = {
            "module": module,
            "task": json.dumps(task),
            "changed": changed,  # not all variables: they may be secret, and the store may be on another node
            "removed": [name for name in self.environment if name not in env],
            "files": {stream: str(path.absolute()) for stream, path in files.items()},
        }
        group.rendezvous_store().set(self.key, json.dumps(message))


def start(trainings: Iterable[Gpus], folder: Path, device: str) -> None:
    """Start one child of this rank for each training; called before the rank's process group is opened.

    Their output goes to ``folder``. ``own``: the child sees only the GPU ``device``, for a training on one GPU.
    """
    rank = os.environ["RANK"]
    for number, gpus in enumerate(trainings):
        key = f"seatrial/spare_children/{rank}/{number}"
        own = {VISIBLE_DEVICES: visible_device(device)} if gpus == "own" and device != "cpu" else {}
        output = folder / f"spare{number}.rank{rank}.err"
        child = processes.start(
            [sys.executable, "-m", "seatrial.bench.spare_children", key], env=own, stdout=output, stderr=output
        )
        _waiting.append(SpareChild(child, gpus, key, {**processes.inherited(), **own}))


def wait_until_ready() -> None:
    """Wait until the children of all ranks have ended their imports; called by all ranks before the first check.

    A child that failed or takes longer than READY_LIMIT_S is not used: a check then starts a new process.
    """
    store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + READY_LIMIT_S
    connected = group.rendezvous_store() if _waiting else store
    for spare in list(_waiting):
        while not connected.check([f"{spare.key}/ready"]):
            if spare.child.poll() is not None or time.monotonic() > deadline:
                processes.stop(spare.child, grace_s=1.0)
                _waiting.remove(spare)
                break
            time.sleep(_POLL_S)
    store_barrier()


def take(gpus: Gpus | None) -> SpareChild | None:
    """Return a waiting child of this rank that sees ``gpus``; it then belongs to the caller. None if there is none."""
    for spare in list(_waiting):
        if spare.gpus == gpus:
            _waiting.remove(spare)
            if spare.child.poll() is None:
                return spare
    return None


def run_task(key: str) -> None:
    """In the child, after the imports: wait for the task, then run its module as ``python -m`` would."""
    store = group.rendezvous_store()
    store.set(f"{key}/ready", "")
    message = json.loads(store.get(key))
    for name in message["removed"]:
        os.environ.pop(name, None)
    os.environ.update(message["changed"])
    for stream, number in (("out", 1), ("err", 2)):
        with Path(message["files"][stream]).open("ab") as file:
            os.dup2(file.fileno(), number)
    sys.argv = [message["module"], message["task"]]
    runpy.run_module(message["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    with gc_paused():
        importlib.import_module(IMPORTED)
    run_task(sys.argv[1])
