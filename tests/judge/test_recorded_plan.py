"""The jobs of a record, compared with its configuration, the other jobs and the measured devices."""

from __future__ import annotations

import pytest

from seatrial.checks.check import Needs, SkipIf
from seatrial.config.schema import Config
from seatrial.judge.coverage import RecordedPlan
from seatrial.model import GPUS_USED, Measurement
from tests.judge.test_coverage import check, config, errors, gpu_job, job, on, on_gpus


def test_fewer_ranks_than_expected_gpus_are_an_error() -> None:
    halved = (gpu_job(ranks_per_node=1),)
    (error,) = errors(*on_gpus(2, 1), jobs=halved)
    assert "ranks_per_node 1, expected 2" in error
    (error, _) = errors(*on_gpus(2, 1), jobs=halved, settings=config(gpus_per_node=8))
    assert "expected 8 by cluster.gpus_per_node" in error
    assert errors(*on_gpus(), jobs=(gpu_job(),), settings=config(gpus_per_node=2)) == []


def test_fewer_ranks_than_gpus_in_the_inventory_are_an_error() -> None:
    jobs = (
        job("nodes", 2, 1, "b").model_copy(update={"device": "cuda"}),
        gpu_job(ranks_per_node=1, expected_gpus=None),
    )
    inventory = [
        Measurement(check="b", subject=f"n{rank}", rank=rank, facts={GPUS_USED: [0, 1]} if rank else {})
        for rank in (0, 1)
    ]
    (error,) = errors(*inventory, *on_gpus(2, 1), jobs=jobs)
    assert "1 ranks per node" in error
    assert "b lists 2 usable GPUs on n1" in error


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("ranks", {"nodes": 1, "ranks_per_node": 4}, "job ranks has nodes 1, expected 2"),
        ("nodes", {"ranks_per_node": 2, "nodes": 2}, "job nodes has ranks_per_node 2, expected 1"),
        ("control", {"nodes": 2}, "job control has nodes 2, expected 1"),
    ],
)
def test_job_of_another_size_than_the_plan_is_an_error(name: str, changes: dict[str, int], text: str) -> None:
    nodes = 1 if name == "control" else 2
    changed = job(name, nodes, 2 if name == "ranks" else 1).model_copy(update=changes)
    plan = RecordedPlan(config(), (changed,), {})
    assert text in plan.problems[changed.name]


def test_jobs_on_different_devices_are_an_error() -> None:
    on_cpu = job("nodes", 2, 1, "b")
    (error,) = errors(*on_gpus(), jobs=(on_cpu, gpu_job()))
    assert "nodes on cpu, ranks on cuda" in error


def test_device_of_a_job_is_compared_with_its_subjects() -> None:
    (error,) = errors(*(on(rank) for rank in range(4)), jobs=(gpu_job(),))
    assert "n0/rank0" in error
    (error,) = errors(*on_gpus(), jobs=(job(),))
    assert "n1/gpu1" in error
    (error, _) = errors(*on_gpus(), jobs=(job().model_copy(update={"expected_gpus": 2}),))
    assert "device cpu, expected cuda" in error


def test_skip_that_the_plan_contradicts_is_an_error() -> None:
    skipped = [on(rank, skipped="one node") for rank in range(4)]
    for condition in (SkipIf.ONE_NODE, SkipIf.ONE_RANK_PER_NODE, SkipIf.NO_SLURM):
        (error,) = errors(*skipped, judged=check(skip_if=(condition,)), settings=config("slurm"))
        assert "one node" in error
    assert errors(*skipped, judged=check(skip_if=(SkipIf.NO_SLURM,))) == []
    assert errors(*skipped, judged=check(skip_if=(SkipIf.NO_COMMAND,))) == []
    assert errors(*skipped, judged=check(skip_if=(SkipIf.UNVERIFIED,))) == []


def test_a_plan_for_fewer_nodes_needs_min_nodes() -> None:
    three = job("ranks", 3, 2)
    (error,) = RecordedPlan(config(launcher="slurm", nodes=4), (three,), {}).problems[three.name]
    assert "expected_nodes 3, expected 4" in error
    assert RecordedPlan(config(launcher="slurm", nodes=4, min_nodes=3), (three,), {}).problems[three.name] == []
    (error,) = RecordedPlan(config(launcher="slurm", nodes=5, min_nodes=4), (three,), {}).problems[three.name]
    assert "expected_nodes 3, expected 4" in error


def test_after_the_loss_of_a_node_checks_may_run_on_the_others() -> None:
    settings = config(launcher="slurm", nodes=3, min_nodes=2)
    jobs = (job("ranks", 3, 2, "b"), job("ranks-on2", 2, 2, "a"))
    on_three = [on(rank, "b") for rank in range(6)]
    # node n1 was lost: the ranks of n2 have the numbers 2 and 3 now
    on_two = [on(rank, node="n0" if rank < 2 else "n2") for rank in range(4)]
    assert errors(*on_three, *on_two, settings=settings, jobs=jobs) == []
    elsewhere = [on(rank, node="n0" if rank < 2 else "n9") for rank in range(4)]
    (error,) = errors(*on_three, *elsewhere, settings=settings, jobs=jobs)
    assert "n9" in error


@pytest.mark.parametrize(
    ("launcher", "claim", "options", "is_allowed"),
    [
        ("kubernetes", None, {}, True),
        ("kubernetes", {"name": "results"}, {}, False),
        ("kubernetes", None, {"paths": ["/data"]}, False),
        ("local", None, {}, False),
    ],
)
def test_a_shared_folder_is_missing_only_in_pods_without_claim_and_paths(
    launcher: str, claim: dict[str, str] | None, options: dict[str, list[str]], is_allowed: bool
) -> None:
    settings = Config.model_validate(
        {
            "name": "t",
            "launcher": launcher,
            "cluster": {"nodes": 2},
            "kubernetes": {"image": "registry.example/seatrial:1", "claim": claim},
            "checks": {"a": {"options": options}, "b": {}},
        }
    )
    judged = check(needs=Needs(shared_folder=True))
    skipped = [on(rank, skipped="pods share no folder") for rank in range(4)]
    found = errors(*skipped, judged=judged, settings=settings)
    assert (found == []) is is_allowed


def test_no_slurm_is_an_error_if_slurm_starts_the_jobs() -> None:
    isolation = check(skip_if=(SkipIf.NO_SLURM,))
    skipped = [on(rank, skipped="no slurm.conf") for rank in range(4)]
    assert errors(*skipped, judged=isolation, settings=config("slurm"))
    assert errors(*skipped, judged=isolation, settings=config("local")) == []
