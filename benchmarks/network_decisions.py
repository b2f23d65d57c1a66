"""Draws whole records of collectives between nodes and counts the decisions: false alarms, and rejected faults.

    python benchmarks/network_decisions.py [--draws 300] [--other-draws 30] [--large-draws 30] [--json FILE]

A draw is a trial of the checks in CHECKS. A healthy cluster reaches shares of the bound of its network that published
healthy runs reached (benchmarks/published_figures.yaml), one share for each operation; the noise of the windows is that
of the healthy H200 runs in docs/results, and NETWORK_NOISE on top. Bad checks are drawn again as the pipeline measures
them again, by the same functions. A fault counts as rejected only if a verdict of a collective is FAIL: host.inventory
has the rates of the ports, without its metrics, and is not required.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np
from pydantic import JsonValue

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.decision_power import HEALTHY_RUNS, lower_bound
from benchmarks.published_figures import BY_REFERENCE, FIGURES, OPERATIONS, judged
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Cluster, Config
from seatrial.hardware.fabric_model import ModelValue, model_value
from seatrial.hardware.links import Links, RdmaPorts
from seatrial.hardware.references import Sku, skus
from seatrial.judge import checks_to_retry, judge
from seatrial.judge.decision import decide
from seatrial.model import CLUSTER, Absent, DecisionValue, Job, Measurement, Metric, Outcome, Why, size_label
from seatrial.pipeline.plan import NodeGpus, make_plan
from seatrial.pipeline.run_directory import load_trial
from seatrial.util import data_files

GPUS = 8
MANY_NODES = 16
NETWORK_NOISE = 0.01  # relative standard deviation of a window, a choice: links between nodes are shared
OPERATION_CHECKS = {
    f"collectives.{name}": name
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive", "broadcast", "reduce")
}
PAIRS, RAILS, EACH_NODE = "collectives.pairs", "collectives.rails", "collectives.each_node"
CHECKS = ("collectives.transport", *OPERATION_CHECKS, PAIRS, RAILS, EACH_NODE)
REQUIRED_SHARE = 0.99
PORT_SHARE = 0.95  # of the rate of its ports that a GPU of a healthy cluster reaches
# Parts of the cause or source of healthy figures: software of 2023, up to 67 nodes without SHARP, a size that does not
# saturate the ports, and three racks
NOT_TYPICAL = ("old stack", "Together AI", "awsome-distributed-ai", "nccl#1801")
NO_TAIL = Absent(metric="p99_ratio.1GiB", why=Why.DOES_NOT_APPLY, reason="the drawn records have no single operations")
# Check → metrics that the drawn records lack
ABSENT = {
    "collectives.transport": (
        Absent(metric="nvls_missing", why=Why.DOES_NOT_APPLY, reason="the drawn records have no NVLS channels"),
    ),
    **dict.fromkeys(OPERATION_CHECKS, (NO_TAIL,)),
}


@dataclass(frozen=True)
class Fault:
    """What a fault changes; factors apply to bandwidths.

    ``network``: all traffic between nodes. ``port``: one port of the first node. ``node``: all collectives of the
    first node, also inside it. ``transport``: NCCL's transport between nodes. ``absolute``: GB/s of every operation.
    ``level``: the share of its bound that every operation of a healthy cluster reaches, instead of published shares.
    """

    network: tuple[float, float] = (1.0, 1.0)  # range
    port: float = 1.0
    node: float = 1.0
    transport: str = "NET/IB/GDRDMA"
    absolute: tuple[float, float] | None = None
    level: float | None = None


FAULTS = {
    "healthy": Fault(),
    "one port at half rate": Fault(port=0.5),
    "one node 15 % slow in collectives": Fault(node=0.85),
    # 72 of 178 and 33 of 93 GB/s (NVIDIA/nccl#2409, #1412)
    "GPUDirect off": Fault(network=(0.16, 0.40), transport="NET/IB"),
    # 100 Gb/s of TCP: 4 to 6 GB/s (NVIDIA/nccl#450)
    "sockets": Fault(transport="NET/Socket", absolute=(2.0, 6.0)),
}
# On two nodes the slower links limit all traffic, so that no comparison of nodes, pairs or rails shows them
LINKS_OF_TWO_NODES = {
    f"links of one node {slow} % slow, healthy at {level} % of the bounds" if slow else f"healthy at {level} %": Fault(
        network=(1 - slow / 100, 1 - slow / 100), level=level / 100
    )
    for level in (93, 97)
    for slow in (0, 10, 12, 15, 20)
}


@dataclass(frozen=True)
class Machine:
    """A cluster: GPU model by its NVML name, network, ports of a node and Gbit/s of each."""

    gpu: str
    network: str
    ports: int
    gbps: float
    nodes: int

    @property
    def sku(self) -> Sku:
        return next(sku for sku in skus() if self.gpu in sku.nvml_names)

    @property
    def links(self) -> Links:
        kind = {"InfiniBand": "ib", "Ethernet": "roce", "Unspecified": "efa"}[self.network]
        network = "efa" if kind == "efa" else "rdma"
        # As NCCL chooses without a tuner: trees on two and three nodes
        chosen = {("all_reduce", "8GiB"): "NVLSTree" if self.nodes < 4 else "Ring"}
        return Links(network=network, ports=RdmaPorts(kind, self.ports, self.gbps), algorithms=chosen)

    def bound(self, operation: str, metric: str) -> float:
        """The bound of a metric, as in network_bounds; that of all-gather for operations without limits."""
        facts: dict[str, JsonValue] = {"world_size": GPUS * self.nodes, "nodes": self.nodes}
        for name in (operation, "all_gather"):
            model = model_value(f"{name}.{metric}", facts, [self.sku], self.links, None)
            if isinstance(model, ModelValue):
                return model.bound.value
        raise ValueError(f"no bound of {operation} {metric} on {self}: {model}")

    def __str__(self) -> str:
        return f"{self.gpu.removeprefix('NVIDIA ')}, {self.links.fabric} {self.ports}×{self.gbps:g}, {self.nodes} nodes"


H100, H200, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"
FULLY_DRAWN = 2  # the first machines of MACHINES: they get --draws, the others --other-draws
LARGE_NODES = 128
MACHINES = (
    *(Machine(H200, "InfiniBand", 8, 400, nodes) for nodes in (2, 16)),
    *(
        machine
        for nodes in (4, LARGE_NODES)
        for machine in (
            Machine(H200, "InfiniBand", 8, 400, nodes),
            Machine(H100, "InfiniBand", 8, 400, nodes),
            Machine(B200, "InfiniBand", 8, 400, nodes),
            Machine(H200, "Ethernet", 8, 400, nodes),
            Machine(H200, "Unspecified", 16, 200, nodes),
        )
    ),
)


@cache
def healthy_shares() -> Mapping[str, tuple[float, ...]]:
    """Operation → shares of the bound that published healthy runs reached.

    Without the runs of NOT_TYPICAL, and without figures that are not compared with the bound of the network.
    """
    shares: dict[str, list[float]] = defaultdict(list)
    for row in map(judged, data_files.parse(FIGURES.read_text(encoding="utf-8"))):
        figure = row.figure
        is_typical = not any(text in f"{figure.get('cause', '')} {figure['source']}" for text in NOT_TYPICAL)
        if row.outcome and figure["verdict"] == "healthy" and figure["nics"] not in BY_REFERENCE and is_typical:
            shares[OPERATIONS.get(row.figure["op"], row.figure["op"])].append(row.share)
    shares["broadcast"] = shares["reduce"] = shares["all_gather"]
    return {operation: tuple(values) for operation, values in shares.items()}


@cache
def window_noise() -> tuple[np.ndarray, ...]:
    """Windows of the bandwidths in the healthy H200 runs, relative to their median."""
    trials = (load_trial(record_path(name)) for name in HEALTHY_RUNS)
    metrics = (
        metric
        for trial in trials
        for measurement in trial.measurements
        if measurement.check in OPERATION_CHECKS
        for metric in measurement.metrics
    )
    saturated = (metric for metric in metrics if metric.name in ("busbw.1GiB", "busbw.8GiB"))
    return tuple(np.array(metric.samples[:30]) / median(metric.samples) for metric in saturated)


@dataclass
class Draw:
    """One trial of a machine with a fault: the speed of the cluster is the same in all its measurements."""

    machine: Machine
    fault: Fault
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.shares = {name: self.fault.level or self.rng.choice(values) for name, values in healthy_shares().items()}
        self.network = self.rng.uniform(*self.fault.network)
        self.absolute = self.rng.uniform(*self.fault.absolute) if self.fault.absolute else None
        self.nodes = [f"node{number:04}" for number in range(self.machine.nodes)]

    def measurements(self, checks: Sequence[str], retry: int) -> Iterator[Measurement]:
        """The measurements of ``checks`` on all ranks; those of host.inventory have the ports only."""
        if "host.inventory" in checks:
            yield from map(self._host, self.nodes)
        for check in checks:
            if check not in CHECKS:
                continue
            for rank in range(len(self.nodes) * GPUS):
                node, gpu = self.nodes[rank // GPUS], rank % GPUS
                metrics, facts = self._result(check, rank, node)
                yield Measurement(
                    check=check,
                    subject=f"{node}/gpu{gpu}",
                    rank=rank,
                    metrics=tuple(metrics),
                    absent=ABSENT.get(check, ()) if metrics else (),
                    facts={**facts, "error_counters": {"counters_read": 30}},
                    retry=retry,
                )

    def _host(self, node: str) -> Measurement:
        ports = []
        for number in range(self.machine.ports):
            is_slow = node == self.nodes[0] and number == 3
            gbps = self.machine.gbps * (self.fault.port if is_slow else 1)
            port = {"port": "1", "state": "ACTIVE", "rate": f"{gbps:g} Gb/sec (4X)", "link_layer": self.machine.network}
            ports.append({"name": f"mlx5_{number}", "ports": [port]})
        return Measurement(check="host.inventory", subject=node, facts={"rdma": {"devices": ports}})

    def _result(self, check: str, rank: int, node: str) -> tuple[list[Metric], dict[str, JsonValue]]:
        """Metrics and facts of one rank: rank 0 has those of the cluster, the first rank of a node those of a node."""
        if check == EACH_NODE:
            return self._node_result(node) if rank % GPUS == 0 else ([], {})
        if rank:
            return [], {}
        facts: dict[str, JsonValue] = {"backend": "nccl", "gpu": self.machine.gpu, "backend_environment": {}}
        facts |= {"nodes": len(self.nodes), "world_size": len(self.nodes) * GPUS, "sockets_expected": "no"}
        if check == "collectives.transport":
            metrics, more = self._transport()
            return metrics, facts | more
        if check in OPERATION_CHECKS:
            return self._operation_metrics(OPERATION_CHECKS[check]), facts
        if check == RAILS:
            return self._rail_metrics(), facts
        return self._pair_metrics(), facts | {"comparable": "yes" if len(self.nodes) > 2 else "no"}

    def _transport(self) -> tuple[list[Metric], dict[str, JsonValue]]:
        ranks, transport = len(self.nodes) * GPUS, self.fault.transport
        if self.machine.network == "Unspecified":
            transport = transport.replace("NET/IB", "NET/Libfabric")
        chosen = "NVLS_TREE" if len(self.nodes) < 4 else "RING"
        values = {
            "socket_despite_rdma": ranks * (transport == "NET/Socket"),
            "rdma_without_gpudirect": ranks * (transport in ("NET/IB", "NET/Libfabric")),
        }
        facts: dict[str, JsonValue] = {
            "transports": {"P2P/CUMEM": ranks, transport: ranks},
            "rdma_ports": {},
            "nccl_choices": {"all_reduce": {"by_size": {"8GiB": {"algorithm": chosen}}}},
        }
        return [Metric(name=name, value=value, unit="ranks", subject=CLUSTER) for name, value in values.items()], facts

    def _operation_metrics(self, operation: str) -> list[Metric]:
        size = 2**33 if operation == "all_reduce" or len(self.nodes) >= MANY_NODES else 2**30
        names = {f"busbw.{size_label(size)}": operation}
        names |= {"busbw_ring.8GiB": operation} if operation == "all_reduce" else {}
        if operation != "all_reduce" and len(self.nodes) >= MANY_NODES:
            names["busbw.1GiB"] = operation  # measured, not judged
        metrics = [self._rate(name, self._speed(operation, name)) for name in names]
        counts = {"wrong_elements": "count", "sizes_not_allocated": "sizes"}
        counts |= {"wrong_elements_ring": "count"} if operation == "all_reduce" else {}
        return [*metrics, *(Metric(name=name, value=0, unit=unit, subject=CLUSTER) for name, unit in counts.items())]

    def _speed(self, operation: str, metric: str) -> float:
        """GB/s of an operation: the bound of the network with its fault times the share, or the fault's own rate."""
        if self.absolute:
            return float(self.absolute)
        size = metric if metric.endswith("8GiB") else metric.replace("1GiB", "8GiB")
        healthy = self.machine.bound(operation, size) * self.shares[operation] * self.fault.node
        if operation == "send_receive":  # one GPU of a node sends, seldom that of the slow port
            return float(healthy * self.network)
        # The slowest port limits a collective; inside the node, NVLink may bind the healthy one
        machine = replace(self.machine, gbps=self.machine.gbps * self.network * self.fault.port)
        return float(min(healthy, machine.bound(operation, size) * self.shares[operation]))

    @property
    def _port_rate(self) -> float:
        """GB/s of a GPU over its own ports."""
        ports = self.machine.ports * self.machine.gbps / 8 / GPUS
        return ports * (self.fault.level or PORT_SHARE) * self.network

    def _pair_metrics(self) -> list[Metric]:
        count = len(self.nodes)
        distances = range(1, count) if count <= 8 else range(1, 5)
        pairs = {tuple(sorted((a, (a + distance) % count))) for a in range(count) for distance in distances}
        base = self.absolute or self._port_rate
        metrics = []
        for a, b in sorted(pairs):
            factor = (self.fault.node if a == 0 else 1.0) * (self.fault.port if a == 0 else 1.0)
            rate = self._rate("pair_busbw", base * factor, f"{self.nodes[a]}->{self.nodes[b]}")
            metrics += [rate, self._share("path_share", 1.0, rate.subject, "of the best")]
        for rank in range(count * GPUS):
            is_slow = rank < GPUS
            factor = (self.fault.node if is_slow else 1.0) * (self.fault.port if rank == 3 else 1.0)
            subject = f"{self.nodes[rank // GPUS]}/gpu{rank % GPUS}"
            metrics.append(self._rate("best_busbw", base * factor, subject))
            metrics.append(self._share("gpu_share", factor, subject, "of the median"))
        values = {"shared_paths": "pairs", "wrong_elements": "count"}
        return [*metrics, *(Metric(name=name, value=0, unit=unit, subject=CLUSTER) for name, unit in values.items())]

    def _rail_metrics(self) -> list[Metric]:
        base = self.absolute or self._port_rate
        metrics = []
        for rail in range(GPUS):
            factor = self.fault.port if rail == 3 else 1.0
            metrics.append(self._rate("rail_busbw", base * factor * self.fault.node, f"rail{rail}"))
            metrics.append(self._share("rail_share", factor, f"rail{rail}", "of the median"))
        return [*metrics, Metric(name="wrong_elements", value=0, unit="count", subject=CLUSTER)]

    def _node_result(self, node: str) -> tuple[list[Metric], dict[str, JsonValue]]:
        references = self.machine.sku.expected["all_reduce.busbw.8GiB"]
        reference = next(each.value for each in references if each.gpus == GPUS)
        factor = self.fault.node if node == self.nodes[0] else 1.0
        facts: dict[str, JsonValue] = {"backend": "nccl", "gpu": self.machine.gpu}
        facts |= {"nodes": 1, "world_size": GPUS}
        metrics = [
            self._rate("busbw.8GiB", reference * factor, node),
            self._share("node_share", factor, node, "of the best"),
            Metric(name="wrong_elements", value=0, unit="count", subject=node),
            Metric(name="sizes_not_allocated", value=0, unit="sizes", subject=node),
        ]
        return metrics, facts

    def _rate(self, name: str, value: float, subject: str = CLUSTER) -> Metric:
        return self._metric(name, value, subject, "GB/s")

    def _share(self, name: str, value: float, subject: str, unit: str) -> Metric:
        return self._metric(name, value, subject, unit)

    def _metric(self, name: str, value: float, subject: str, unit: str) -> Metric:
        windows = window_noise()[self.rng.integers(len(window_noise()))]
        noise = 1 + NETWORK_NOISE * self.rng.standard_normal(len(windows))
        samples = tuple((value * windows * noise).tolist())
        return Metric(name=name, value=median(samples), unit=unit, subject=subject, samples=samples)


