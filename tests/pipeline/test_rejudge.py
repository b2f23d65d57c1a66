"""Rejudged records; learning of baselines is tested in tests/judge/test_site_baseline.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.records import record_path

from seatrial.config.schema import Config
from seatrial.model import (
    Baseline,
    BasisKind,
    DecisionValue,
    LearnedRun,
    MissingNode,
    Outcome,
    ReferenceValue,
    Trial,
    UsageError,
)
from seatrial.pipeline.rejudge import learn, load_baseline, rejudge
from seatrial.pipeline.run_directory import load_trial
from tests.report import samples

ACCEPTED = record_path("2026-11-23-2xh200/quick-1")
RECORD = record_path("2026-11-22-4xh200/fabric-1")


def test_rejudge_is_idempotent() -> None:
    trial = rejudge(load_trial(RECORD))
    assert rejudge(trial) == trial


def test_a_job_that_was_split_for_the_partition_is_judged_as_the_whole() -> None:
    trial = rejudge(load_trial(RECORD))
    (ranks,) = [job for job in trial.jobs if job.name == "ranks"]
    second = ranks.with_checks(ranks.checks[5:]).model_copy(update={"name": "ranks-2"})
    jobs = (*(job for job in trial.jobs if job is not ranks), ranks.with_checks(ranks.checks[:5]), second)
    assert rejudge(trial.model_copy(update={"jobs": jobs})).verdicts == trial.verdicts


def test_missing_measurement_is_an_error() -> None:
    trial = load_trial(RECORD)
    other_measurements = tuple(measurement for measurement in trial.measurements if measurement.check != "device.gemm")
    judged = rejudge(trial.model_copy(update={"measurements": other_measurements}))
    assert judged.decision.value is DecisionValue.INCOMPLETE
    assert Outcome.ERROR in {verdict.outcome for verdict in judged.verdicts if verdict.check == "device.gemm"}


def test_a_record_with_missing_nodes_is_never_accepted() -> None:
    trial = load_trial(ACCEPTED)
    assert rejudge(trial).decision.value is DecisionValue.ACCEPTED
    missing = MissingNode(name="node1", state="IDLE+DRAIN: fan broken")
    decision = rejudge(trial.model_copy(update={"missing_nodes": (missing,)})).decision
    assert decision.value is DecisionValue.INCOMPLETE
    assert decision.reason == "missing nodes: node1 (IDLE+DRAIN: fan broken)"


def test_jobs_on_fewer_nodes_than_promised_are_never_accepted() -> None:
    trial = load_trial(ACCEPTED)
    cluster = {**trial.config["cluster"], "nodes": 2, "min_nodes": 1}
    judged = rejudge(trial.model_copy(update={"config": {**trial.config, "launcher": "slurm", "cluster": cluster}}))
    assert Outcome.ERROR not in {verdict.outcome for verdict in judged.verdicts}
    assert judged.decision.value is DecisionValue.INCOMPLETE
    assert judged.decision.reason == "1 of 2 nodes tested"


def test_config_of_another_version_is_refused_with_its_key() -> None:
    trial = samples.accepted()
    with pytest.raises(UsageError, match=r"config\.unheard_of"):
        rejudge(trial.model_copy(update={"config": {**trial.config, "unheard_of": 1}}))


def test_learn_requires_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        learn("site", [tmp_path / "nowhere"])


def test_trial_without_baseline() -> None:
    assert load_baseline(Config.model_validate(samples.accepted().config)) is None


CONTRACT = """
name: contract
checks:
  device.gemm: {expect: {tflops.bf16: "> 600 TFLOP/s"}}
  collectives.all_reduce: {options: {sizes: [1GiB]}}
  train.lora: {}
