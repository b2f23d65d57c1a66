"""Records of 2, 4 and 16 nodes of 8 GPUs over four networks, healthy or with a fault, from the benchmarks' generators.

The network is that of benchmarks/network_decisions.py, the GPUs are those of benchmarks/judging.py, without random
numbers: all healthy devices reach the same share of what they can, with the same small spread of their samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import NamedTuple

import numpy as np
from benchmarks.judging import scale_trial
from benchmarks.network_decisions import CHECKS, FAULTS, GPUS, H100, H200, Draw, Machine
from pydantic import JsonValue

from benchmarks import network_decisions
from seatrial.checks import catalog
from seatrial.config.schema import Config
from seatrial.hardware.links import Links, TcpInterfaces, network_to_busbw_ratio
from seatrial.model import CLUSTER, Decision, DecisionValue, Measurement, Metric, MissingNode, Trial
from seatrial.pipeline.plan import NodeGpus, make_plan
from tests.guard.changes import Change, only_checks, record, retries, slowed, times, with_facts, with_metrics

SHARE = 0.97  # of the bound of the network that healthy collectives reach
SPREAD = (0.99, 1.0, 1.01, 0.995, 1.005, 1.0, 0.992, 1.008)  # samples relative to their median
DEVICE_RECORD = "2026-11-22-4xh200/acceptance"
INVENTORY = "host.inventory"
DEVICE_CHECKS = (INVENTORY, "device.gemm", "device.memory", "transfer.host", "transfer.peers", "collectives.gpu_pairs")
SLOW_NODE, SLOW_GPU, SLOW_RAIL = "node0001", "node0001/gpu3", "rail3"
NODES = (2, 4, 16)
TCP_GBPS = 100.0
EMPTY = Trial(
    seatrial="guard",
    name="guard",
    command=(),
    host="host",
    started=0.0,
    seconds=0.0,
    config={},
    origins={},
    environment={},
    jobs=(),
    results=(),
    measurements=(),
    verdicts=(),
    findings=(),
    timings=(),
    decision=Decision(value=DecisionValue.INCOMPLETE, reason=""),
)


class TcpMachine(Machine):
    """A cluster without RDMA: one interface per node."""

    @property
    def links(self) -> Links:
        return Links(network="tcp", tcp=TcpInterfaces(("eth0",), self.gbps))

    def bound(self, operation: str, metric: str) -> float:
        ratio = network_to_busbw_ratio(operation, "Ring", GPUS * self.nodes, self.nodes)
        return self.gbps / 8 / (ratio or 1.0)


NETWORKS: Mapping[str, Callable[[int], Machine]] = {
    "infiniband": lambda nodes: Machine(H200, "InfiniBand", 8, 400, nodes),
    "roce": lambda nodes: Machine(H200, "Ethernet", 8, 400, nodes),
    "efa": lambda nodes: Machine(H200, "Unspecified", 16, 200, nodes),
    "tcp": lambda nodes: TcpMachine(H200, "TCP", 1, TCP_GBPS, nodes),
}


class SteadyDraw(Draw):
    """A draw of benchmarks/network_decisions.py without noise."""

    def __post_init__(self) -> None:
        self.shares = dict.fromkeys(network_decisions.OPERATION_CHECKS.values(), SHARE)
        self.network, self.absolute = 1.0, None
        self.nodes = [f"node{number:04}" for number in range(self.machine.nodes)]

    def _metric(self, name: str, value: float, subject: str, unit: str) -> Metric:
        samples = tuple(value * each for each in SPREAD)
        return Metric(name=name, value=median(samples), unit=unit, subject=subject, samples=samples)


@cache
def healthy(network: str, nodes: int) -> Trial:
    """The healthy record of a cluster."""
    machine = NETWORKS[network](nodes)
    # GPUs do not depend on the network, and their pairs not on the number of nodes
    on_devices = DEVICE_CHECKS[: (None if nodes < max(NODES) else 3) if network == "infiniband" else 1]
    names = (*on_devices, *CHECKS)
    fabric = {"fabric": {"kind": "tcp"}} if network == "tcp" else {}
    config = Config.model_validate(
        {
            "name": "guard",
            "launcher": "slurm",
            "cluster": {"nodes": nodes, "gpus_per_node": GPUS, **fabric},
            "checks": {name: {} for name in names},
        }
    )
    draw = SteadyDraw(machine, FAULTS["healthy"], np.random.default_rng(0))
    ports = {each.subject: each.facts["rdma"] for each in draw.measurements((INVENTORY,), 0)}
    measurements: Iterable[Measurement] = (
        *(
            with_facts(each, rdma=ports[each.subject]) if each.check == INVENTORY else each
            for each in _devices(nodes)
            if each.check in on_devices
        ),
        *draw.measurements(CHECKS, 0),
    )
    if network == "tcp":
        measurements = (_over_tcp(each, draw.nodes) for each in measurements)
    return EMPTY.model_copy(
        update={
            "config": config.model_dump(mode="json"),
            "jobs": make_plan(config, catalog(), NodeGpus(GPUS)).jobs,
            "measurements": tuple(measurements),
        }
    )


@cache
def _devices(nodes: int) -> tuple[Measurement, ...]:
    """The measurements of the GPUs: those of a record, copied to all GPUs of the cluster."""
    _, _, scaled = scale_trial(only_checks(record(DEVICE_RECORD), DEVICE_CHECKS), nodes, GPUS)
    return tuple(scaled)


def _over_tcp(measurement: Measurement, nodes: list[str]) -> Measurement:
    """The measurement on nodes with one Ethernet interface, over sockets."""
    if measurement.check == INVENTORY:
        interface: JsonValue = {"name": "eth0", "state": "up", "speed_mbit_s": int(TCP_GBPS * 1e3)}
        return with_facts(measurement, rdma={"devices": []}, nics={"interfaces": [interface]})
    if measurement.check == "collectives.transport" and measurement.metrics:
        over_tcp = with_facts(
            measurement,
            transports={"P2P/CUMEM": GPUS, "NET/Socket": GPUS},
            socket_interfaces={node: ["eth0"] for node in nodes},
            sockets_expected="yes",
        )
        return with_metrics(over_tcp, slowed(0.0, "rdma_without_gpudirect"))
    return measurement


@dataclass(frozen=True)
class _Fault:
    """A slower place: factor of the values on it, and of the collectives of all nodes, which wait for it."""

    subjects: tuple[str, ...]
    factor: float
    cluster_factor: float

    def change(self) -> Change:
        place = slowed(self.factor, subjects=self.subjects)
        cluster = slowed(self.cluster_factor, "busbw*", (CLUSTER,))

        def change(metric: Metric) -> Metric | None:
            is_speed = "/s" in metric.unit or metric.unit.startswith("of the")
            once = place(metric) if is_speed else metric
            return cluster(once) if once else None

        return change


_SLOW: Mapping[str, _Fault] = {
    "slow GPU": _Fault((SLOW_GPU, f"{SLOW_GPU}->*", f"{SLOW_NODE}/*->gpu3", SLOW_RAIL), 0.7, 0.8),
    "slow node": _Fault((SLOW_NODE, f"{SLOW_NODE}/*", f"{SLOW_NODE}->*", f"*->{SLOW_NODE}"), 0.85, 0.85),
    "slow rail": _Fault((SLOW_RAIL, "*/gpu3"), 0.6, 0.6),
    "slow pair": _Fault(("node0000->node0001",), 0.5, 0.75),
}


def _with_slow(trial: Trial, fault: _Fault) -> Trial:
    """The trial with a slower place in all measurements; checks that it slows were measured a second time."""
    change = fault.change()
    measurements = tuple(with_metrics(each, change) for each in trial.measurements)
    slow = {new.check for old, new in zip(trial.measurements, measurements, strict=True) if old.metrics != new.metrics}
    again = retries([each for each in trial.measurements if each.check in slow], 1, change)
    return trial.model_copy(update={"measurements": measurements, "retries": tuple(again)})


def _with_two_models(trial: Trial) -> Trial:
    """The GPUs of one node are of another model."""
    changed = (
        with_facts(each, gpu=H100) if each.subject.startswith(SLOW_NODE) and "gpu" in each.facts else each
        for each in trial.measurements
    )
    return trial.model_copy(update={"measurements": tuple(changed)})


def _without_last_node(trial: Trial) -> Trial:
    """The last node is not in the measurements."""
    last = f"node{trial.config['cluster']['nodes'] - 1:04}"
    kept = (
        with_metrics(each, lambda metric: None if last in metric.subject else metric)
        for each in trial.measurements
        if not each.subject.startswith(last)
    )
    return trial.model_copy(update={"measurements": tuple(kept)})


def _on_fewer_nodes(trial: Trial) -> Trial:
    """All jobs ran without the last node, which is drained."""
    cluster = trial.config["cluster"]
    nodes = cluster["nodes"]
    fewer = _without_last_node(trial)
    jobs = tuple(job if job.placement == "control" else job.on_fewer_nodes(nodes - 1) for job in trial.jobs)
    measurements = tuple(_of_nodes(each, nodes - 1) for each in fewer.measurements)
    config = {**trial.config, "cluster": {**cluster, "min_nodes": nodes - 1}}
    missing = (MissingNode(name=f"node{nodes - 1:04}", state="IDLE+DRAIN"),)
    update = {"config": config, "jobs": jobs, "measurements": measurements, "missing_nodes": missing}
    return trial.model_copy(update=update)


def _of_nodes(measurement: Measurement, nodes: int) -> Measurement:
    if measurement.facts.get("nodes") in (None, 1):
        return measurement
    return with_facts(measurement, nodes=nodes, world_size=nodes * GPUS)


def _with_disagreeing_ranks(trial: Trial) -> Trial:
    """Rank 3 counts other nodes, and uses another backend."""
    changed = (
        with_facts(each, nodes=99, backend="gloo") if each.rank == 3 and each.check in CHECKS else each
        for each in trial.measurements
    )
    return trial.model_copy(update={"measurements": tuple(changed)})


_OTHER: Mapping[str, Callable[[Trial], Trial]] = {
    "healthy": lambda trial: trial,
    "two GPU models": _with_two_models,
    "missing node": _without_last_node,
    "fewer nodes": _on_fewer_nodes,
    "ranks that disagree": _with_disagreeing_ranks,
}


class ClusterShape(NamedTuple):
    name: str
    trial: Trial


_OTHER_SUBJECTS = {"on another GPU": "node0003/gpu9", "on another node": "node0099/gpu7"}
_CONTRADICTING = ("device.gemm", "collectives.all_gather")  # a check of each GPU and one of all ranks together


def _contradictions() -> Iterator[ClusterShape]:
    """Records in which one check does not fit to the plan or to the other checks."""
    trial = only_checks(healthy("infiniband", 4), (INVENTORY, "collectives.transport", *_CONTRADICTING))
    for check in _CONTRADICTING:
        of_check = [each for each in trial.measurements if each.check == check]
        first, last = of_check[0], of_check[-1]
        skipped = last.model_copy(update={"metrics": (), "skipped": "no GPU"})
        renamed = {name: _with_subject(last, subject) for name, subject in _OTHER_SUBJECTS.items()}
        for name, changed in {
            "a rank missing": of_check[:-1],
            "a rank twice": [*of_check, last],
            "two ranks on one GPU": [*of_check[:-1], _with_subject(last, of_check[-2].subject)],
            **{name: [*of_check[:-1], each] for name, each in renamed.items()},
            "a rank skipped": [*of_check[:-1], skipped],
            "skipped beside metrics": [*of_check[:-1], last.model_copy(update={"skipped": "no GPU"})],
            "all ranks skipped": [each.model_copy(update={"metrics": (), "skipped": "no GPU"}) for each in of_check],
            "another world size": [with_facts(each, world_size=24) for each in of_check],
            "a metric of an unknown GPU": [
                with_metrics(first, lambda metric: replace(metric, subject="node0099/gpu0")),
                *of_check[1:],
            ],
            "two values of one metric": [
                first.model_copy(update={"metrics": (*first.metrics, *(times(each, 2.0) for each in first.metrics))}),
                *of_check[1:],
            ],
            "an unknown metric unit": [
                with_metrics(first, lambda metric: replace(metric, unit="furlongs")),
                *of_check[1:],
            ],
        }.items():
            others = [each for each in trial.measurements if each.check != check]
            yield ClusterShape(f"{check} {name}", trial.model_copy(update={"measurements": (*others, *changed)}))
        planned = {
            "in no job": tuple(
                job.with_checks(tuple(name for name in job.checks if name != check)) for job in trial.jobs
            ),
            "in a job of nodes": tuple(
                job.model_copy(update={"placement": "nodes"}) if check in job.checks else job for job in trial.jobs
            ),
            "in a job of fewer ranks": tuple(
                job.model_copy(update={"ranks_per_node": 4}) if check in job.checks else job for job in trial.jobs
            ),
        }
        for name, jobs in planned.items():
            yield ClusterShape(f"{check} {name}", trial.model_copy(update={"jobs": jobs}))


def _with_subject(measurement: Measurement, subject: str) -> Measurement:
    """The measurement on another GPU, with the metrics of its own GPU."""
    old = measurement.subject
    moved = with_metrics(
        measurement, lambda metric: replace(metric, subject=subject) if metric.subject == old else metric
    )
    return moved.model_copy(update={"subject": subject})


def shapes() -> Iterator[ClusterShape]:
    """All clusters with all faults, and records that contradict themselves."""
    yield from _contradictions()
    for nodes in NODES:
        for network in NETWORKS:
            trial = healthy(network, nodes)
            for name, fault in _SLOW.items():
                yield ClusterShape(f"{network} {nodes}x8 {name}", _with_slow(trial, fault))
            # on many nodes, what does not depend on the network only over the first one
            others = _OTHER if nodes < max(NODES) or network == "infiniband" else {"healthy": _OTHER["healthy"]}
            for name, change in others.items():
                yield ClusterShape(f"{network} {nodes}x8 {name}", change(trial))
