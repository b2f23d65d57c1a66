"""The tested hardware, derived from the jobs, measurements and facts of a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tools.records import record_path

from seatrial.config.schema import Config
from seatrial.model import DecisionValue, Job, Measurement, Trial
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial
from seatrial.pipeline.tested_hardware import cpu_only, device_conflict
from seatrial.pipeline.tested_hardware import tested_hardware as hardware
from tests.pipeline.fixtures import JOB

ON_GPUS = JOB.model_copy(update={"device": "cuda"})
RECORD = record_path("2026-11-22-2xh200-restructured/final-quick")


def config(launcher: str = "local", **cluster: int) -> Config:
    return Config.model_validate({"name": "t", "launcher": launcher, "cluster": cluster, "checks": {"a": {}}})


def host(*models: str) -> dict[str, Any]:
    return {"gpu": {"gpus": [{"index": index, "name": name} for index, name in enumerate(models)]}}


def text(settings: Config, jobs: Sequence[Job], environment: dict[str, Any], gpu_error: str = "") -> str:
    measurements = [Measurement(check="a", subject=f"n/gpu{index}", rank=index) for index in range(2)]
    return hardware(settings, jobs, measurements, environment, gpu_error)


def test_cpu_only_run_names_unused_gpus() -> None:
    assert "0 of 2 GPUs used" in text(config(gpus_per_node=0), (JOB,), host("H200", "H200"))
    assert text(config(gpus_per_node=0), (JOB,), host()).startswith("CPU ONLY: 1 node, no GPU;")


def test_used_gpus_are_named() -> None:
    assert text(config(gpus_per_node=2), (ON_GPUS,), host(*["H200"] * 4)) == "1 node, 2 × H200 of 4"
    assert text(config(gpus_per_node=2), (ON_GPUS,), host("A", "B", "C")) == "1 node, 2 × A + B of 3"
    assert text(config(), (ON_GPUS,), host("H200", "H200")).endswith("not set (--gpus-per-node)")
    control = ON_GPUS.model_copy(update={"placement": "control"})
    assert text(config(), (control,), host("H200")) == "1 node; no check of this trial uses a GPU"
    oumi = Measurement(check="train.oumi", subject="n", rank=0, facts={"device": "cuda"})
    on_nodes = ON_GPUS.model_copy(update={"placement": "nodes"})
    assert hardware(config(), (on_nodes,), [oumi], host("H200"), "") == "1 node; GPUs are given only to train.oumi"
    on_two = ON_GPUS.model_copy(update={"nodes": 2})
    assert text(config("slurm", nodes=2), (on_two,), host()) == "2 nodes of a Slurm cluster, 2 GPUs each"
    assert text(config("slurm", nodes=3), (on_two,), host()) == "2 of 3 nodes of a Slurm cluster, 2 GPUs each"
    assert text(config("torchrun"), (ON_GPUS,), {}) == "1 node started by the user, 2 GPUs each"
    assert text(config(), (), host("H200"), "2 GPUs expected, 1 usable") == "1 node; 2 GPUs expected, 1 usable"


def test_cpu_only_needs_a_job() -> None:
    assert cpu_only((JOB,))
    assert not cpu_only((JOB, ON_GPUS))
    assert not cpu_only(())


@pytest.mark.parametrize(
    ("settings", "job", "environment", "conflict"),
    [
        (config(), JOB, host(), False),
        (config(), JOB, host("H200"), True),
        (config(gpus_per_node=0), JOB, host("H200"), False),
        (config(), ON_GPUS, host("H200", "H200"), False),
        (config(), ON_GPUS, host(), True),
        (config(), ON_GPUS, {}, True),
        (config(), JOB, {"gpu": {"gpus": None}}, True),
        (config(), JOB, {"gpu": {"gpus": [{"index": "0"}]}}, True),
        (config("slurm"), ON_GPUS, host(), False),
        (config("torchrun"), ON_GPUS, {}, False),
    ],
)
def test_device_of_the_jobs_is_compared_with_the_host(
    settings: Config, job: Job, environment: dict[str, Any], conflict: bool
) -> None:
    assert bool(device_conflict(settings, (job,), environment)) is conflict


@pytest.fixture(scope="module")
def accepted() -> Trial:
    return load_trial(RECORD)


def test_decision_of_the_record_is_not_believed(accepted: Trial) -> None:
    decision = accepted.decision.model_copy(update={"cpu_only": True, "tested_hardware": "CPU ONLY: no GPU"})
    edited = accepted.model_copy(update={"decision": decision})
    judged = rejudge(edited)
    assert judged.decision.value is DecisionValue.ACCEPTED
    assert not judged.decision.cpu_only
    assert judged.decision.tested_hardware == "1 node, 2 × NVIDIA H200"


def test_gpu_record_edited_to_a_cpu_only_one_is_incomplete(accepted: Trial) -> None:
    jobs = tuple(job.model_copy(update={"device": "cpu", "expected_gpus": None}) for job in accepted.jobs)
    config_without = {**accepted.config, "cluster": {"nodes": 1, "gpus_per_node": None}}
    edited = accepted.model_copy(update={"jobs": jobs, "config": config_without})
    assert rejudge(edited).decision.value is DecisionValue.INCOMPLETE
