"""Causes of bad verdicts: what explains what, where, and with which confidence."""

from __future__ import annotations

import json
import re
import time
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.diagnose.cause_data import Cause, causes, variables
from seatrial.diagnose.causes import cause_findings
from seatrial.model import CLUSTER, Finding, Measurement, Outcome, Reason, Verdict
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from tests.paths import ROOT

RESULTS = ROOT / "docs" / "results"
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
    return cause_findings(verdicts, measurements, catalog(), prefix)


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
    (finding,) = cause_findings(pairs, measurements, catalog(), "srun --nodelist={node}")
    assert finding.subject == "n0"
    assert explained(finding) == {("collectives.pairs", "n0->n1")}
    assert finding.first_command.startswith("srun --nodelist=n0 sh -c ")


def test_variable_in_a_fact_of_all_ranks_is_not_said_to_be_on_one_node() -> None:
    facts: dict[str, JsonValue] = {"settings": {"NCCL_P2P_DISABLE": "1"}}
    measurements = [
        Measurement(check="collectives.transport", subject="n0/gpu0", facts=facts),
        *(Measurement(check="collectives.transport", subject=f"n{number}/gpu0") for number in (1, 2)),
    ]
    (finding,) = cause_findings([slow()], measurements, catalog())
    assert (finding.subject, finding.title) == (CLUSTER, "NCCL_P2P_DISABLE=1 is set")


def test_odd_node_is_a_cause_where_it_is_the_slow_one() -> None:
    facts: dict[str, JsonValue] = {"network_minority": {"n7": {"speed_mbps": "200000, majority: 400000"}}}
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
    trial = rejudge(load_trial(RESULTS / "2026-11-23-2xh200" / "p2p-disabled.trial.json"))
    (finding,) = trial.findings
    assert finding.title == "NCCL_P2P_DISABLE=1 is set"
    assert len(finding.explains) == sum(verdict.outcome is Outcome.FAIL for verdict in trial.verdicts) == 2


@pytest.mark.parametrize("cause", causes(), ids=lambda cause: cause.id)
def test_cause_names_checks_and_metrics_that_exist(cause: Cause) -> None:
    for pattern, metrics in cause.evidence.items():
        checks = [check for name, check in catalog().items() if fnmatchcase(name, pattern)]
        assert checks, pattern
        for metric in metrics:
            declared = any(
                fnmatchcase(metric, name) or fnmatchcase(name, metric) for check in checks for name in check.metrics
            )
            assert declared or metric.startswith("new_errors."), metric
    assert all(
        any(fnmatchcase(name, pattern) for name in catalog()) for pattern in cause.explains if pattern != "fabric.*"
    )
    assert not re.findall(
        r"\{(?!gpu\}|node\}|port\}|paths\}|names\})", re.sub(r"\{[a-z]+,|awk '.*'", "", cause.first_command)
    )
    assert len({other.id for other in causes()}) == len(causes())


def test_variables_have_a_default_and_an_effect() -> None:
    assert len(variables()) >= 50
    for name, variable in variables().items():
        assert re.fullmatch(r"[A-Z][A-Z0-9_]+", name)
        assert not re.search(r"\.$", variable.effect)
        assert any(fnmatchcase(check, pattern) for pattern in variable.explains for check in catalog())
        re.compile(variable.harmless)


def test_finding_survives_the_record(tmp_path: Path) -> None:
    (finding,) = found(BUSY)
    assert Finding.model_validate(json.loads(finding.model_dump_json())) == finding


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
