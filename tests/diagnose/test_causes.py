"""Causes of bad verdicts: their consequences, places and confidence."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from pydantic import JsonValue
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.checks.cause import Cause
from seatrial.diagnose import diagnose
from seatrial.diagnose.cause_data import causes
from seatrial.diagnose.causes import Run, cause_findings, node_command
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Finding, Measurement, Metric, Outcome, Reason, Trial, Verdict
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from tests.fakes.slurm import NO_CONFIGURATION

GPU1 = "n0/gpu1"


def bad(check: str, subject: str, metric: str, outcome: Outcome = Outcome.FAIL) -> Verdict:
    return Verdict(check, subject, outcome, metric, (Reason.THRESHOLD_VIOLATED,), value=1, evidence=f"{metric} = 1")


def slow(subject: str = CLUSTER) -> Verdict:
    return bad("collectives.all_reduce", subject, "busbw.8GiB")


BUSY = bad("gpu.inventory", GPU1, "foreign_processes")
DEVICES = [bad("device.gemm", GPU1, "tflops.bf16"), bad("device.memory", GPU1, "copy")]


def found(
    *verdicts: Verdict,
    facts: dict[str, JsonValue] | None = None,
    check: str = "collectives.transport",
    prefix: str = "",
) -> list[Finding]:
    measurements = [Measurement(check=check, subject="n0/gpu0", facts=facts or {})]
    return cause_findings(Run(verdicts, measurements, catalog(), prefix))


def explained(finding: Finding) -> set[tuple[str, str]]:
    return {(key.check, key.subject) for key in finding.explains}


def test_foreign_process_explains_slow_checks_of_its_gpu_and_of_the_cluster() -> None:
    other_gpu = bad("device.gemm", "n0/gpu0", "tflops.bf16")
    pairs = [bad("collectives.gpu_pairs", f"n0/gpu0->gpu{number}", "busbw.1GiB") for number in (1, 2)]
    (finding,) = found(BUSY, *DEVICES, slow(), other_gpu, *pairs)
    assert (finding.cause, finding.subject, finding.confidence) == ("foreign_processes", GPU1, "high")
    assert (finding.action, finding.source) == ("fix-environment", "foreign_processes of gpu.inventory")
    assert finding.first_command.startswith("nvidia-smi --id=1 ")
    assert explained(finding) == {
        ("gpu.inventory", GPU1),
        ("device.gemm", GPU1),
        ("device.memory", GPU1),
        ("collectives.all_reduce", CLUSTER),
        ("collectives.gpu_pairs", "n0/gpu0->gpu1"),
    }


def test_low_speed_does_not_explain_damaged_data_but_memory_errors_do() -> None:
    damaged = bad("collectives.all_reduce", CLUSTER, "wrong_elements")
    finding, corrupted = found(BUSY, damaged)
    assert explained(finding) == {("gpu.inventory", GPU1)}
    assert corrupted.cause == "data_corrupted"
    (finding,) = found(bad("gpu.inventory", GPU1, "ecc_uncorrected"), damaged)
    assert finding.cause == "uncorrectable_memory_errors"
    assert ("collectives.all_reduce", CLUSTER) in explained(finding)


def test_a_noisy_measurement_follows_from_low_speed_only() -> None:
    reasons = (Reason.METRIC_MISSING,)
    noisy = Verdict("train.ddp", CLUSTER, Outcome.ERROR, "scaling_efficiency", reasons, "too noisy: range 57 to 108 %")
    assert found(bad("slurm.controller", CLUSTER, "memlock_limit_propagated", Outcome.WARN), noisy) == []
    (finding,) = found(BUSY, noisy)
    assert ("train.ddp", CLUSTER) in explained(finding)


def test_warning_that_explains_nothing_is_no_cause() -> None:
    assert found(bad("host.inventory", "n0", "rdma_inactive_ports", Outcome.WARN)) == []
    (finding,) = found(bad("host.inventory", "n0", "rdma_inactive_ports", Outcome.WARN), slow())
    assert finding.confidence == "medium"
    assert [failed.cause for failed in found(bad("gpu.inventory", GPU1, "nvlinks_down"))] == ["nvlinks_down"]


def test_no_bad_verdict_has_no_cause() -> None:
    good = Verdict("collectives.all_reduce", CLUSTER, Outcome.PASS, "busbw.8GiB")
    assert found(good, facts={"settings": {"NCCL_P2P_DISABLE": "1"}}) == []


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, ["NCCL_P2P_DISABLE=1"]),
        ({"NCCL_P2P_DISABLE": "0"}, []),
        ({"NCCL_P2P_DISABLE": "1 (set by seatrial)"}, []),
        ({"NCCL_NVLS_ENABLE": "0"}, ["NCCL_NVLS_ENABLE=0"]),
        ({"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "2"}, ["NCCL_MAX_NCHANNELS=2"]),  # the more certain one
        ({"NCCL_DEBUG": "INFO", "PATH": "/usr/bin"}, []),
    ],
)
def test_environment_variables(settings: dict[str, JsonValue], names: list[str]) -> None:
    findings = found(slow(), facts={"settings": settings})
    assert [finding.title.partition(" ")[0] for finding in findings] == names
    assert all(explained(finding) == {("collectives.all_reduce", CLUSTER)} for finding in findings)


def test_variable_on_one_node_explains_that_node() -> None:
    network: JsonValue = {"n0": {"NCCL_IB_DISABLE": "1"}, "n1": {}, "n2": {}}
    pairs = [bad("collectives.pairs", pair, "path_share") for pair in ("n0->n1", "n1->n2")]
    measurements = [
        Measurement(check="nodes.connectivity", subject="n0/gpu0", facts={"network": network}),
        *(Measurement(check="nodes.connectivity", subject=f"n{number}/gpu0") for number in (1, 2)),
    ]
    (finding,) = cause_findings(Run(pairs, measurements, catalog(), "srun --nodelist={node}"))
    assert finding.subject == "n0"
    assert explained(finding) == {("collectives.pairs", "n0->n1")}
    assert finding.first_command.startswith("srun --nodelist=n0 sh -c ")


def test_variable_in_a_fact_of_all_ranks_is_at_the_cluster() -> None:
    facts: dict[str, JsonValue] = {"settings": {"NCCL_P2P_DISABLE": "1"}}
    measurements = [
        Measurement(check="collectives.transport", subject="n0/gpu0", facts=facts),
        *(Measurement(check="collectives.transport", subject=f"n{number}/gpu0") for number in (1, 2)),
    ]
    (finding,) = cause_findings(Run([slow()], measurements, catalog()))
    assert (finding.subject, finding.title) == (CLUSTER, "NCCL_P2P_DISABLE=1 is set")


def test_odd_node_is_a_cause_where_it_is_the_slow_one() -> None:
    facts: dict[str, JsonValue] = {"network_minority": {"n7": {"speed": "200000 Mb/s, majority: 400000 Mb/s"}}}
    gpu = bad("collectives.pairs", "n7->n1", "path_share")
    (finding,) = found(gpu, slow(), facts=facts, check="nodes.connectivity")
    assert (finding.cause, finding.subject, finding.confidence) == ("node_differs", "n7", "medium")
    assert explained(finding) == {("collectives.pairs", "n7->n1")}
    assert "200000" in finding.evidence
    assert found(slow("n1"), facts=facts, check="nodes.connectivity") == []


def test_slow_port_explains_pairs_of_its_node() -> None:
    port = bad("fabric.ports", "n1/mlx5_4", "rate_vs_nodes")
    pairs = [bad("collectives.pairs", pair, "path_share") for pair in ("n0->n1", "n2->n3")]
    (finding,) = found(port, *pairs, prefix="ssh {node}")
    assert (finding.cause, finding.subject, finding.action) == ("port_slow", "n1/mlx5_4", "check-cable")
    assert explained(finding) == {("fabric.ports", "n1/mlx5_4"), ("collectives.pairs", "n0->n1")}
    assert finding.first_command.startswith("ssh n1 sh -c 'ibstat mlx5_4 ")


CLIENT_COMMANDS = [
    cause.first_command for cause in causes() if re.match(r"kubectl|s(run|control|info)", cause.first_command)
]


@pytest.mark.parametrize("command", CLIENT_COMMANDS)
@pytest.mark.parametrize("prefix", ["kubectl debug node/{node} -- chroot /host", "srun --nodelist={node}"])
def test_command_of_the_client_of_a_scheduler_is_not_run_on_a_node(command: str, prefix: str) -> None:
    assert node_command(command, "n1", prefix) == command.replace("{node}", "n1")
    assert node_command("nvidia-smi -q", "n1", prefix) == f"{prefix.format(node='n1')} nvidia-smi -q"


def test_a_pair_without_connection_explains_verdicts_on_the_pair_and_on_both_nodes() -> None:
    consequences = [slow(subject) for subject in ("n0->n1", "n0", "n1", CLUSTER)]
    unreachable = bad("nodes.connectivity", CLUSTER, "pairs_unreachable")
    facts: dict[str, JsonValue] = {"fault_places": {"pairs_unreachable": {"n0->n1": ["n1"]}}}
    (finding,) = found(unreachable, *consequences, slow("n2"), facts=facts, check="nodes.connectivity")
    assert finding.subject == "n0->n1"
    assert explained(finding) == {
        ("nodes.connectivity", CLUSTER),
        *(("collectives.all_reduce", verdict.subject) for verdict in consequences),
    }


def test_local_cause_comes_before_one_of_the_cluster() -> None:
    findings = found(BUSY, *DEVICES, slow(), facts={"settings": {"NCCL_P2P_DISABLE": "1"}})
    assert [finding.subject for finding in findings] == [GPU1, CLUSTER]


@pytest.mark.parametrize("fact", [None, [], "x", {"n0": None}, {"n0": [1]}, 7])
def test_edited_facts_are_no_evidence(fact: JsonValue) -> None:
    for name, check in (("settings", "collectives.transport"), ("network", "nodes.connectivity")):
        assert found(slow(), facts={name: fact, f"{name}_minority": fact}, check=check) == []


def test_thousands_of_suspects() -> None:
    verdicts = [
        bad(check, f"n{node}/gpu{gpu}", metric)
        for node in range(256)
        for gpu in range(8)
        for check, metric in (("gpu.inventory", "foreign_processes"), ("device.gemm", "tflops.bf16"))
    ]
    started = time.process_time()
    assert len(found(*verdicts)) == 2048
    assert time.process_time() - started < 5


def test_record_with_a_disabled_link_names_the_variable() -> None:
    trial = rejudge(load_trial(record_path("2026-11-23-2xh200/p2p-disabled")))
    (finding,) = trial.findings
    assert finding.title == "NCCL_P2P_DISABLE=1 is set"
    assert len(finding.explains) == sum(verdict.outcome is Outcome.FAIL for verdict in trial.verdicts) == 2


def test_finding_survives_the_record(tmp_path: Path) -> None:
    (finding,) = found(BUSY)
    assert Finding.model_validate(json.loads(finding.model_dump_json())) == finding


def record_with_a_foreign_process() -> tuple[Trial, list[Measurement]]:
    """A real record of two GPUs, one of them busy, and the inventory of the same machine with that process.

    The run had no gpu.inventory: its measurement is that of acceptance.trial.json, with one process and its count.
    """
    busy = load_trial(record_path("2026-11-23-2xh200/busy-gpu"))
    acceptance = load_trial(record_path("2026-11-23-2xh200/acceptance"))
    (inventory,) = (each for each in acceptance.measurements if each.check == "gpu.inventory")
    process: JsonValue = [{"gpu": 1, "pid": 1800, "name": "python3", "memory": 10 * 2**30}]
    metrics = tuple(
        replace(metric, value=1.0) if (metric.name, metric.subject) == ("foreign_processes", "vm/gpu1") else metric
        for metric in inventory.metrics
    )
    changed = {"metrics": metrics, "facts": {**inventory.facts, "foreign_processes": process}}
    return busy, [inventory.model_copy(update=changed)]


def test_record_with_a_busy_gpu_has_one_finding_that_names_the_process() -> None:
    busy, inventory = record_with_a_foreign_process()
    checks = catalog()
    judged = judge_check(checks["gpu.inventory"], inventory, {}, "t")
    failed = [verdict for verdict in busy.verdicts if verdict.outcome is Outcome.FAIL]
    (finding,) = cause_findings(Run([*judged, *failed], [*inventory, *busy.measurements], checks))
    assert finding.title == "another program uses the GPU: python3 (pid 1800)"
    assert finding.subject == "vm/gpu1"
    assert {verdict.key for verdict in failed} < set(finding.explains)
    assert len({verdict.check for verdict in failed}) == 5
    assert finding.first_command.endswith("; ps -o pid,user,lstart,args -p 1800")


def test_record_with_two_channels_names_the_variable() -> None:
    """The record with NCCL_P2P_DISABLE=1, in which the variable is replaced."""
    trial = load_trial(record_path("2026-11-23-2xh200/p2p-disabled"))
    text = (
        trial.model_dump_json()
        .replace("NCCL_P2P_DISABLE", "NCCL_MAX_NCHANNELS")
        .replace('"NCCL_MAX_NCHANNELS":"1"', '"NCCL_MAX_NCHANNELS":"2"')
    )
    (finding,) = rejudge(Trial.model_validate_json(text)).findings
    assert finding.title == "NCCL_MAX_NCHANNELS=2 is set"
    assert "grep -rn NCCL_MAX_NCHANNELS /etc/nccl.conf" in finding.first_command


def test_load_of_other_programs_explains_slow_checks_and_names_them() -> None:
    processes: JsonValue = [{"pid": 4711 + number, "name": "stress-ng", "cpus": 1.0} for number in range(2)]
    load = Measurement(
        check="host.load",
        subject="n0",
        metrics=(Metric(name="cpu_busy", value=97.0, unit="%", subject="n0"),),
        facts={"gpu_node": "yes", "busiest_processes": processes},
    )
    judged = judge_check(catalog()["host.load"], [load], {}, "t")
    assert [verdict.outcome for verdict in judged] == [Outcome.WARN]
    copies = bad("train.ddp", CLUSTER, "tokens_per_second")
    (finding,) = cause_findings(Run([*judged, copies], [load], catalog(), "ssh {node}"))
    assert finding.title == "other programs use the CPUs of the node: stress-ng (pid 4711), stress-ng (pid 4712)"
    assert "-p 4711,4712" in finding.first_command


@pytest.mark.parametrize(
    ("check", "metric", "outcome", "settings", "cause"),
    [
        ("collectives.transport", "nvls_missing", Outcome.WARN, {}, "nvls_missing"),
        ("collectives.transport", "nvls_missing", Outcome.WARN, {"NCCL_NVLS_ENABLE": "0"}, "environment_variable"),
        ("collectives.transport", "socket_despite_rdma", Outcome.FAIL, {}, "sockets_despite_rdma"),
        ("collectives.transport", "socket_despite_rdma", Outcome.FAIL, {"NCCL_NET": "Socket"}, "environment_variable"),
        ("collectives.transport", "rdma_without_gpudirect", Outcome.WARN, {}, "rdma_without_gpudirect"),
        ("filesystem.speed", "write_concurrent./data", Outcome.FAIL, {}, "filesystem_slow"),
        ("filesystem.shared", "free_bytes", Outcome.WARN, {}, "filesystem_full"),
    ],
)
def test_one_cause_above_its_consequences(
    check: str, metric: str, outcome: Outcome, settings: dict[str, JsonValue], cause: str
) -> None:
    consequences = [slow(), bad("train.ddp", CLUSTER, "tokens_per_second")]
    facts: dict[str, JsonValue] = {"settings": settings, "filesystems": {"/data": "nfs"}}
    (finding,) = found(bad(check, CLUSTER, metric, outcome), *consequences, facts=facts)
    assert finding.cause == cause
    if finding.cause.startswith("filesystem"):
        assert " /data" in finding.first_command
    else:
        assert ("collectives.all_reduce", CLUSTER) in explained(finding)
    assert (check, CLUSTER) in explained(finding)


def test_no_gpudirect_on_a_node_is_above_rdma_without_it() -> None:
    host = bad("host.settings", "n1", "gpudirect_rdma_available", Outcome.WARN)
    (finding,) = found(host, bad("collectives.transport", CLUSTER, "rdma_without_gpudirect", Outcome.WARN), slow())
    assert (finding.cause, finding.subject) == ("gpudirect_unavailable", "n1")


def consequence(cause: Cause) -> Verdict:
    """A slow check of the cluster that the cause explains."""
    for pattern in cause.explains:
        for name, check in catalog().items():
            for family in check.speeds if fnmatchcase(name, pattern) else ():
                verdict = bad(name, CLUSTER, family.replace("*", "x"))
                if not any(other.is_evidence(verdict) for other in causes()):
                    return verdict
    return bad(cause.explains[0].replace("*", "x"), CLUSTER, "x")  # of a check without a metric of speed


@pytest.mark.parametrize("cause", [each for each in causes() if each.evidence], ids=lambda cause: cause.id)
def test_each_cause_is_one_finding_at_its_place_with_a_complete_command(cause: Cause) -> None:
    subject = {"gpu": GPU1, "rank": GPU1, "port": "n0/mlx5_3", "node": "n0", "cluster": CLUSTER}[cause.place]
    pattern, metrics = next(iter(cause.evidence.items()))
    check = next(name for name in catalog() if fnmatchcase(name, pattern))
    shown, follows = bad(check, subject, metrics[0].replace("*", "x")), consequence(cause)
    facts: dict[str, JsonValue] = {cause.with_fact: "text"} if cause.with_fact else {}
    findings = found(shown, follows, facts=facts, check=check, prefix="srun --nodelist={node}")
    assert [(finding.cause, finding.subject) for finding in findings if finding.cause == cause.id] == [
        (cause.id, subject)
    ]
    assert len(findings) == 1
    assert explained(findings[0]) == {(shown.check, subject), (follows.check, CLUSTER)}
    command = findings[0].first_command
    assert not re.search(r"\{(gpu|node|port|paths|pids|names)\}", command)
    is_of_client = cause.first_command.startswith("kubectl ")
    assert command.startswith("srun --nodelist=n0 ") is (subject != CLUSTER and not is_of_client)
    if "{gpu}" in cause.first_command:
        assert re.search(r"(--id[= ]|nvidia)1\b", command)


def test_a_check_locates_a_verdict_on_the_cluster() -> None:
    facts: dict[str, JsonValue] = {"fault_places": {"names_unresolved": {"n1": ["n0", "n7"]}}}
    verdict = bad("nodes.connectivity", CLUSTER, "names_unresolved")
    (finding,) = found(verdict, facts=facts, check="nodes.connectivity", prefix="srun --nodelist={node}")
    assert (finding.cause, finding.subject) == ("names_unresolved", "n1")
    assert finding.first_command.startswith("srun --nodelist=n1 sh -c 'getent ahosts n0 n7;")
    (finding,) = found(verdict, check="nodes.connectivity")
    assert (finding.subject, finding.first_command.split(";")[0]) == (CLUSTER, 'getent ahosts "$(hostname)"')


def test_a_variable_on_one_node_is_the_cause_of_the_warning_that_settings_differ() -> None:
    facts: dict[str, JsonValue] = {
        "network": {"n0": {}, "n1": {"NCCL_P2P_DISABLE": "1"}, "n2": {}},
        "network_minority": {"n1": {"NCCL_P2P_DISABLE": "1, majority: not set"}},
        "fault_places": {"network_differing": {"n1": ["NCCL_P2P_DISABLE"]}},
    }
    warning = bad("nodes.connectivity", CLUSTER, "network_differing", Outcome.WARN)
    (finding,) = found(warning, facts=facts, check="nodes.connectivity")
    assert (finding.cause, finding.subject) == ("environment_variable", "n1")
    assert finding.title == "NCCL_P2P_DISABLE=1 is set on n1 only"
    assert explained(finding) == {("nodes.connectivity", CLUSTER)}


def test_a_version_on_one_node_explains_the_failure() -> None:
    facts: dict[str, JsonValue] = {
        "nodes_differing": {"n1": {"torch": "2.1.0, majority: 2.13.0"}},
        "fault_places": {"nodes_differing": {"n1": ["torch"]}},
    }
    failure = bad("nodes.connectivity", CLUSTER, "nodes_differing")
    (finding,) = found(failure, facts=facts, check="nodes.connectivity")
    assert (finding.cause, finding.subject) == ("node_differs", "n1")
    assert finding.first_command == "python3 -m torch.utils.collect_env"


NVML = "NVML: NVML Shared Library Not Found (libnvidia-ml.so.1 not found: no driver installed)"


def test_missing_gpus_are_a_driver_fault_where_the_driver_does_not_answer() -> None:
    missing = [bad("gpu.inventory", node, "gpus_missing") for node in ("n0", "n1")]
    quoting = Verdict("filesystem.speed", CLUSTER, Outcome.ERROR, detail=f"8 GPUs expected, 0 usable: {NVML}")
    other = Verdict("filesystem.shared", CLUSTER, Outcome.ERROR, detail="read-only file system")
    measurements = [
        Measurement(check="gpu.inventory", subject="n0", facts={"nvml_unavailable": NVML}),
        Measurement(check="gpu.inventory", subject="n1", facts={"gpus_lost": ["gpu3"]}),
        Measurement(check="host.inventory", subject="n1", facts={"nvml_unavailable": NVML}),  # of another check
    ]
    driver, lost = sorted(
        cause_findings(Run([*missing, quoting, other], measurements, catalog())), key=lambda finding: finding.subject
    )
    assert (driver.cause, driver.subject, driver.confidence) == ("driver_unusable", "n0", "high")
    assert driver.first_command == "cat /proc/driver/nvidia/version; ldconfig -p | grep nvidia-ml"
    assert explained(driver) == {("gpu.inventory", "n0"), ("filesystem.speed", CLUSTER)}
    assert (lost.cause, lost.subject) == ("gpus_missing", "n1")
    assert explained(lost) == {("gpu.inventory", "n1")}


def test_error_that_quotes_the_fact_of_a_cause_is_no_finding_of_its_own(tmp_path: Path) -> None:
    def findings(fact: str) -> list[tuple[str, str]]:
        error = f"8 GPUs expected, 0 usable: {NVML}"
        measurements = [
            Measurement(check="gpu.inventory", subject="n0", facts={fact: NVML}),
            Measurement(check="train.ddp", subject=CLUSTER, error=error),
        ]
        verdicts = [
            bad("gpu.inventory", "n0", "gpus_missing"),
            Verdict("train.ddp", CLUSTER, Outcome.ERROR, detail=error),
        ]
        found = diagnose(Run(verdicts, measurements, catalog()), [], [], tmp_path)
        return [(finding.cause, finding.signature) for finding in found]

    assert findings("nvml_unavailable") == [("driver_unusable", "")]
    assert findings("another_fact") == [("gpus_missing", ""), ("", "driver.nvml_library")]


def test_a_failure_in_errors_is_their_cause_unless_a_cause_explains_them(tmp_path: Path) -> None:
    """An unusable driver on a node without slurm.conf: the driver is no cause of the errors of Slurm's checks."""
    slurm_checks = ("slurm.gres", "slurm.nodes", "slurm.jobs")
    no_configuration = f"SlurmUnavailable: this machine has no slurm.conf for the cluster ({NO_CONFIGURATION})"
    no_driver = f"8 GPUs expected, 0 usable: {NVML}"
    errors = {**dict.fromkeys(slurm_checks, ("n0", no_configuration)), "train.ddp": (CLUSTER, no_driver)}
    inventory = Measurement(check="gpu.inventory", subject="n0", facts={"nvml_unavailable": NVML})
    measurements = [Measurement(check=name, subject=place, error=text) for name, (place, text) in errors.items()]
    verdicts = [Verdict(name, place, Outcome.ERROR, detail=text) for name, (place, text) in errors.items()]
    verdicts.append(bad("gpu.inventory", "n0", "gpus_missing"))
    driver, slurm = diagnose(Run(verdicts, [*measurements, inventory], catalog()), [], [], tmp_path)
    assert driver.cause == "driver_unusable"
    assert explained(driver) == {("gpu.inventory", "n0"), ("train.ddp", CLUSTER)}
    assert slurm.signature == "slurm.configuration_missing"
    assert explained(slurm) == {(name, "n0") for name in slurm_checks}
