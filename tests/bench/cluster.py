"""Runs checks as the worker does, in a real process group whose ranks have different node names.

A driver is a module with FAULTS by name. In the strings of a scenario ``{rank}`` is replaced by the rank, so that
nodes can have different files.
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
from seatrial.checks.check import Context
from seatrial.model import Measurement
from seatrial.util import resolver
from seatrial.worker import measure
from tests.train import ranks

RANKS = 3
FOLDER = "SEATRIAL_TEST_FOLDER"  # environment variable of the ranks: the folder of all scenarios
# Node names of three ranks that run on three nodes, on two nodes or on one node
THREE = ("node0", "node1", "node2")
TWO = ("node0", "node0", "node1")
ONE = ("node0", "node0", "node0")

Fault = Callable[[int], AbstractContextManager[Any] | None]  # rank → patch to apply there, or None


@dataclass(frozen=True)
class Scenario:
    check: str
    nodes: tuple[str, ...] = THREE
    options: dict[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    root: str = "/"
    folder: str = "shared"  # for the check's artifacts


def on(faulty_rank: int, target: Any, name: str, replacement: Any) -> Fault:
    """The fault that replaces attribute ``name`` of ``target`` on one rank."""
    return lambda rank: patch.object(target, name, replacement) if rank == faulty_rank else None


def everywhere(target: Any, name: str, replacement: Any) -> Fault:
    return lambda rank: patch.object(target, name, replacement)


def run(out: Path, driver: str, scenarios: dict[str, Scenario], count: int = RANKS) -> dict[str, list[Measurement]]:
    """Run all scenarios in one process group; measurements by scenario and rank. ``driver``: a module with FAULTS."""
    values = {name: asdict(scenario) for name, scenario in scenarios.items()}
    by_rank = map(json.loads, ranks.require_success(ranks.run(count, _run_scenarios, driver, values, out, seconds=240)))
    records = list(by_rank)
    return {name: [Measurement.model_validate(of_rank[name]) for of_rank in records] for name in scenarios}


def _run_scenarios(driver: str, scenarios: dict[str, Any], out: Path) -> str:
    """On one rank: run every scenario with its faults; the records as JSON."""
    rank, faults = int(os.environ["RANK"]), import_module(driver).FAULTS
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", FOLDER: str(out)}
    open_group("cpu", timeout_s=60)
    records = {}
    for name, values in scenarios.items():
        scenario = Scenario(**json.loads(json.dumps(values).replace("{rank}", str(rank))))
        dist.barrier()
        with ExitStack() as stack:
            stack.enter_context(patch.object(resolver, "resolve", resolve))
            for fault in scenario.faults:
                if replaced := faults[fault](rank):
                    stack.enter_context(replaced)
            context = make_context(scenario, rank, out / name / scenario.folder)
            record = measure(catalog()[scenario.check], context, scenario.options)
        records[name] = record.model_dump(mode="json")
    close_group()
    return json.dumps(records, allow_nan=False)


def make_context(scenario: Scenario, rank: int, folder: Path) -> Context:
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
    """An IPv4 address of this machine that is not a loopback address."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    raise AssertionError("this machine has loopback addresses only")


def resolve(name: str) -> tuple[str, ...]:
    """Resolve the names of the scenarios' nodes."""
    assert name in THREE, f"unexpected name {name}"
    return (outside_address(),)
