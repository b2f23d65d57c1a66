"""Invented measurements and verdicts of the sample trials."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from seatrial.model import CLUSTER, Artifact, Basis, BasisKind, Measurement, Metric, Outcome, Reason, Series, Verdict

STARTED = 1_795_250_712.0
SIZES = {"1MiB": 2**20, "10MiB": 10 * 2**20, "100MiB": 100 * 2**20, "1GiB": 2**30, "8GiB": 2**33}
METHOD = "NCCL 2.28.9, 4 ranks on 1 node; each figure is the median of 40 windows; busbw = algbw · 2(n−1)/n"
BUSBW = (63.5, 236.1, 328.4, 356.5, 371.2)


def host(node: str, driver: str = "580.95.05") -> Measurement:
    mounts = [
        {"target": "/", "type": "ext4", "size": "1.7TiB", "free": "1.2TiB", "options": "rw,relatime"},
        {"target": "/dev/shm", "type": "tmpfs", "size": "1007GiB", "free": "1007GiB", "options": "rw,nosuid,nodev"},
        {"target": "/mnt/data", "type": "virtiofs", "size": "20TiB", "free": "17TiB", "options": "rw,relatime"},
    ]
    return Measurement(
        check="host.inventory",
        subject=node,
        metrics=(
            Metric(name="shm_bytes", value=1007 * 2**30, unit="B", subject=node),
            Metric(name="nofile_soft", value=1024, unit="files", subject=node),
            Metric(name="memlock_unlimited", value=1, unit="bool", subject=node),
            Metric(name="clock_synchronised", value=1, unit="bool", subject=node),
        ),
        facts={
            "os": {"name": "Ubuntu 24.04.3 LTS", "kernel": "6.8.0-85-generic"},
            "cpu": {"model": "Intel Xeon Platinum 8468", "sockets": 2, "cores": 96, "threads": 192, "numa_nodes": 2},
            "mounts": mounts,
            "driver": driver,
            "versions": {"python": "3.12.3", "torch": "2.11.0+cu130", "nccl": "2.28.9"},
            "container": None,
        },
        started=STARTED + 1,
        seconds=1.3,
    )


def inventory(node: str, gpus: int, faulty: int = -1) -> Measurement:
    metrics = []
    for gpu in range(gpus):
        subject = f"{node}/gpu{gpu}"
        metrics += [
            Metric(name="ecc_uncorrected", value=3 if gpu == faulty else 0, unit="count", subject=subject),
            Metric(name="pcie_width", value=16, unit="lanes", subject=subject),
            Metric(name="temperature", value=vary(31.0, subject, 4), unit="°C", subject=subject),
            Metric(name="power_limit", value=700, unit="W", subject=subject),
            Metric(name="memory", value=141 * 2**30, unit="B", subject=subject),
        ]
    gpu_table = [
        {"gpu": gpu, "uuid": f"GPU-{hash_of(f'{node}{gpu}'):08x}", "numa": gpu * 2 // gpus} for gpu in range(gpus)
    ]
    facts: dict[str, Any] = {
        "model": "NVIDIA H200",
        "vbios": "96.00.BC.00.01",
        "gpus": gpu_table,
        "topology": "NV18 all to all",
    }
    return Measurement(
        check="gpu.inventory", subject=node, metrics=tuple(metrics), facts=facts, started=STARTED + 2, seconds=2.1
    )


def all_reduce(busbw: tuple[float, ...], ranks: list[str] | None = None) -> Measurement:
    metrics = []
    for label, bandwidth in zip(SIZES, busbw, strict=True):
        samples = tuple(bandwidth * (1 + 0.01 * math.sin(3.1 * n)) for n in range(7))
        metrics.append(Metric(name=f"busbw.{label}", value=bandwidth, unit="GB/s", subject=CLUSTER, samples=samples))
        latency = 1.5 * SIZES[label] / bandwidth / 1e3
        metrics.append(Metric(name=f"latency.{label}", value=latency, unit="us", subject=CLUSTER))
    metrics.append(Metric(name="wrong_elements", value=0, unit="count", subject=CLUSTER))
    metrics += [
        Metric(name="rank_time.8GiB", value=vary(34_700, subject, 300), unit="us", subject=subject)
        for subject in ranks or [f"h200-01/gpu{gpu}" for gpu in range(4)]
    ]
    latencies = tuple(1.5 * size / bandwidth / 1e3 for size, bandwidth in zip(SIZES.values(), busbw, strict=True))
    x = tuple(float(size) for size in SIZES.values())
    return Measurement(
        check="collectives.all_reduce",
        subject=(ranks or ["h200-01/gpu0"])[0],
        rank=0,
        metrics=tuple(metrics),
        facts={
            "method": METHOD,
            "backend": "nccl",
            "dtype": "float32",
            "iterations": {"1MiB": {"warmup": 5, "windows": 40}},
        },
        series=(
            Series(name="busbw", subject=CLUSTER, x=x, y=busbw, x_unit="B", y_unit="GB/s"),
            Series(name="latency", subject=CLUSTER, x=x, y=latencies, x_unit="B", y_unit="us"),
        ),
        started=STARTED + 14,
        seconds=21.7,
    )


def cnn(node: str, gpus: int, slow: int = -1) -> list[Measurement]:
    return [_cnn(f"{node}/gpu{gpu}", gpu, 0.55 if gpu == slow else 1.0) for gpu in range(gpus)]


def _cnn(subject: str, rank: int, speed: float) -> Measurement:
    speeds = tuple(vary(61_000 * speed, f"{subject}{epoch}", 900) for epoch in range(5))
    loss = tuple(
        2.3 * math.exp(-step / 60) + 0.05 + abs(vary(0, f"{subject}{step}", 0.04)) for step in range(0, 470, 10)
    )
    return Measurement(
        check="train.cnn",
        subject=subject,
        rank=rank,
        metrics=(
            Metric(name="accuracy", value=vary(98.7, subject, 0.3), unit="%", subject=subject),
            Metric(name="images_per_s", value=sorted(speeds)[2], unit="img/s", subject=subject, samples=speeds),
            Metric(name="seconds", value=vary(11.2, subject, 0.5) / speed, unit="s", subject=subject),
        ),
        facts={"data": "MNIST", "epochs": 5, "batch": 128},
        series=(
            Series(
                name="loss", subject=subject, x=tuple(map(float, range(0, 470, 10))), y=loss, x_unit="step", y_unit=""
            ),
        ),
        artifacts=(Artifact(path=f"checks/train.cnn/rank{rank}/metrics.json", title=f"metrics.json of rank {rank}"),),
        started=STARTED + 38,
        seconds=12.4 / speed,
    )


def ddp(node: str, gpus: int) -> Measurement:
    metrics = [
        Metric(
            name="tokens_per_s_per_gpu",
            value=vary(16_800, f"{node}{gpu}", 120),
            unit="tok/s",
            subject=f"{node}/gpu{gpu}",
        )
        for gpu in range(gpus)
    ]
    metrics.append(Metric(name="identical_parameters", value=1, unit="bool", subject=CLUSTER))
    steps = tuple(float(step) for step in range(120))
    loss = tuple(2.0 + 4.4 * math.exp(-step / 25) + vary(0, f"ddp{step}", 0.05) for step in steps)
    return Measurement(
        check="train.ddp",
        subject=f"{node}/gpu0",
        rank=0,
        metrics=tuple(metrics),
        facts={"parameters": "31.2 M", "tolerance": "1e-4 relative"},
        series=(Series(name="training loss", subject=CLUSTER, x=steps, y=loss, x_unit="step", y_unit=""),),
        started=STARTED + 52,
        seconds=24.9,
    )


def hash_of(text: str) -> int:
    """A number from a text, the same in every process, unlike hash() (FNV-1a)."""
    number = 2166136261
    for byte in text.encode():
        number = (number ^ byte) * 16777619 % 2**32
    return number


def vary(value: float, key: str, width: float) -> float:
    """``value`` plus a deviation of at most ``width`` that depends on ``key`` only."""
    return round(value + width * (hash_of(key) % 1000 / 500 - 1), 4)


def rule_basis(op: str, expected: float, unit: str) -> Basis:
    return Basis(BasisKind.RULE, "", expected, unit, op)


def metric_verdicts(
    measurement: Measurement, name: str, basis: Basis, faulty: tuple[str, float] = ("", 0.0)
) -> Iterator[Verdict]:
    """PASS for each subject of the metric ``name``; FAIL with the given value for ``faulty``: (subject, value)."""
    for metric in measurement.metrics:
        if metric.name == name:
            bad = metric.subject == faulty[0]
            yield Verdict(
                check=measurement.check,
                subject=metric.subject,
                metric=name,
                outcome=Outcome.FAIL if bad else Outcome.PASS,
                reasons=(Reason.THRESHOLD_VIOLATED,) if bad else (),
                value=faulty[1] if bad else metric.value,
                unit=metric.unit,
                meaning="An uncorrectable error terminates each job that reads the row." if bad else "",
                evidence=f"{name} = {metric.value:g} on {metric.subject}",
                fix="Reset the GPU to remap the rows: `nvidia-smi -q -d ECC,ROW_REMAPPER`" if bad else "",
                basis=basis,
            )


def host_verdicts(node: str, nofile: Outcome = Outcome.PASS) -> Iterator[Verdict]:
    bad = nofile is not Outcome.PASS
    yield Verdict(
        check="host.inventory",
        subject=node,
        metric="nofile_soft",
        outcome=nofile,
        reasons=(Reason.THRESHOLD_VIOLATED,) if bad else (),
        value=1024.0,
        unit="files",
        meaning="Each tensor from a data loader worker needs a file descriptor." if bad else "",
        evidence=f"nofile_soft = 1,024 files on {node}" if bad else "",
        fix="`ulimit -n 65536` in the job; to keep it: '* soft nofile 65536' in /etc/security/limits.d/" if bad else "",
        basis=rule_basis(">=", 4096, "files"),
    )
    for metric, value, basis in (
        ("shm_bytes", 2.0**33, rule_basis(">=", 2**30, "B")),
        ("clock_synchronised", 1.0, rule_basis("==", 1, "bool")),
    ):
        yield Verdict(
            check="host.inventory",
            subject=node,
            metric=metric,
            outcome=Outcome.PASS,
            value=value,
            unit=basis.unit,
            basis=basis,
        )
    yield Verdict(
        check="host.inventory",
        subject=node,
        metric="rdma_inactive_ports",
        outcome=Outcome.SKIP,
        reasons=(Reason.NOT_APPLICABLE,),
        detail="no RDMA device",
    )


def all_reduce_verdicts(measurement: Measurement, outcome: Outcome) -> Iterator[Verdict]:
    yield from metric_verdicts(measurement, "wrong_elements", rule_basis("==", 0, "count"))
    metric = next(metric for metric in measurement.metrics if metric.name == "busbw.8GiB")
    source = "four GPUs of one host, 2026-11"
    meaning = "This size saturates the links: the all-reduce of gradients is slower by the same ratio."
    fix = "Run `nvidia-smi topo -m` and `nvidia-smi nvlink -s`: every pair should be connected by all of its links."
    yield Verdict(
        check="collectives.all_reduce",
        subject=CLUSTER,
        metric="busbw.8GiB",
        outcome=outcome,
        reasons=() if outcome is Outcome.PASS else (Reason.THRESHOLD_VIOLATED,),
        value=metric.value,
        unit="GB/s",
        ratio=metric.value / 370,
        meaning="" if outcome is Outcome.PASS else meaning,
        evidence=f"busbw.8GiB = {metric.value:g} GB/s on cluster, 7 samples "
        f"from {min(metric.samples):.4g} GB/s to {max(metric.samples):.4g} GB/s",
        fix="" if outcome is Outcome.PASS else fix,
        basis=Basis(BasisKind.SKU, "NVIDIA H200", 370, "GB/s", source=source, fail_below=0.9, warn_below=0.95),
    )
