"""Saving, resuming, resharding and refusing: each rule failing once. All is well in tests/test_training_trial.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.checks.training.checkpoint import (
    CHECK,
    CheckpointPlan,
    checkpoint_plan,
    compare_runs,
    fault_detection,
    killed_run_state,
    save_and_load_rates,
)
from seatrial.checks.training.checkpoint import _flip_a_bit as flip_a_bit
from seatrial.model import Metric, SeatrialError, UsageError
from seatrial.train import loop, train_config, variants
from tests.checks.training.check_helpers import failed_metrics
from tests.train.test_compare import record
from tests.train.test_compare import write_steps as keep

HOST = "rank 1 (n0): its gradient is no number"
DAMAGED = "__1_0.distcp is not what was written (SHA-256)"


def test_what_is_to_be_refused_is_every_ranks_own_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def another_was_first(*_: object) -> None:
        raise SeatrialError("rank 0 ended with rank 1, which says why")

    def damaged(*_: object) -> None:
        raise SeatrialError(DAMAGED)

    monkeypatch.setattr(loop, "train", another_was_first)
    monkeypatch.setattr(loop, "train_with_rank_errors", damaged)
    assert (
        variants.run_variant(
            variants.Variant(settings=train_config.load("tiny/checkpoint"), out=tmp_path, expect_error=True)
        )
        == DAMAGED
    )


def manifest(place: Path, **digests: str) -> None:
    place.mkdir(parents=True)
    files = {f"{name}.distcp": {"sha256": digest, "bytes": 1} for name, digest in {"a": "1", **digests}.items()}
    (place / "manifest.json").write_text(json.dumps({"step": 0, "shapes": {}, "files": files}))


def plan_of(folder: Path, ranks: int = 2) -> CheckpointPlan:
    return checkpoint_plan(train_config.load("tiny/checkpoint"), folder, ranks)


@pytest.fixture
def plan(tmp_path: Path) -> CheckpointPlan:
    """What a run leaves in which nothing was wrong."""
    made = plan_of(tmp_path)
    for name in ("whole", "killed", "fewer", "fsdp2", "ddp"):
        made.run_folder(name).mkdir()
        keep(made.run_folder(name), *(record(step, loss=float(step)) for step in range(1, 7)))
    for name in ("whole", "killed"):
        manifest(made.run_folder(name) / "checkpoints" / "step-00000003")
    manifest(made.run_folder("whole") / "checkpoints" / "step-00000006")
    (made.run_folder("killed") / "checkpoints" / "step-00000006.incomplete").mkdir()
    return made


def _another_first_save(plan: CheckpointPlan) -> None:
    (plan.run_folder("killed") / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    (plan.run_folder("killed") / "checkpoints" / "step-00000003").rmdir()
    manifest(plan.run_folder("killed") / "checkpoints" / "step-00000003", a="2")


def _half_a_save_looks_whole(plan: CheckpointPlan) -> None:
    manifest(plan.run_folder("killed") / "checkpoints" / "step-00000006")


@pytest.mark.parametrize(
    ("change", "metrics"),
    [
        (lambda plan: None, set()),
        (_another_first_save, {"repeated_files_differing"}),
        (_half_a_save_looks_whole, {"checkpoints_kept_after_kill"}),
    ],
)
def test_what_a_kill_leaves(plan: CheckpointPlan, change: Callable[[CheckpointPlan], None], metrics: set[str]) -> None:
    change(plan)
    assert failed_metrics(CHECK, killed_run_state(plan), plan.folder) == metrics


def _strays(name: str, step: int, by: float) -> Callable[[CheckpointPlan], None]:
    def change(plan: CheckpointPlan) -> None:
        steps = [record(one, loss=one + by * (one == step)) for one in range(1, 7)]
        keep(plan.run_folder(name), *steps)

    return change


@pytest.mark.parametrize(
    ("change", "metrics"),
    [
        (lambda plan: None, set()),
        (_strays("killed", 5, 1e-15), {"resumed_steps_differing"}),
        (_strays("killed", 2, 1.0), set()),  # from before the checkpoint, and not what was resumed
        (_strays("fewer", 4, 1e-7), set()),
        (_strays("fewer", 4, 1e-4), {"reshard_difference.fewer"}),
        (_strays("ddp", 6, 1e-4), {"reshard_difference.ddp"}),
        (_strays("fsdp2", 5, 1e-4), {"reshard_difference.fsdp2"}),
    ],
)
def test_what_goes_on_from_a_checkpoint(
    plan: CheckpointPlan, change: Callable[[CheckpointPlan], None], metrics: set[str]
) -> None:
    manifest(plan.run_folder("killed") / "checkpoints" / "step-00000006")
    change(plan)
    assert failed_metrics(CHECK, compare_runs(plan), plan.folder) == metrics


def test_another_last_checkpoint_fails(plan: CheckpointPlan) -> None:
    manifest(plan.run_folder("killed") / "checkpoints" / "step-00000006", b="2")
    assert failed_metrics(CHECK, compare_runs(plan), plan.folder) == {"resumed_files_differing"}


@pytest.mark.parametrize(
    ("of_bit", "of_nan", "metrics"),
    [
        (DAMAGED, HOST, set()),
        ("", HOST, {"bit_flip_detected"}),
        ("__0_0.distcp is not what was written (SHA-256)", HOST, {"bit_flip_detected"}),
        (DAMAGED, "", {"nan_detected"}),
        (DAMAGED, "rank 0 (n0): its loss is no number; " + HOST, {"nan_detected"}),
    ],
)
def test_what_must_be_refused(plan: CheckpointPlan, of_bit: str, of_nan: str, metrics: set[str]) -> None:
    assert failed_metrics(CHECK, fault_detection(plan, "__1_0.distcp", of_bit, of_nan), plan.folder) == metrics


def test_one_rank_cannot_be_fewer(tmp_path: Path) -> None:
    assert [plan_of(tmp_path, ranks).fewer_ranks for ranks in (1, 2, 3, 4, 6, 7)] == [0, 1, 1, 2, 3, 1]
    for ranks in (2, 3, 6):
        made = plan_of(tmp_path, ranks)
        assert made.run_config(4, 4, ranks=made.fewer_ranks).grad_accum * made.fewer_ranks == ranks


def test_a_config_that_is_not_saved_half_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"checkpoint\.every half of them"):
        checkpoint_plan(train_config.load("tiny/checkpoint", ["max_steps=7"]), tmp_path, 2)


def test_one_bit_is_flipped_in_the_largest_file(tmp_path: Path) -> None:
    (tmp_path / "a.distcp").write_bytes(bytes(10))
    (tmp_path / "b.distcp").write_bytes(bytes(20))
    assert flip_a_bit(tmp_path) == "b.distcp"
    assert (tmp_path / "a.distcp").read_bytes() == bytes(10)
    assert (tmp_path / "b.distcp").read_bytes() == bytes(10) + b"\1" + bytes(9)


def test_speeds_are_those_of_the_files(plan: CheckpointPlan) -> None:
    def result(kind: str, rate: float) -> dict[str, object]:
        return {"kind": kind, "step": 3, "bytes": 8, "blocked_s": rate / 1e3, "seconds": 2.0, "mb_per_s": rate}

    saves = {"whole": [result("save", 1000.0), result("save", 3000.0)]}
    saves["killed"] = [result("load", 5000.0), result("async save", 400.0), result("async save", 600.0)]
    for name, results in saves.items():
        (plan.run_folder(name) / "metrics.json").write_text(json.dumps({"checkpoints": results}))
    figures = {one.name: one.value for one in save_and_load_rates(plan) if isinstance(one, Metric)}
    assert figures == {
        "save_rate": 2.0,
        "save_blocked": 2.0,
        "async_save_rate": 0.5,
        "async_save_blocked": 0.6,  # the last one's: the first takes memory
        "load_rate": 5.0,
    }