@dataclass
class Trials:
    """Trials on one machine."""

    machine: Machine

    def __post_init__(self) -> None:
        names = ("host.inventory", *CHECKS)
        self.required = {name: name in CHECKS for name in names}
        settings = {name: CheckSettings(required=required) for name, required in self.required.items()}
        cluster = Cluster(nodes=self.machine.nodes, gpus_per_node=GPUS)
        self.config = Config(name="network", cluster=cluster, checks=settings)
        self.jobs: tuple[Job, ...] = make_plan(self.config, catalog(), NodeGpus(GPUS)).jobs

    def decide(self, fault: Fault, rng: np.random.Generator) -> tuple[DecisionValue, bool, str]:
        """The decision on one draw, whether a verdict of a collective is FAIL, and the reason."""
        draw = Draw(self.machine, fault, rng)
        first, retries = list(draw.measurements(tuple(self.required), 0)), list[Measurement]()
        for number in (1, 2):
            names = checks_to_retry(self.config, first, retries, catalog(), number)
            retries += draw.measurements([name for name in names if name in CHECKS], number)
        verdicts = judge(self.config, self.jobs, first, catalog(), {}, retries=retries)
        decision = decide(self.required, verdicts, {}, "a benchmark")
        failed = any(each.outcome is Outcome.FAIL and each.check in CHECKS for each in verdicts)
        return decision.value, failed, decision.reason


