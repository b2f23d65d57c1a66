from __future__ import annotations

from dataclasses import replace

from seatrial.checks import catalog
from seatrial.model import TIME_LIMIT, Job
from seatrial.report.plan_text import plan_lines

JOB = Job(
    name="ranks",
    placement="ranks",
    device="cuda",
    nodes=4,
    ranks_per_node=8,
    checks=("device.gemm", "train.ddp"),
    options={},
    expected_gpus=8,
    limits={"device.gemm": 300, "train.ddp": 900},
    limit_s=1380,
    typical={"device.gemm": 200, "train.ddp": 92},
    start_s=8,
)


def test_cost_is_gpus_times_expected_duration() -> None:
    cost, rights = plan_lines([JOB], {}, catalog())
    assert cost == "2 checks, about 5 minutes on 32 GPUs: 2.7 GPU-hours"
    assert rights == "no check needs root or other special rights"
    cpu_only = JOB.model_copy(update={"device": "cpu"})
    assert "GPU" not in next(plan_lines([cpu_only], {}, catalog()))


def test_checks_of_unknown_duration_and_rights_are_named() -> None:
    checks = {**catalog(), "device.gemm": replace(catalog()["device.gemm"], rights="root, to lock clocks")}
    job = JOB.model_copy(update={"typical": {"device.gemm": 200}})
    cost, unknown, rights = plan_lines([job], {}, checks)
    assert "about 18 minutes" in cost
    assert "train.ddp (900 s)" in unknown
    assert "device.gemm: root, to lock clocks" in rights


def test_root_is_not_told_to_become_root() -> None:
    checks = {**catalog(), "device.gemm": replace(catalog()["device.gemm"], rights="root, to lock clocks")}
    assert len([*plan_lines([JOB], {}, checks)]) == 2
    (cost,) = plan_lines([JOB], {}, checks, as_root=True)
    assert "2 checks" in cost


def test_checks_that_cannot_run_are_counted() -> None:
    cost, _ = plan_lines([JOB], {}, catalog(), ["slurm.nodes"])
    assert cost.startswith("3 checks (1 of them ")


def test_checks_excluded_by_the_time_limit_are_named_in_their_order() -> None:
    excluded = {"train.lora": "--skip", "train.failure": TIME_LIMIT, "train.parity": TIME_LIMIT}
    *_, last = plan_lines([JOB], excluded, catalog())
    assert last.endswith(": train.failure, train.parity")