"""


def test_a_record_is_judged_by_the_trial_of_a_contract(tmp_path: Path) -> None:
    contract = tmp_path / "contract.yaml"
    contract.write_text(CONTRACT)
    trial = load_trial(record_path("2026-11-23-2xh200/busy-gpu"))
    judged = rejudge(trial, other_trial=str(contract))
    verdicts = {(verdict.check, verdict.metric, verdict.subject): verdict for verdict in judged.verdicts}
    by_contract = [
        v for v in judged.verdicts if v.basis and v.basis.kind is BasisKind.TRIAL and v.metric == "tflops.bf16"
    ]
    assert [(verdict.subject, verdict.outcome) for verdict in by_contract] == [
        ("vm/gpu0", Outcome.PASS),
        ("vm/gpu1", Outcome.FAIL),
    ]
    assert verdicts["train.lora", "", "cluster"].outcome is Outcome.ERROR, "the record lacks it"
    other_options = verdicts["collectives.all_reduce", "", "cluster"]
    assert other_options.outcome is Outcome.UNJUDGED
    assert "sizes" in other_options.detail
    assert judged.name == "contract"
    accepted = load_trial(ACCEPTED)
    assert rejudge(accepted).decision.value is DecisionValue.ACCEPTED
    assert rejudge(accepted, other_trial=str(contract)).decision.value is DecisionValue.INCOMPLETE
    with pytest.raises(UsageError, match=r"missing\.yaml"):
        rejudge(accepted, other_trial="missing.yaml")


@pytest.mark.parametrize(
    ("origin", "removed", "required", "mark"),
    [
        ("acceptance.yaml", "train.fsdp", True, "without checks of the shipped trial acceptance: train.fsdp"),
        ("trial acceptance", "", False, "without checks of the shipped trial acceptance: train.ddp (not required)"),
        ("trial acceptance", "train.fsdp", True, ""),  # of an earlier version
    ],
)
def test_weakened_trial_with_a_shipped_name_says_so_first(origin: str, removed: str, required: bool, mark: str) -> None:
    trial = load_trial(record_path("2026-11-28-1xh200/acceptance"))
    checks = {name: each for name, each in trial.config["checks"].items() if name != removed}
    checks["train.ddp"] = {**checks["train.ddp"], "required": required}
    jobs = [
        job.model_copy(update={"checks": tuple(each for each in job.checks if each != removed)}) for job in trial.jobs
    ]
    update = {
        "config": {**trial.config, "checks": checks},
        "origins": {"name": origin},
        "jobs": tuple(jobs),
        "measurements": tuple(each for each in trial.measurements if each.check != removed),
    }
    decision = rejudge(trial.model_copy(update=update)).decision
    assert decision.value is DecisionValue.ACCEPTED
    assert decision.reason.partition(";")[0].startswith(mark or "21 checks" if mark else "")
    assert ("shipped trial" in decision.reason) is bool(mark)


def test_values_of_the_site_alone_are_counted_first() -> None:
    trial = load_trial(record_path("2026-11-28-1xh200/acceptance"))
    measurements = tuple(
        each.model_copy(update={"facts": {**each.facts, "gpu": "X", "gpus": []}}) for each in trial.measurements
    )
    runs = tuple(LearnedRun(path=name, host=name, started=1, digest=name) for name in "abc")
    value = ReferenceValue(gpus=1, nodes=1, value=600, unit="TFLOP/s", source="run", gpu="X", runs=3)
    site = Baseline(name="lab", learned_from=runs, expected={"gemm.bf16": (value,)})
    decision = rejudge(trial.model_copy(update={"measurements": measurements, "baseline": site})).decision
    assert decision.reason.startswith("no published reference and no bound: 2 verdicts rest on your own runs")


def test_a_new_gpu_model_is_judged_by_bounds_and_the_decision_begins_with_that() -> None:
    record = record_path("2026-11-29-1xh200/acceptance")
    trial = Trial.model_validate_json(record.read_text().replace("NVIDIA H200", "NVIDIA Z900"))
    judged = rejudge(trial)
    assert judged.decision.value is DecisionValue.ACCEPTED
    assert judged.decision.unknown_gpus == ("NVIDIA Z900",)
    assert judged.decision.reason.startswith("unknown GPU model NVIDIA Z900: no published figures, judged by bounds")
    (speed,) = (each for each in judged.verdicts if (each.check, each.metric) == ("device.gemm", "tflops.bf16"))
    assert speed.basis
    assert speed.basis.kind is BasisKind.PHYSICAL_LIMIT
