"""Checkpoints: exact resume on any number of ranks, rejection of damaged files, and full disks."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from seatrial.train import checkpoint, disk, loop
from seatrial.train.train_config import Checkpoint, TrainConfig
from tests.checks.host import mounts
from tests.train import ranks
from tests.train.ranks import Failed, config
from tests.train.test_loop import losses

pytestmark = pytest.mark.training

SAVING: dict[str, Any] = {"checkpoint": {"every": 3, "keep": 2}, "parallel": {"strategy": "fsdp2"}, "max_steps": 6}


def resumed(settings: TrainConfig, **changes: Any) -> TrainConfig:
    checkpoint_config = settings.checkpoint.model_copy(update={"resume": True})
    return settings.model_copy(update={"checkpoint": checkpoint_config, **changes})


def cut_back(out: Path, step: int) -> None:
    """Removes all checkpoints except that of ``step``."""
    for path in checkpoint.complete_checkpoints(out):
        if path != checkpoint.step_folder(out, step):
            shutil.rmtree(path)


def succeeded(results: list[Any]) -> list[Any]:
    assert not any(isinstance(result, Failed) or result is None for result in results), results
    return results


def failures(results: list[Any]) -> list[str]:
    """The messages of the ranks that did not fail because of another rank."""
    assert all(isinstance(result, Failed) for result in results), results
    messages = [result.message for result in results if result.is_root_cause]
    assert messages, results
    return messages


def digests(path: Path) -> dict[str, str]:
    manifest = json.loads((path / checkpoint.MANIFEST_FILE).read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items()}


def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(tmp_path: Path) -> None:
    """LoRA with DDP. For FSDP2 and a kill during a save see tests/checks/training/test_checkpoint.py."""
    base = config("qwen2-tiny", **SAVING | {"parallel": {"strategy": "ddp"}, "use_lora": True})
    succeeded(ranks.run(2, ranks.train, base, tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    cut_back(tmp_path / "parts", 3)
    (first, _) = succeeded(ranks.run(2, ranks.train, resumed(base), tmp_path / "parts"))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    last = [checkpoint.file_hashes(checkpoint.step_folder(tmp_path / name, 6)) for name in ("whole", "parts")]
    assert last[0] == last[1]
    assert [(timing["kind"], timing["step"]) for timing in first["checkpoints"]] == [("load", 3), ("save", 6)]


def test_resume_with_another_number_of_ranks(tmp_path: Path) -> None:
    """4 → 2 → 4 ranks at the same global batch, with a vocabulary of 257, divisible by neither."""
    base = config("qwen2-tiny", **SAVING, bsz=2).model_copy(update={"max_steps": 9})
    succeeded(ranks.run(4, ranks.train, base, tmp_path / "whole"))
    succeeded(ranks.run(4, ranks.train, base.model_copy(update={"max_steps": 3}), tmp_path / "start"))
    start, resuming = tmp_path / "start", resumed(base)
    succeeded(ranks.run(2, ranks.train, resuming.model_copy(update={"max_steps": 6, "bsz": 4}), start))
    succeeded(ranks.run(4, ranks.train, resuming, start))
    assert losses(start) == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def _flip_bit(path: Path) -> None:
    name = max(digests(path), key=lambda name: (path / name).stat().st_size)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)


def _truncate(path: Path) -> None:
    name = next(name for name in digests(path) if name.endswith(".distcp"))
    os.truncate(path / name, 100)


def _remove_index(path: Path) -> None:
    (path / ".metadata").unlink()


def _damage_manifest(path: Path) -> None:
    (path / checkpoint.MANIFEST_FILE).write_text("{")


def test_damaged_checkpoints_are_rejected(tmp_path: Path) -> None:
    base = config(**SAVING)
    succeeded(ranks.run(2, ranks.train, base, tmp_path / "good"))
    shutil.rmtree(checkpoint.step_folder(tmp_path / "good", 6))
    for damage, message in (
        (_flip_bit, "has SHA-256 "),
        (_truncate, "has size 100, written with"),
        (_remove_index, ".metadata: No such file"),
        (_damage_manifest, "manifest.json"),
    ):
        out = tmp_path / damage.__name__
        shutil.copytree(tmp_path / "good", out)
        damage(checkpoint.step_folder(out, 3))
        for error in failures(ranks.run(2, ranks.train, resumed(base), out)):
            assert str(checkpoint.step_folder(out, 3)) in error
            assert message in error
    for name, changes in (("vocab_size", {"model": {"name": "qwen2-tiny"}}), ("lora", {"use_lora": True})):
        other = resumed(config(**SAVING, **changes))
        (error,) = failures(ranks.run(1, ranks.train, other, tmp_path / "good"))
        assert "belongs to another model" in error, name


def test_a_requeued_job_falls_back_to_the_checkpoint_before_a_damaged_one(tmp_path: Path, capfd: Any) -> None:
    base = config(**SAVING | {"checkpoint": {"every": 2, "keep": 3, "requeue": True}})
    succeeded(ranks.run(1, ranks.train, base, tmp_path / "out"))
    expected = losses(tmp_path / "out")
    shutil.rmtree(checkpoint.step_folder(tmp_path / "out", 6))
    shutil.copytree(tmp_path / "out", tmp_path / "all damaged")
    _flip_bit(checkpoint.step_folder(tmp_path / "out", 4))
    (metrics,) = succeeded(ranks.run(1, ranks.train, resumed(base), tmp_path / "out"))
    assert [timing["step"] for timing in metrics["checkpoints"]] == [2, 4, 6]
    assert losses(tmp_path / "out") == expected
    for step in (2, 4):
        _damage_manifest(checkpoint.step_folder(tmp_path / "all damaged", step))
    (error,) = failures(ranks.run(1, ranks.train, resumed(base), tmp_path / "all damaged"))
    assert re.search(r"checkpoint \S+ damaged/checkpoints/step-00000002 is damaged: cannot read", error)


def _limit_file_size(settings: TrainConfig, out: Path) -> Any:
    """From the second save on, rank 1 can write no more than 64 KiB into a file."""
    original = checkpoint.Checkpointer.save

    def save(self: checkpoint.Checkpointer, out: Path, step: int, *arguments: Any) -> None:
        if step == 6 and self._world.rank == 1:
            self.wait()  # of step 3, where it is still being written
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        original(self, out, step, *arguments)

    checkpoint.Checkpointer.save = save  # type: ignore[method-assign,assignment]
    return loop.train(settings, out)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    base = config(**SAVING)
    checkpoint_config = base.checkpoint.model_copy(update={"asynchronous": asynchronous})
    results = ranks.run(2, _limit_file_size, base.model_copy(update={"checkpoint": checkpoint_config}), tmp_path)
    for error in failures(results):
        assert f"cannot write checkpoint {checkpoint.step_folder(tmp_path, 6)}.incomplete: rank 1: " in error
        assert "Earlier checkpoints are unchanged" in error
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


@mounts.needs_mount
def test_a_full_disk_keeps_the_previous_checkpoint_which_resumes(tmp_path: Path) -> None:
    """A tmpfs with space for one and a half checkpoints of 1.8 MB."""
    base = config("qwen2-tiny", **{**SAVING, "data": {"samples": 64, "cache": str(tmp_path / "data")}})
    with mounts.tmpfs(tmp_path / "small", "size=2700k") as small:
        for error in failures(ranks.run(2, ranks.train, base, small / "run")):
            assert f"cannot write checkpoint {checkpoint.step_folder(small / 'run', 6)}.incomplete: rank " in error
            assert f"No space left on device. On {socket.gethostname()}, {small} (tmpfs) has 2.6 MiB, " in error
            assert error.endswith(f"Earlier checkpoints are unchanged. {disk.REMEDY}")
        assert [path.name for path in (small / "run" / "checkpoints").iterdir()] == ["step-00000003"]
        shorter = resumed(base, max_steps=5, checkpoint=Checkpoint(every=0, resume=True))
        succeeded(ranks.run(2, ranks.train, shorter, small / "run"))


def _thread_fails(settings: TrainConfig, out: Path) -> Any:
    """One of DCP's writer threads gets ENOSPC; the main thread does not."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    original, failed_thread = FileSystem.create_stream, threading.Event()

    def create_stream(self: Any, path: Any, mode: str) -> Any:
        if threading.current_thread().name.endswith("(_write_files_from_queue)"):
            failed_thread.set()
            raise OSError(28, "No space left on device")
        failed_thread.wait(60)  # another thread must get a file
        return original(self, path, mode)

    FileSystem.create_stream = create_stream  # type: ignore[method-assign]
    return loop.train(settings, out)


