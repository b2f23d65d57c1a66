"""Runs checks as the worker does, in real processes of one group that take each other for several nodes.

A driver is a module that names faults and calls ``main``; ``run`` starts it with SCENARIOS.json and a folder.
In the strings of a scenario, ``{rank}`` stands for the process's own rank: nodes that see different files.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch.distributed as dist

from seatrial.bench.group import close_group, end_process, open_group
from seatrial.checks import catalog
from seatrial.checks.base import Place
from seatrial.discover import host
from seatrial.model import Measurement
from seatrial.worker import measure

RANKS = 3
THREE = ("node0", "node1", "node2")
TWO = ("node0", "node0", "node1")
ONE = ("node0", "node0", "node0")

Fault = Callable[[int], AbstractContextManager[Any] | None]  # for a rank: what to do there, if anything


@dataclass(frozen=True)
class Scenario:
    check: str
    nodes: tuple[str, ...] = THREE
    options: dict[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    root: str = "/"
    folder: str = "shared"  # in which the check's own artifacts go


def on(victim: int, target: Any, name: str, stand_in: Any) -> Fault:
    return lambda rank: patch.object(target, name, stand_in) if rank == victim else None


def everywhere(target: Any, name: str, stand_in: Any) -> Fault:
    return lambda rank: patch.object(target, name, stand_in)


def run(out: Path, driver: str, scenarios: dict[str, Scenario], count: int = RANKS) -> dict[str, list[Measurement]]:
    """Scenario → what each rank measured, all in one start of module ``driver``, which ends in ``main``."""
    (out / "scenarios.json").write_text(json.dumps({name: asdict(scenario) for name, scenario in scenarios.items()}))
    command = [sys.executable, "-m", driver, str(out / "scenarios.json"), str(out)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(count)]
    return {name: [Measurement.model_validate(rank[name]) for rank in ranks] for name in scenarios}


def main(faults: dict[str, Fault], count: int = RANKS) -> None:
    """What a driver runs: ``count`` processes that share what is imported by now, which takes longest at a start."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, faults)) for rank in range(count)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _rank(rank: int, faults: dict[str, Fault]) -> None:
    """One process: every scenario, each with its faults."""
    scenarios, out = Path(sys.argv[1]), Path(sys.argv[2])
    os.environ["RANK"] = str(rank)
    open_group("cpu", timeout_s=60)
    records = {}
    for name, values in json.loads(scenarios.read_text()).items():
        scenario = Scenario(**json.loads(json.dumps(values).replace("{rank}", str(rank))))
        dist.barrier()
        with ExitStack() as stack:
            stack.enter_context(patch.object(host, "resolve", resolve))
            for fault in scenario.faults:
                if planted := faults[fault](rank):
                    stack.enter_context(planted)
            here = place(scenario, rank, out / name / scenario.folder)
            record = measure(catalog()[scenario.check], here, scenario.options)
        records[name] = record.model_dump(mode="json")
    close_group()
    (out / f"rank{rank}.json").write_text(json.dumps(records, allow_nan=False))
    end_process()


def place(scenario: Scenario, rank: int, folder: Path) -> Place:
    folder.mkdir(parents=True, exist_ok=True)
    return Place(
        node=scenario.nodes[rank],
        rank=rank,
        world_size=len(scenario.nodes),
        local_rank=rank,
        device="cpu",
        promised_gpus=None,
        out=folder,
        run_dir=folder.parents[1],
        root=Path(scenario.root),
    )


def outside_address() -> str:
    """An address of this machine by which another one could reach it."""
    for addresses in psutil.net_if_addrs().values():
        for found in addresses:
            if found.family == socket.AF_INET and not found.address.startswith("127."):
                return found.address
    raise AssertionError("this machine has no address but loopback")


def resolve(name: str) -> tuple[str, ...]:
    """A name service that knows the nodes of the scenarios."""
    assert name in THREE, f"nobody should ask for {name}"
    return (outside_address(),)
