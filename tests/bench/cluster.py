"""Runs checks as the worker does, in real processes of one group that take each other for several nodes.

A driver is a module that names faults. In the strings of a scenario, ``{rank}`` stands for the process's own rank:
nodes that see different files.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch.distributed as dist

from seatrial.bench.group import close_group, open_group
from seatrial.checks import catalog
from seatrial.checks.base import Context
from seatrial.discover import host
from seatrial.model import Measurement
from seatrial.worker import measure
from tests.train import ranks

RANKS = 3
FOLDER = "SEATRIAL_TEST_FOLDER"  # in the environment of a rank: that of all scenarios
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
    """Scenario → what each rank measured, all in one start, in the folder ``out``. ``driver``: a module with FAULTS."""
    wanted = {name: asdict(scenario) for name, scenario in scenarios.items()}
    told = [json.loads(one) for one in ranks.heard(ranks.run(count, _carry_out, driver, wanted, out, seconds=240))]
    return {name: [Measurement.model_validate(rank[name]) for rank in told] for name in scenarios}


def _carry_out(driver: str, scenarios: dict[str, Any], out: Path) -> str:
    """On one rank: every scenario, each with its faults. Its records, as JSON."""
    rank, faults = int(os.environ["RANK"]), import_module(driver).FAULTS
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", FOLDER: str(out)}
    open_group("cpu", timeout_s=60)
    records = {}
    for name, values in scenarios.items():
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
    return json.dumps(records, allow_nan=False)


def place(scenario: Scenario, rank: int, folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(
        node=scenario.nodes[rank],
        rank=rank,
        world_size=len(scenario.nodes),
        local_rank=rank,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=folder,
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