def test_an_error_of_a_writer_thread_fails_the_save(tmp_path: Path) -> None:
    (error,) = failures(ranks.run(1, _thread_fails, config(checkpoint={"every": 4}), tmp_path))
    assert "cannot write checkpoint" in error
    assert re.search(r"rank 0: \[Errno 28\] No space left on device\. On .* free\. Earlier", error)
    assert not checkpoint.complete_checkpoints(tmp_path)


def _all_threads_fail(settings: TrainConfig, out: Path) -> Any:
    """The main thread fails first: DCP then does not wait for the others."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    def create_stream(*_: Any) -> Any:
        if threading.current_thread().name.endswith("(_write_files_from_queue)"):
            time.sleep(0.5)
        raise OSError(28, "No space left on device")

    FileSystem.create_stream = create_stream  # type: ignore[assignment]
    try:
        return loop.train(settings, out)
    finally:
        time.sleep(1)  # the other threads fail meanwhile


def test_a_full_disk_prints_no_thread_tracebacks(tmp_path: Path, capfd: Any) -> None:
    (error,) = failures(ranks.run(1, _all_threads_fail, config(checkpoint={"every": 4}), tmp_path))
    assert "cannot write checkpoint" in error
    assert "Exception in thread" not in capfd.readouterr().err


def test_asynchronous_saves_write_the_same_files(tmp_path: Path) -> None:
    base = config(**SAVING)
    asynchronous = base.model_copy(update={"checkpoint": Checkpoint(every=2, asynchronous=True, keep=1)})
    succeeded(ranks.run(2, ranks.train, base, tmp_path / "synchronous"))
    (first, _) = succeeded(ranks.run(2, ranks.train, asynchronous, tmp_path / "asynchronous"))
    assert checkpoint.file_hashes(checkpoint.step_folder(tmp_path / "synchronous", 6)) == checkpoint.file_hashes(
        checkpoint.step_folder(tmp_path / "asynchronous", 6)
    )
    assert [path.name for path in checkpoint.complete_checkpoints(tmp_path / "asynchronous")] == ["step-00000006"]
    assert [timing["kind"] for timing in first["checkpoints"]] == ["async save"] * 3
    assert all(timing["blocked_s"] <= timing["seconds"] and timing["bytes"] > 0 for timing in first["checkpoints"])


def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    base = config(checkpoint={"every": 4})
    (_,) = succeeded(ranks.run(1, ranks.train, base, tmp_path))
    (error,) = failures(ranks.run(1, ranks.train, resumed(base), tmp_path))
    assert "has 4 steps, max_steps is 4" in error


def test_an_interrupt_during_a_save_is_not_a_disk_error(tmp_path: Path) -> None:
    incomplete = tmp_path / "step-00000003.incomplete"
    incomplete.mkdir()
    hidden = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 17088 vs 598")
    hidden.__context__ = KeyboardInterrupt()  # during torch.save
    failures_by_rank: Any = {0: (checkpoint.CheckedWriter(incomplete)._write_error(hidden), None)}
    with pytest.raises(KeyboardInterrupt), checkpoint._convert_dcp_errors(incomplete):
        raise CheckpointException("save", failures_by_rank)
    assert not incomplete.exists()