def count_decisions(machine: Machine, draws: int, faults: Mapping[str, Fault]) -> Iterator[dict[str, object]]:
    """The decisions on ``draws`` draws of each fault on a machine, printed as they come."""
    trials = Trials(machine)
    for name, fault in faults.items():
        is_healthy, started = name.startswith("healthy"), time.process_time()
        wanted = DecisionValue.ACCEPTED if is_healthy else DecisionValue.REJECTED
        rng, decisions, reasons = np.random.default_rng(machine.nodes), Counter[str](), Counter[str]()
        good = 0
        for _ in range(draws):
            value, failed, reason = trials.decide(fault, rng)
            decisions[value.value] += 1
            good += value is wanted and (is_healthy or failed)
            reasons[reason[:300]] += value is not wanted
        bound = lower_bound(good, draws)
        seconds = (time.process_time() - started) / draws
        print(
            f"{machine!s:<34} {name:<62} {dict(decisions)}  wanted in at least {bound:.1%}, {seconds:.2f} s each",
            flush=True,
        )
        for reason, count in (+reasons).most_common(2):
            print(f"    {count} × {reason}", flush=True)
        row = {"gpu": machine.gpu, "fabric": machine.links.fabric, "ports": f"{machine.ports}x{machine.gbps:g}"}
        yield {**row, "nodes": machine.nodes, "case": name, "draws": draws, **decisions, "good": good}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300, help="of each case, H200 over ib-8x400, 2 and 16 nodes")
    parser.add_argument("--other-draws", type=int, default=30, help="of each case, other machines")
    parser.add_argument("--only", default="", help="machines whose name contains this text, such as 'H200, ib-8x400'")
    parser.add_argument("--cases", default="", help="only cases whose name contains this text")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--large-draws", type=int, default=30, help="of each case, on 128 nodes")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for number, machine in enumerate(MACHINES):
        if options.only in str(machine):
            other_draws = options.large_draws if machine.nodes >= LARGE_NODES else options.other_draws
            faults = {**FAULTS, **(LINKS_OF_TWO_NODES if machine.nodes == 2 else {})}
            faults = {name: fault for name, fault in faults.items() if options.cases in name}
            rows += count_decisions(machine, options.draws if number < FULLY_DRAWN else other_draws, faults)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(int(str(row["good"])) >= REQUIRED_SHARE * int(str(row["draws"])) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
