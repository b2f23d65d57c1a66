"""Typical durations of checks and jobs on a cluster of a given size, from data/typical_seconds.yaml.

If the trial has a TCP network between nodes (``cluster.fabric``), the durations include the transfers at its rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import chain
from math import prod
from typing import Literal

from pydantic import Field, JsonValue

from seatrial.checks.check import Check
from seatrial.config.schema import Config
from seatrial.hardware.network_time import OPERATIONS_PER_SIZE, TcpNetwork
from seatrial.model import ByteSize, Frozen
from seatrial.util import data_files

# gpu: GPUs of a node; gpu_pair: ordered pairs of these GPUs; node: nodes except the first. The other units count 1 or
# 0. several_ranks: 1 if the trial has several ranks; slurm, kubernetes: 1 if the trial uses Slurm or Kubernetes
Unit = Literal["gpu", "gpu_pair", "node", "several_ranks", "slurm", "kubernetes"]
UNKNOWN_RATE: Literal["unknown rate"] = "unknown rate"
# The TCP network between the nodes of a job. None: cluster.fabric is not set, or the job has one node or no GPUs.
# UNKNOWN_RATE: cluster.fabric has no rate
Network = TcpNetwork | Literal["unknown rate"] | None


class Transfer(Frozen):
    """Operations between nodes, each on a buffer of ``size`` bytes.

    Their number is ``count``, multiplied by the number of each unit in ``per``: ``gpu``: GPUs of a node; ``node``:
    nodes except the first. ``can_be_left_out``: the check leaves out this size if the network is too slow for it.
    """

    operation: str
    size: ByteSize
    count: int = Field(gt=0)
    per: tuple[Literal["gpu", "node"], ...] = ()
    can_be_left_out: bool = False


class Duration(Frozen):
    """The typical duration of a check: ``seconds``, plus the seconds of ``per``, ``options`` and ``transfers``.

    ``per``: unit → seconds for each unit. ``options``: numeric option → seconds that are multiplied by its value.
    ``transfers`` between nodes are counted only on a TCP network; on other networks their time is negligible.
    """

    seconds: float = 0
    per: dict[Unit, float] = {}
    options: dict[str, float] = {}
    transfers: tuple[Transfer, ...] = ()


class TypicalSeconds(Frozen):
    """Content of typical_seconds.yaml. ``jobs``: placement → seconds to start and end a job.

    The entry ``child_tasks`` of ``jobs`` has the seconds that each child process adds to the start of a job.
    """

    jobs: dict[str, float]
    checks: dict[str, Duration]


@cache
def typical_seconds() -> TypicalSeconds:
    return TypicalSeconds.model_validate(data_files.read("typical_seconds.yaml"))


def typical_duration(
    check: Check,
    options: Mapping[str, JsonValue],
    config: Config,
    gpus_per_node: int,
    network: Network = None,
) -> float | None:
    """Return the typical duration of ``check`` in seconds; None without data, or if its network has an unknown rate."""
    duration = typical_seconds().checks.get(check.name)
    if duration is None or (network == UNKNOWN_RATE and uses_network(check)):
        return None
    counts: Mapping[Unit, int] = {
        "gpu": gpus_per_node,
        "gpu_pair": gpus_per_node * (gpus_per_node - 1),
        "node": config.cluster.nodes - 1,
        "several_ranks": int(gpus_per_node * config.cluster.nodes > 1),
        "slurm": int(config.uses_slurm),
        "kubernetes": int(config.launcher == "kubernetes"),
    }
    defaults = {name: field.default for name, field in check.options.model_fields.items()}
    values = {**defaults, **options}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    options_s = sum(seconds_per_one * numbers.get(name, 0) for name, seconds_per_one in duration.options.items())
    units_s = sum(seconds_per_unit * counts[unit] for unit, seconds_per_unit in duration.per.items())
    return duration.seconds + units_s + options_s + network_duration(check, options, network)


def start_duration(placement: str, checks: Iterable[Check], *, on_gpus: bool) -> float:
    """Return the typical duration of the start and end of a job in seconds."""
    seconds = typical_seconds().jobs
    children = sum(len(check.child_tasks) for check in checks) if on_gpus else 0
    return seconds[placement] + children * seconds["child_tasks"]


def configured_network(config: Config, nodes: int, gpus_per_node: int, *, on_gpus: bool) -> Network:
    """Return the TCP network between the nodes of a job. ``Network`` states when it is None or UNKNOWN_RATE."""
    fabric = config.cluster.fabric
    if fabric is None or nodes == 1 or not on_gpus:
        return None
    return TcpNetwork(nodes, gpus_per_node, fabric.rate) if fabric.rate else UNKNOWN_RATE


def uses_network(check: Check) -> bool:
    """Return whether the duration of ``check`` depends on the rate of the network between nodes."""
    return check.timed_sizes is not None or bool(_transfers(check))


def network_duration(check: Check, options: Mapping[str, JsonValue], network: Network) -> float:
    """Return the seconds of the transfers of ``check`` between nodes; 0 if ``network`` is not a TcpNetwork."""
    if not isinstance(network, TcpNetwork):
        return 0.0
    seconds = 0.0
    if check.timed_sizes:
        sizes_by_mode = check.timed_sizes(check.options.model_validate(options), network)
        for size in chain.from_iterable(sizes_by_mode.values()):
            seconds += OPERATIONS_PER_SIZE * network.operation_s(check.operation, size)
    unit_counts = {"gpu": network.gpus, "node": network.nodes - 1}
    for transfer in _transfers(check):
        if transfer.can_be_left_out and network.too_slow_sizes(transfer.operation, [transfer.size]):
            continue
        count = transfer.count * prod(unit_counts[unit] for unit in transfer.per)
        seconds += count * network.operation_s(transfer.operation, transfer.size)
    return seconds


def _transfers(check: Check) -> tuple[Transfer, ...]:
    duration = typical_seconds().checks.get(check.name)
    return duration.transfers if duration else ()
