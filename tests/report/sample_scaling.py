"""Invented measurements of four nodes on two leaf switches, with a slow path, judged by the rules of real checks."""

from __future__ import annotations

from seatrial.checks.fabric import pairs, scaling
from seatrial.checks.training import throughput
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Absent, Measurement, Metric, Topology, Verdict, Why

CHECKS = (scaling.CHECK, throughput.CHECK, pairs.CHECK)
NODES = ("n1", "n2", "n3", "n4")
TOPOLOGY = Topology(
    source="racks.yaml",
    switches={node: (f"leaf{1 + number // 2}", "spine") for number, node in enumerate(NODES)},
    racks={"n1": "A", "n2": "A", "n3": "B", "n4": "B"},
    rails={"leaf1": tuple(f"leaf1-rail{rail}" for rail in range(8))},
)
_SHAPE = {"gpu": "NVIDIA H100 80GB HBM3", "world_size": 32, "nodes": 4, "backend": "nccl"}

_NO_RANKS = tuple(
    Absent(metric=metric, why=Why.DOES_NOT_APPLY, reason="the sample has no times of single ranks")
    for metric in ("rank_slowdown", "rank_data_wait")
)


def measurements() -> tuple[Measurement, ...]:
    return _all_reduce(), _training(), _pairs()


def verdicts() -> tuple[Verdict, ...]:
    return tuple(
        verdict
        for check, measurement in zip(CHECKS, measurements(), strict=True)
        for verdict in judge_check(check, [measurement], {}, "acceptance")
    )


def _all_reduce() -> Measurement:
    rates = {"busbw.1node": 478.6, "busbw.2nodes": 466.3, "busbw.4nodes": 371.4, "network_busbw": 386.2}
    rates |= {"ring_busbw.2nodes": 388.1, "ring_busbw.all_nodes": 379.0}
    ratios = {"link_efficiency": 466.3 / 386.2, "ring_efficiency": 379.0 / 388.1}
    metrics = [*_metrics(rates, "GB/s"), *_metrics(ratios, "of the base"), *_metrics({"wrong_elements": 0}, "count")]
    return _measurement(scaling.CHECK.name, metrics)


def _training() -> Measurement:
    """A cluster at 86 % of a node."""
    speeds = {f"{node}/gpu{gpu}": 31_000.0 for node in NODES for gpu in range(8)}
    metrics = [
        *_metrics({"exit_code": 0}, ""),
        *_metrics({"steps_missing": 0, "nonfinite_losses": 0}, "count"),
        *_metrics({"loss_drop": 2}, "nats"),
        *_metrics({"memory_excess": 0.4}, "%"),
        *(_speed("gpu", value, subject) for subject, value in speeds.items()),
        *(_speed("node", 30_700.0, node) for node in NODES),
        _speed("cluster", 26_402.0, CLUSTER),
    ]
    efficiencies = {"node_vs_gpu": 99.03, "cluster_vs_node": 86.0, "cluster_vs_gpu": 85.17}
    metrics += _metrics({f"efficiency.{name}": value for name, value in efficiencies.items()}, "%")
    facts = {"device": "cuda", "trained": "yes", "parallelism": "fsdp2", "cpu_offload": "no"}
    return _measurement(throughput.CHECK.name, metrics, **facts).model_copy(update={"absent": _NO_RANKS})


def _pairs() -> Measurement:
    """The path between n1 and n3, and a GPU of n2, are slow."""
    metrics = [
        Metric(
            name="path_share",
            value=0.52 if (a, b) == ("n1", "n3") else 0.99,
            unit="of the best",
            subject=f"{a}->{b}",
            evidence={"switches": "leaf1 – spine – leaf2"} if (a, b) == ("n1", "n3") else None,
        )
        for number, a in enumerate(NODES)
        for b in NODES[number + 1 :]
    ]
    subjects = [f"{node}/gpu{gpu}" for node in NODES for gpu in range(8)]
    for subject in subjects:
        share = 0.49 if subject == "n2/gpu5" else 1.0
        metrics += [Metric(name="gpu_share", value=share, unit="of the median", subject=subject)]
        metrics += [Metric(name="best_busbw", value=48.2 * share, unit="GB/s", subject=subject)]
    metrics += [*_metrics({"shared_paths": 0}, "pairs"), *_metrics({"wrong_elements": 0}, "count")]
    return _measurement(pairs.CHECK.name, metrics, comparable="yes")


def _measurement(check: str, metrics: list[Metric], **facts: object) -> Measurement:
    return Measurement.model_validate(
        {
            "check": check,
            "subject": "n1/gpu0",
            "metrics": metrics,
            "facts": {**_SHAPE, **facts},
            "seconds": 12,
        }
    )


def _metrics(values: dict[str, float], unit: str) -> list[Metric]:
    return [Metric(name=name, value=value, unit=unit, subject=CLUSTER) for name, value in values.items()]


def _speed(stage: str, value: float, subject: str) -> Metric:
    return Metric(name=f"tokens_per_second_per_gpu.{stage}", value=value, unit="tokens/s/GPU", subject=subject)
