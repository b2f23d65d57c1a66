"""Invented trials; no value was measured. ``python -m tests.report.samples DIR`` renders all of them in all formats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from seatrial import report
from seatrial.checks.check import Check, Context
from seatrial.checks.declare import Answer
from seatrial.model import (
    CLUSTER,
    Artifact,
    Basis,
    BasisKind,
    Decision,
    DecisionValue,
    Finding,
    Job,
    JobResult,
    JobState,
    Measurement,
    Metric,
    Outcome,
    Phase,
    Reason,
    Scope,
    Series,
    Timing,
    Trial,
    Verdict,
)
from tests.report import sample_scaling
from tests.report.sample_data import (
    BUSBW,
    STARTED,
    all_reduce,
    all_reduce_verdicts,
    cnn,
    ddp,
    host,
    host_verdicts,
    inventory,
    metric_verdicts,
    rule_basis,
)
from tests.report.sample_telemetry import telemetry


def _measure(context: Context, options: Any) -> Iterator[Answer]:
    raise NotImplementedError((context, options))


def _check(name: str, title: str, phase: Phase, scope: Scope) -> Check:
    return Check(name=name, title=title, phase=phase, scope=scope, declared=(), measure=_measure, limit_s=60)


# Not the real catalog, so that golden files do not depend on the titles of real checks.
CATALOG = {
    check.name: check
    for check in (
        _check("gpu.inventory", "GPU inventory: models and health", Phase.ENVIRONMENT, Scope.NODE),
        _check("host.inventory", "Operating system, limits, filesystems and network", Phase.ENVIRONMENT, Scope.NODE),
        _check("collectives.all_reduce", "All-reduce bandwidth and correctness", Phase.INTERCONNECT, Scope.CLUSTER),
        _check("train.cnn", "Training of a small convolutional network", Phase.SINGLE_GPU, Scope.GPU),
        _check("train.ddp", "DDP training of a small transformer", Phase.DISTRIBUTED, Scope.CLUSTER),
    )
}


def accepted() -> Trial:
    """One node with four healthy GPUs, and one warning."""
    measurements = (host("h200-01"), inventory("h200-01", 4), all_reduce(BUSBW), *cnn("h200-01", 4), ddp("h200-01", 4))
    verdicts = (
        *host_verdicts("h200-01", nofile=Outcome.WARN),
        *metric_verdicts(measurements[1], "ecc_uncorrected", rule_basis("==", 0, "")),
        *metric_verdicts(measurements[1], "pcie_width", rule_basis(">=", 16, "")),
        *all_reduce_verdicts(measurements[2], Outcome.PASS),
        *(
            verdict
            for measurement in measurements[3:7]
            for verdict in metric_verdicts(measurement, "accuracy", rule_basis(">", 95, "%"))
        ),
        *metric_verdicts(
            measurements[7], "tokens_per_s_per_gpu", Basis(BasisKind.TRIAL, "acceptance", 500, "tok/s", ">")
        ),
        *metric_verdicts(measurements[7], "identical_parameters", rule_basis("==", 1, "bool")),
    )
    return _trial(
        measurements=measurements,
        verdicts=verdicts,
        decision=Decision(
            value=DecisionValue.ACCEPTED,
            reason="all 5 required checks passed, with warnings in host.inventory",
            tested_hardware="1 node × 4 GPUs on h200-01; not tested: links between nodes, storage",
        ),
    )


def with_telemetry() -> Trial:
    """``accepted`` with telemetry."""
    return accepted().model_copy(update={"telemetry": telemetry("h200-01", 4)})


def rejected() -> Trial:
    """Two nodes with ECC errors, a slow GPU, a slow all-reduce, three findings, and an excluded check."""
    names = ("node1", "node2")
    measurements = (
        *(host(name) for name in names),
        inventory("node1", 4),
        inventory("node2", 4, faulty=2),
        all_reduce(
            (40.2, 120.8, 190.3, 221.7, 226.9), ranks=[f"{node}/gpu{gpu}" for node in names for gpu in range(4)]
        ),
        *cnn("node1", 4),
        *cnn("node2", 4, slow=2),
    )
    verdicts = (
        *host_verdicts("node1"),
        *host_verdicts("node2", nofile=Outcome.WARN),
        *metric_verdicts(measurements[2], "ecc_uncorrected", rule_basis("==", 0, "")),
        *metric_verdicts(measurements[3], "ecc_uncorrected", rule_basis("==", 0, ""), faulty=("node2/gpu2", 3)),
        *all_reduce_verdicts(measurements[4], Outcome.FAIL),
        *(
            verdict
            for measurement in measurements[5:]
            for verdict in metric_verdicts(measurement, "accuracy", rule_basis(">", 95, "%"))
        ),
        *(
            Verdict(
                check="train.cnn",
                subject=measurement.subject,
                metric="images_per_s",
                outcome=Outcome.UNJUDGED,
                reasons=(Reason.NO_REFERENCE,),
                detail="no reference value for NVIDIA H20-3e",
                value=measurement.metrics[1].value,
                unit="img/s",
                fix="Learn a baseline from good runs: `seatrial baseline learn RUN… --out site.yaml`",
            )
            for measurement in measurements[5:]
        ),
    )
    return _trial(
        name="acceptance",
        nodes=2,
        measurements=measurements,
        verdicts=verdicts,
        findings=(
            Finding(
                title="NVLink 7 of node2/gpu2 is down",
                subject="node2/gpu2",
                confidence="high",
                evidence="The link is inactive, all-reduce reaches 61 % of the expected bandwidth, and the rank time "
                "of this GPU is the longest at every size.",
                first_command="nvidia-smi nvlink --status -i 2 && nvidia-smi nvlink -e -i 2",
                fix="Reset the GPU with `nvidia-smi --gpu-reset -i 2` when no job runs; if the link stays down, reseat "
                "or replace the baseboard.",
                source="NVLink state of gpu.inventory; rank_time of collectives.all_reduce",
            ),
            Finding(
                title="Row remapping is pending on node2/gpu2",
                subject="node2/gpu2",
                confidence="medium",
                evidence="3 uncorrectable ECC errors; the row remap needs a GPU reset.",
                first_command="nvidia-smi -q -d ROW_REMAPPER -i 2",
            ),
            Finding(
                title="The soft limit of open files is the distribution's default",
                subject="node2",
                confidence="low",
                evidence="node2 has 1,024, node1 has 1,048,576: node2 is configured differently.",
                fix="Compare /etc/security/limits.d/ of both nodes.",
            ),
        ),
        excluded_checks={"train.ddp": "--skip"},
        decision=Decision(
            value=DecisionValue.REJECTED,
            reason="2 checks failed: collectives.all_reduce, gpu.inventory",
            tested_hardware="2 nodes × 4 GPUs; train.ddp was excluded by --skip",
        ),
    )


TRACEBACK = """\
Traceback (most recent call last):
  File "/opt/seatrial/worker.py", line 88, in run_check
    for observation in check.measure(subject, options):
  File "/opt/seatrial/checks/collectives_all_reduce.py", line 76, in measure
    results[size] = collectives.measure_all_reduce(size, options.dtype, subject.device, options.seconds_per_size)
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2014, remote process exited or there was a
network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketPollConnect: connect to 10.0.7.13<43817> returned Connection refused, exceeded error retry count after 35 attempts
"""


def incomplete() -> Trial:
    """A job that lost a rank: earlier measurements are kept, later checks are ERROR."""
    measurements = (
        host("node1"),
        inventory("node1", 4),
        Measurement(check="collectives.all_reduce", subject="node1/gpu0", rank=0, error=TRACEBACK, seconds=12.2),
    )
    cause = "rank 3 (node1/gpu3) was killed by SIGKILL 4.1 s into collectives.all_reduce"
    errors = (
        Verdict(
            check=check,
            subject=CLUSTER,
            outcome=Outcome.ERROR,
            reasons=(Reason.MEASUREMENT_FAILED,),
            detail=reason,
            evidence=evidence,
            fix="See jobs/ranks/attempt1/rank3.log; on the node: `dmesg -T | grep -i -E 'oom|killed process'`",
        )
        for check, reason, evidence in (
            ("collectives.all_reduce", cause, TRACEBACK),
            ("train.cnn", "not measured: the job ended before it began", ""),
            ("train.ddp", "not measured: the job ended before it began", ""),
        )
    )
    return _trial(
        measurements=measurements,
        verdicts=(
            *host_verdicts("node1"),
            *metric_verdicts(measurements[1], "ecc_uncorrected", rule_basis("==", 0, "")),
            *errors,
        ),
        results=(
            _result("nodes", JobState.COMPLETED, 4.1, 0.4),
            _result("ranks", JobState.FAILED, 21.4, 7.9, failed_subject="node1/gpu3", cause=f"{cause}\n{TRACEBACK}"),
            _result(
                "ranks", JobState.HUNG, 61.0, 8.2, failed_subject="node1/gpu3", cause="no heartbeat for 60 s", attempt=2
            ),
        ),
        findings=(
            Finding(
                title="The kernel killed a process: out of memory",
                subject="node1",
                confidence="medium",
                evidence="Rank 3 was killed by SIGKILL, which seatrial did not send.",
                first_command="journalctl -k --since -10min | grep -i 'out of memory'",
                fix="Raise the memory limit of the job, or lower `options.sizes`.",
            ),
        ),
        decision=Decision(
            value=DecisionValue.INCOMPLETE,
            reason="collectives.all_reduce is ERROR; train.cnn is ERROR; train.ddp is ERROR",
            tested_hardware="1 node × 4 GPUs on node1",
        ),
    )


HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)> ]]> &lt; \"quotes' \x00\x07 \x1b[31mred\x1b[0m "
    "\x1b]8;;http://evil.example\x07link\x1b]8;;\x07 [bold red]markup[/] [link=file:///etc/passwd]x[/link] :boom: "
    "PA\u200bSS\u2060\ufeff\u00ad\U000e0041 "
    "{{ 7*7 }} {% raw %} \u202eesrever\u202c مرحبا بالعالم שלום | a*b_c `tick @everyone #1 \u2028 \ufffe " + "W" * 300
)


def hostile() -> Trial:
    """Hostile text in every field that may contain text of logs, tools or users."""
    subject = f"node</text><script>/gpu0 {HOSTILE[:60]}"
    metric = Metric(name=HOSTILE, value=1.0, unit="<i>/s", subject=subject, samples=(1.0, 2.0))
    curve = Series(name=HOSTILE, subject=subject, x=(1.0, 2.0), y=(0.0, 3.0), x_unit=HOSTILE, y_unit="<b>")
    measurement = Measurement(
        check=HOSTILE,
        subject=subject,
        metrics=(metric,),
        facts={HOSTILE: [{HOSTILE: HOSTILE}, {"deep": {"deeper": [[[HOSTILE]]]}}], "lines": "a\r\nb\x1b[2K\rc"},
        series=(curve,),
        artifacts=tuple(
            Artifact(path=path, title=HOSTILE)
            for path in ("javascript:alert(1)", "//evil.example/x", "../../etc/passwd")
        ),
    )
    verdict = Verdict(
        check=HOSTILE,
        subject=subject,
        metric=HOSTILE,
        outcome=Outcome.FAIL,
        reasons=(Reason.THRESHOLD_VIOLATED,),
        detail=HOSTILE,
        meaning=HOSTILE,
        evidence=f"{HOSTILE}\n```\n{HOSTILE}",
        fix=HOSTILE,
        basis=Basis(BasisKind.SITE, HOSTILE, source=HOSTILE, lax_reason=HOSTILE, exceeds=HOSTILE),
    )
    finding = Finding(
        title=HOSTILE, subject=subject, confidence="low", evidence=HOSTILE, first_command=HOSTILE, source=HOSTILE
    )
    return _trial(
        telemetry=telemetry(subject, 2, check=HOSTILE, phase="Other"),
        name=HOSTILE,
        measurements=(measurement,),
        verdicts=(verdict, replace(verdict, outcome=Outcome.WARN, subject="node1")),
        findings=(finding,),
        results=(_result(HOSTILE, JobState.FAILED, 1.0, 1.0, failed_subject=HOSTILE, cause=HOSTILE),),
        excluded_checks={HOSTILE: HOSTILE},
        command=("seatrial", "run", HOSTILE),
        config={"name": HOSTILE, HOSTILE: HOSTILE},
        origins={"name": HOSTILE},
        decision=Decision(value=DecisionValue.REJECTED, reason=HOSTILE, tested_hardware=HOSTILE),
    )


def large_cluster() -> Trial:
    """64 nodes of 8 GPUs: two faulty GPUs, one node with another driver, one rank that hangs."""
    names = [f"node{number:02}" for number in range(1, 65)]
    faulty = {"node17": 5, "node42": 2}
    inventories = [inventory(name, 8, faulty=faulty.get(name, -1)) for name in names]
    hosts = [host(name, driver="570.86.15" if name == "node23" else "580.95.05") for name in names]
    trainings = [training for name in names for training in cnn(name, 8, slow=faulty.get(name, -1))]
    all_reduces = all_reduce(
        (22.0, 90.5, 210.7, 331.9, 346.0), ranks=[f"{name}/gpu{gpu}" for name in names for gpu in range(8)]
    )
    verdicts: list[Verdict] = []
    for name, gpus_of_node in zip(names, inventories, strict=True):
        subject = f"{name}/gpu{faulty[name]}" if name in faulty else ""
        verdicts += host_verdicts(name, nofile=Outcome.WARN if name > "node40" else Outcome.PASS)
        verdicts += metric_verdicts(gpus_of_node, "ecc_uncorrected", rule_basis("==", 0, ""), faulty=(subject, 3))
        verdicts += metric_verdicts(gpus_of_node, "pcie_width", rule_basis(">=", 16, ""))
    for training in trainings:
        verdicts += metric_verdicts(training, "accuracy", rule_basis(">", 95, "%"))
    verdicts += all_reduce_verdicts(all_reduces, Outcome.WARN)
    verdicts.append(
        Verdict(check="train.ddp", subject="node51/gpu7", outcome=Outcome.ERROR, detail="no heartbeat for 60 s")
    )
    return _trial(
        name="burn-in",
        nodes=64,
        measurements=(*hosts, *inventories, all_reduces, *trainings),
        verdicts=tuple(verdicts),
        decision=Decision(
            value=DecisionValue.REJECTED, reason="1 check failed: gpu.inventory", tested_hardware="64 nodes × 8 GPUs"
        ),
    )


def four_nodes() -> Trial:
    """Four nodes on two leaf switches: training scales badly, one path and one GPU are slow."""
    trial = _trial(
        nodes=4,
        measurements=sample_scaling.measurements(),
        verdicts=sample_scaling.verdicts(),
        decision=Decision(
            value=DecisionValue.REJECTED,
            reason="2 checks failed: collectives.pairs, train.throughput",
            tested_hardware="4 nodes × 8 GPUs",
        ),
    )
    changes = {"checks": tuple(check.name for check in sample_scaling.CHECKS), "ranks_per_node": 8}
    job = trial.jobs[-1].model_copy(update={**changes, "topology": sample_scaling.TOPOLOGY})
    return trial.model_copy(update={"jobs": (job,)})


SAMPLES: dict[str, Callable[[], Trial]] = {
    "accepted": accepted,
    "with_telemetry": with_telemetry,
    "rejected": rejected,
    "incomplete": incomplete,
    "hostile": hostile,
    "large_cluster": large_cluster,
    "four_nodes": four_nodes,
}


def _result(
    job: str,
    state: JobState,
    seconds: float,
    startup: float,
    failed_subject: str = "",
    cause: str = "",
    attempt: int = 1,
) -> JobResult:
    return JobResult(
        job=job,
        attempt=attempt,
        launcher="local",
        state=state,
        started=STARTED,
        seconds=seconds,
        startup_s=startup,
        failed_subject=failed_subject,
        cause=cause,
    )


def _jobs(nodes: int, checks: list[str]) -> tuple[Job, ...]:
    inventories = tuple(name for name in checks if name.endswith("inventory"))
    others = tuple(name for name in CATALOG if name not in inventories)
    limits = dict.fromkeys(CATALOG, 300.0)
    common: dict[str, Any] = {"limits": limits, "device": "cuda", "nodes": nodes, "options": {}, "expected_gpus": 4}
    return (
        Job(name="nodes", placement="nodes", ranks_per_node=1, checks=inventories, limit_s=420, **common),
        Job(
            name="ranks", placement="ranks", ranks_per_node=8 if nodes > 8 else 4, checks=others, limit_s=1500, **common
        ),
    )


def _trial(**fields: Any) -> Trial:
    """A trial with these fields and defaults for the others."""
    nodes = fields.pop("nodes", 1)
    measured = [measurement.check for measurement in fields["measurements"]]
    seconds = {measurement.check: measurement.seconds for measurement in fields["measurements"]}
    overhead = {"discover": 1.9, "start of processes": 6.4, "judge and report": 0.4}
    timings = [
        *(Timing(name=name, kind="check", seconds=value) for name, value in seconds.items()),
        *(Timing(name=name, kind="overhead", seconds=value) for name, value in overhead.items()),
    ]
    excluded = fields.get("excluded_checks", {})
    jobs = tuple(
        job.model_copy(update={"checks": tuple(name for name in job.checks if name not in excluded)})
        for job in _jobs(nodes, measured)
    )
    defaults: dict[str, Any] = {
        "seatrial": "0.1.0",
        "name": "acceptance",
        "command": ("seatrial", "run", "acceptance", "--launcher", "local", "--set", "checks.x.expect.y=> 3 GB/s"),
        "host": "h200-01",
        "started": STARTED,
        "seconds": sum(timing.seconds for timing in timings) + 0.8,
        "config": {
            "name": "acceptance",
            "launcher": "auto",
            "cluster": {"nodes": nodes, "gpus_per_node": 4},
            "limits": {"startup_s": 180, "heartbeat_timeout_s": 60},
            "env": {},
            "checks": {"collectives.all_reduce": {"required": True, "expect": {"busbw.8GiB": "> 350 GB/s"}}},
        },
        "origins": {
            "name": "trial file acceptance.yaml",
            "launcher": "default",
            "cluster.nodes": "default",
            "cluster.gpus_per_node": "--set",
            "limits": "default",
            "checks.collectives.all_reduce": "trial file acceptance.yaml",
        },
        "environment": {
            "CUDA_VISIBLE_DEVICES": None,
            "NCCL_NVLS_ENABLE": "0",
            "python": "3.12.3",
            "torch": "2.11.0+cu130",
        },
        "jobs": jobs,
        "results": (_result("nodes", JobState.COMPLETED, 4.1, 0.4), _result("ranks", JobState.COMPLETED, 64.0, 6.0)),
        "findings": (),
        "timings": tuple(timings),
    }
    return Trial(**(defaults | fields))


def main(folder: Path) -> None:
    """Write every sample in every format below ``folder``."""
    for name, sample in SAMPLES.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        report.write_all(sample(), folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
