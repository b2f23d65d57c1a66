"""Short runs in one child process: expected errors and injected faults. The checks that use them run real ranks."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from seatrial.model import SeatrialError
from seatrial.train import checkpoint, loop, train_config, variants
from seatrial.train.variants import InjectedFault, Variant, VariantError, injected_fault, run_variant
from tests.train.ranks import config

BIT_FLIP_MESSAGE = "__1_0.distcp: SHA-256 mismatch"


def test_expected_error_is_the_error_of_each_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def peer_error(*_: object) -> None:
        raise SeatrialError("stopped after rank 1")

    def rank_error(*_: object) -> None:
        raise SeatrialError(BIT_FLIP_MESSAGE)

    monkeypatch.setattr(peer_error, "__wrapped__", rank_error, raising=False)
    monkeypatch.setattr(loop, "train", peer_error)
    variant = Variant(settings=train_config.load("tiny/checkpoint"), out=tmp_path, expect_error=True)
    assert run_variant(variant) == VariantError(message=BIT_FLIP_MESSAGE)
    with pytest.raises(SeatrialError, match="stopped after rank 1"):
        run_variant(variant.model_copy(update={"expect_error": False}))


@pytest.mark.parametrize("shared", [False, True])
def test_pod_without_the_run_directory_of_rank_0_creates_its_own_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shared: bool
) -> None:
    rank0_folder = tmp_path / "pod-0" / "artifacts" / "attempt1"
    values = iter([[rank0_folder, None], ["", "pod-1"]])
    monkeypatch.setattr(variants, "gather", lambda _value: next(values))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    if shared:
        with pytest.raises(SeatrialError, match="not shared between rank 0 and pod-1"):
            variants.create_folder(tmp_path / "pod-1", shared=True)
    else:
        assert variants.create_folder(tmp_path / "pod-1") == rank0_folder
        assert rank0_folder.is_dir()


def test_nan_is_the_gradient_of_one_step_of_one_rank(tmp_path: Path) -> None:
    settings, fault = config(max_steps=3), InjectedFault(kind="nan", rank=0, step=2)
    error = run_variant(Variant(settings=settings, out=tmp_path / "nan", fault=fault, expect_error=True))
    assert error is not None
    assert error.message.startswith("step 2: "), error
    assert error.nonfinite_ranks == (0,)
    dist.destroy_process_group()  # training leaves it open after an error
    elsewhere = fault.model_copy(update={"rank": 1})
    assert run_variant(Variant(settings=settings, out=tmp_path / "other rank", fault=elsewhere)) is None
    assert run_variant(Variant(settings=settings, out=tmp_path / "no fault")) is None


def test_damaged_file_is_a_field_of_the_error(tmp_path: Path) -> None:
    settings, resume = (config(max_steps=2, checkpoint={"every": 1, "resume": resume}) for resume in (False, True))
    run_variant(Variant(settings=settings, out=tmp_path))
    newest = checkpoint.complete_checkpoints(tmp_path)[-1]
    file = next(newest.glob("*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))
    error = run_variant(Variant(settings=resume, out=tmp_path, expect_error=True))
    assert error is not None
    assert (error.damaged_files, error.nonfinite_ranks) == ((file.name,), ())
    dist.destroy_process_group()  # training leaves it open after an error
    (newest / "manifest.json").write_text("{}")
    error = run_variant(Variant(settings=resume, out=tmp_path, expect_error=True))
    assert error is not None
    assert error.damaged_files == ("manifest.json",)
    dist.destroy_process_group()


def test_original_methods_are_restored_after_a_fault() -> None:
    def methods() -> tuple[object, object]:
        return checkpoint.Checkpointer._finalize, loop.Trainer.step

    originals = methods()
    for kind, changed in (("kill_in_save", (True, False)), ("nan", (False, True))):
        fault = InjectedFault.model_validate({"kind": kind, "rank": 0, "step": 1})
        with contextlib.suppress(ZeroDivisionError), injected_fault(fault):
            assert tuple(new is not old for new, old in zip(methods(), originals, strict=True)) == changed
            raise ZeroDivisionError
        assert methods() == originals


def test_rank_is_killed_only_in_the_save_of_its_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _pid, number: killed.append(number))
    settings = config(max_steps=2, checkpoint={"every": 1})
    for rank, expected in ((1, []), (0, [signal.SIGKILL])):
        fault = InjectedFault(kind="kill_in_save", rank=rank, step=2)
        run_variant(Variant(settings=settings, out=tmp_path / str(rank), fault=fault))
        assert killed == expected
