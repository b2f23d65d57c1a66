"""One failure per rule of train.checkpoint. tests/pipeline/test_training_trial.py has the passing run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.checks.declare import Value
from seatrial.checks.training._checkpoint_runs import CheckpointPlan
from seatrial.checks.training.checkpoint import (
    CHECK,
    compare_runs,
    fault_detection,
    killed_run_state,
    save_and_load_rates,
)
from seatrial.checks.training.checkpoint import _flip_a_bit as flip_a_bit
from seatrial.train.variants import VariantError
from tests.checks.training.check_helpers import failed_metrics
from tests.checks.training.test_checkpoint_runs import make_plan
from tests.train.test_compare import record, write_steps

NAN = VariantError(message="", nonfinite_ranks=(1,))
BIT_FLIP = VariantError(message="", damaged_files=("__1_0.distcp",))
OTHER_ERROR = VariantError(message="rank 1 (n0): out of memory while SHA-256 of __1_0.distcp was computed")


def write_manifest(folder: Path, **digests: str) -> None:
    folder.mkdir(parents=True)
    files = {f"{name}.distcp": {"sha256": digest, "bytes": 1} for name, digest in {"a": "1", **digests}.items()}
    (folder / "manifest.json").write_text(json.dumps({"step": 0, "shapes": {}, "files": files}))


@pytest.fixture
def plan(tmp_path: Path) -> CheckpointPlan:
    """The files of a run without errors."""
    plan = make_plan(tmp_path)
    for name in ("uninterrupted", "killed", "fewer", "fsdp2", "ddp"):
        (plan.folder / name).mkdir()
        write_steps(plan.folder / name, *(record(step, loss=float(step)) for step in range(1, 7)))
    for name in ("uninterrupted", "killed"):
        write_manifest(plan.folder / name / "checkpoints" / "step-00000003")
    write_manifest(plan.folder / "uninterrupted" / "checkpoints" / "step-00000006")
    (plan.folder / "killed" / "checkpoints" / "step-00000006.incomplete").mkdir()
    return plan


def _different_first_checkpoint(plan: CheckpointPlan) -> None:
    (plan.folder / "killed" / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    (plan.folder / "killed" / "checkpoints" / "step-00000003").rmdir()
    write_manifest(plan.folder / "killed" / "checkpoints" / "step-00000003", a="2")


def _incomplete_checkpoint_is_accepted(plan: CheckpointPlan) -> None:
    write_manifest(plan.folder / "killed" / "checkpoints" / "step-00000006")


@pytest.mark.parametrize(
    ("change", "metrics"),
    [
        (lambda plan: None, set()),
        (_different_first_checkpoint, {"repeated_files_differing"}),
        (_incomplete_checkpoint_is_accepted, {"checkpoints_kept_after_kill"}),
    ],
)
def test_checkpoints_after_kill(
    plan: CheckpointPlan, change: Callable[[CheckpointPlan], None], metrics: set[str]
) -> None:
    change(plan)
    assert failed_metrics(CHECK, killed_run_state(plan)) == metrics


def _changed_loss(name: str, step: int, by: float) -> Callable[[CheckpointPlan], None]:
    def change(plan: CheckpointPlan) -> None:
        steps = [record(number, loss=number + by * (number == step)) for number in range(1, 7)]
        write_steps(plan.folder / name, *steps)

    return change


@pytest.mark.parametrize(
    ("change", "metrics"),
    [
        (lambda plan: None, set()),
        (_changed_loss("killed", 5, 1e-15), {"resumed_steps_differing"}),
        (_changed_loss("killed", 2, 1.0), set()),  # before the checkpoint, not part of the resumed run
        (_changed_loss("fewer", 4, 1e-7), set()),
        (_changed_loss("fewer", 4, 1e-4), {"reshard_difference.fewer"}),
        (_changed_loss("ddp", 6, 1e-4), {"reshard_difference.ddp"}),
        (_changed_loss("fsdp2", 5, 1e-4), {"reshard_difference.fsdp2"}),
    ],
)
def test_resumed_and_resharded_runs(
    plan: CheckpointPlan, change: Callable[[CheckpointPlan], None], metrics: set[str]
) -> None:
    write_manifest(plan.folder / "killed" / "checkpoints" / "step-00000006")
    change(plan)
    assert failed_metrics(CHECK, compare_runs(plan)) == metrics


def test_different_last_checkpoint_fails(plan: CheckpointPlan) -> None:
    write_manifest(plan.folder / "killed" / "checkpoints" / "step-00000006", b="2")
    assert failed_metrics(CHECK, compare_runs(plan)) == {"resumed_files_differing"}


@pytest.mark.parametrize(
    ("bit_flip", "nan", "metrics"),
    [
        (BIT_FLIP, NAN, set()),
        (None, NAN, {"bit_flip_detected"}),
        (OTHER_ERROR, NAN, {"bit_flip_detected"}),
        (VariantError(message="", damaged_files=("__0_0.distcp",)), NAN, {"bit_flip_detected"}),
        (BIT_FLIP, None, {"nan_detected"}),
        (BIT_FLIP, OTHER_ERROR, {"nan_detected"}),
        (BIT_FLIP, VariantError(message="", nonfinite_ranks=(0, 1)), {"nan_detected"}),
    ],
)
def test_undetected_faults_fail(
    plan: CheckpointPlan, bit_flip: VariantError | None, nan: VariantError | None, metrics: set[str]
) -> None:
    observed = fault_detection(plan, "__1_0.distcp", bit_flip, nan)
    assert failed_metrics(CHECK, observed) == metrics


def test_flip_changes_one_bit_of_the_largest_file(tmp_path: Path) -> None:
    (tmp_path / "a.distcp").write_bytes(bytes(10))
    (tmp_path / "b.distcp").write_bytes(bytes(20))
    assert flip_a_bit(tmp_path) == "b.distcp"
    assert (tmp_path / "a.distcp").read_bytes() == bytes(10)
    assert (tmp_path / "b.distcp").read_bytes() == bytes(10) + b"\1" + bytes(9)


def test_rates_and_blocked_times_from_metrics_json(plan: CheckpointPlan) -> None:
    def result(kind: str, rate: float) -> dict[str, object]:
        return {"kind": kind, "step": 3, "bytes": rate * 2e6, "blocked_s": rate / 1e3, "seconds": 2.0}

    saves = {"timed": [result("save", 1000.0), result("save", 3000.0)]}
    saves["timed-resumed"] = [result("load", 5000.0), result("async save", 400.0), result("async save", 600.0)]
    for name, results in saves.items():
        (plan.folder / name).mkdir()
        (plan.folder / name / "metrics.json").write_text(json.dumps({"checkpoints": results}))
    values = {item.name: item.value for item in save_and_load_rates(plan) if isinstance(item, Value)}
    assert values == {
        "save_rate": 2.0,
        "save_blocked": 2.0,
        "async_save_rate": 0.5,
        "async_save_blocked": 0.6,  # of the last save: the first one allocates memory
        "load_rate": 5.0,
    }
