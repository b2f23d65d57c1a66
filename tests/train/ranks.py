"""Several ranks on this machine, quickly: forked from a process that has imported torch, and done nothing with it.

In place of torchrun, wherever that is not what is tested: importing torch, and what trains, takes each process seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.model import SeatrialError
from seatrial.train.train_config import TrainConfig

CORES = len(os.sched_getaffinity(0))  # said to be as many ranks, so that each takes one thread
# not pytest's own process: it has threads, which a fork does not copy, and what they hold stays locked
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["seatrial.train.loop", "torch._dynamo", "tests.train.hf.imports", __name__])


@dataclass
class Failed:
    """What a rank raised: a SeatrialError's message, or a traceback."""

    said: str


def config(name: str = "mistral-tiny", **changes: Any) -> TrainConfig:
    """A short run on a small network, in fp32, whose loss falls quickly."""
    fields: dict[str, Any] = {
        "run_name": "t",
        "model": {"name": name},
        "data": {"samples": 64},
        "seq_len": 16,
        "bsz": 4,
        "max_steps": 4,
        "untimed_steps": 1,
        "profile_steps": 0,
        "bf16": False,
        "learning_rate": {"peak": 3e-3, "schedule": "constant"},
    }
    return TrainConfig.model_validate({**fields, **changes})


def run(ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 180) -> list[Any]:
    """What ``function(*arguments)`` returned on each rank, or Failed. A rank that was killed is None."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ends, processes = [], []
    for rank in range(ranks):
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_rank, args=(rank, ranks, port, theirs, function, arguments), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        return [_answer(end, seconds) for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def heard(found: list[Any]) -> list[Any]:
    """The same, where no rank failed."""
    failed = [one.said for one in found if isinstance(one, Failed)]
    assert not failed, failed[0]
    return found


def _answer(end: Any, seconds: float) -> Any:
    assert end.poll(seconds), "a rank did not answer"
    try:
        return end.recv()
    except EOFError:
        return None


def _rank(rank: int, ranks: int, port: int, answer: Any, function: Callable[..., Any], arguments: Any) -> None:
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": CORES, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in found.items()} | {"MASTER_ADDR": "127.0.0.1"}
    from seatrial.train import failure

    failure.GRACE_S = 0.2  # no torchrun waits for one rank to end
    try:
        answer.send(function(*arguments))
    except SeatrialError as error:
        answer.send(Failed(str(error)))
    except BaseException:
        answer.send(Failed(traceback.format_exc()))
    os._exit(0)  # torch's threads may abort while the interpreter is torn down


def train(settings: TrainConfig, out: Path) -> dict[str, Any]:
    """``loop.train``, imported where it runs."""
    from seatrial.train import loop

    return loop.train(settings, out)
