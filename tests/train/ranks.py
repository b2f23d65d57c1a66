"""Runs a function on several local ranks, forked from a process that has imported torch.

Faster than torchrun, where each process imports torch: for all tests that do not test torchrun itself.
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

CORES = len(os.sched_getaffinity(0))  # reported as LOCAL_WORLD_SIZE, so that each rank uses one thread
# not forked from pytest's process: locks of its threads would stay locked
FORK = multiprocessing.get_context("forkserver")
PRELOADED = ["tests.train.preloaded", __name__]  # tests/train/conftest.py adds stack hf where it trains
FORK.set_forkserver_preload(PRELOADED)


@dataclass
class Failed:
    """The error of a rank: its type, and the message of a SeatrialError or a traceback."""

    message: str
    error_type: str = ""

    @property
    def is_root_cause(self) -> bool:
        """Whether the rank did not fail because of another rank."""
        return self.error_type != "PeerFailed"


def config(name: str = "mistral-tiny", **changes: Any) -> TrainConfig:
    """A short fp32 run of a small model whose loss falls quickly."""
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
    """The result of ``function(*arguments)`` by rank, or Failed; None for a killed rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ends, processes = [], []
    for rank in range(ranks):
        parent_end, child_end = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_rank, args=(rank, ranks, port, child_end, function, arguments), daemon=True)
        process.start()
        child_end.close()
        ends.append(parent_end)
        processes.append(process)
    try:
        return [_receive(end, seconds) for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def require_success(results: list[Any]) -> list[Any]:
    """``results`` if no rank failed."""
    failed = [result.message for result in results if isinstance(result, Failed)]
    assert not failed, failed[0]
    return results


def _receive(end: Any, seconds: float) -> Any:
    assert end.poll(seconds), "a rank did not answer"
    try:
        return end.recv()
    except EOFError:
        return None


def _rank(rank: int, ranks: int, port: int, connection: Any, function: Callable[..., Any], arguments: Any) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": CORES, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"}
    from seatrial.train import failure

    failure.GRACE_S = 0.2  # there is no torchrun to wait for
    try:
        connection.send(function(*arguments))
    except SeatrialError as error:
        connection.send(Failed(str(error), type(error).__name__))
    except BaseException as error:
        connection.send(Failed(traceback.format_exc(), type(error).__name__))
    os._exit(0)  # torch's threads may abort at interpreter shutdown


def train(settings: TrainConfig, out: Path) -> dict[str, Any]:
    """``loop.train``, imported on the rank."""
    from seatrial.train import loop

    return loop.train(settings, out)
