"""Checkpoints: what is resumed goes on as if nothing had been, on any number of ranks; what is damaged is refused."""

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
    kept = settings.checkpoint.model_copy(update={"resume": True})
    return settings.model_copy(update={"checkpoint": kept, **changes})


def cut_back(out: Path, step: int) -> None:
    """As if the run had ended at ``step``."""
    for path in checkpoint.complete_checkpoints(out):
        if path != checkpoint.step_folder(out, step):
            shutil.rmtree(path)


def fine(found: list[Any]) -> list[Any]:
    assert not any(isinstance(one, Failed) or one is None for one in found), found
    return found


def failures(found: list[Any]) -> list[str]:
    """What those said that told why; the others ended with them."""
    assert all(isinstance(one, Failed) for one in found), found
    told = [one.said for one in found if "which says why" not in one.said]
    assert told, found
    return told


def digests(path: Path) -> dict[str, str]:
    manifest = json.loads((path / checkpoint.MANIFEST_FILE).read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items()}


def test_k_steps_saved_and_resumed_are_n_steps_bit_by_bit(tmp_path: Path) -> None:
    """Of LoRA under DDP; of FSDP2, and after a kill in the middle of a save: tests/checks/test_train_checkpoint.py."""
    wanted = config("qwen2-tiny", **SAVING | {"parallel": {"strategy": "ddp"}, "use_lora": True})
    fine(ranks.run(2, ranks.train, wanted, tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    cut_back(tmp_path / "parts", 3)
    (first, _) = fine(ranks.run(2, ranks.train, resumed(wanted), tmp_path / "parts"))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    last = [checkpoint.file_hashes(checkpoint.step_folder(tmp_path / name, 6)) for name in ("whole", "parts")]
    assert last[0] == last[1]
    assert [(one["kind"], one["step"]) for one in first["checkpoints"]] == [("load", 3), ("save", 6)]


def test_other_numbers_of_ranks_go_on_from_it(tmp_path: Path) -> None:
    """4 → 2 → 4 ranks at one global batch, with a vocabulary of 257 words, which neither divides."""
    wanted = config("qwen2-tiny", **SAVING, bsz=2).model_copy(update={"max_steps": 9})
    fine(ranks.run(4, ranks.train, wanted, tmp_path / "whole"))
    fine(ranks.run(4, ranks.train, wanted.model_copy(update={"max_steps": 3}), tmp_path / "start"))
    start, on = tmp_path / "start", resumed(wanted)
    fine(ranks.run(2, ranks.train, on.model_copy(update={"max_steps": 6, "bsz": 4}), start))
    fine(ranks.run(4, ranks.train, on, start))
    assert losses(start) == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def _damage(path: Path) -> None:
    name = max(digests(path), key=lambda name: (path / name).stat().st_size)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)


def _cut(path: Path) -> None:
    name = next(name for name in digests(path) if name.endswith(".distcp"))
    os.truncate(path / name, 100)


def _lose(path: Path) -> None:
    (path / ".metadata").unlink()


def _scribble(path: Path) -> None:
    (path / checkpoint.MANIFEST_FILE).write_text("{")


def test_a_damaged_checkpoint_is_found_and_named(tmp_path: Path) -> None:
    wanted = config(**SAVING)
    fine(ranks.run(2, ranks.train, wanted, tmp_path / "good"))
    shutil.rmtree(checkpoint.step_folder(tmp_path / "good", 6))
    for damage, complaint in (
        (_damage, "is not what was written (SHA-256)"),
        (_cut, "has 100 bytes"),
        (_lose, ".metadata: No such file"),
        (_scribble, "has no whole manifest.json"),
    ):
        out = tmp_path / damage.__name__
        shutil.copytree(tmp_path / "good", out)
        damage(checkpoint.step_folder(out, 3))
        for said in failures(ranks.run(2, ranks.train, resumed(wanted), out)):
            assert str(checkpoint.step_folder(out, 3)) in said
            assert complaint in said
    for name, changes in (("vocab_size", {"model": {"name": "qwen2-tiny"}}), ("lora", {"use_lora": True})):
        other = resumed(config(**SAVING, **changes))
        (said,) = failures(ranks.run(1, ranks.train, other, tmp_path / "good"))
        assert "is of another model: " in said, name


def _no_room(settings: TrainConfig, out: Path) -> Any:
    """From the second save on, rank 1 can write no more than 64 KiB into a file."""
    real = checkpoint.Checkpointer.save

    def save(self: checkpoint.Checkpointer, out: Path, step: int, *arguments: Any) -> None:
        if step == 6 and self._world.rank == 1:
            self.wait()  # of step 3, where it is still being written
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        real(self, out, step, *arguments)

    checkpoint.Checkpointer.save = save  # type: ignore[method-assign,assignment]
    return loop.train(settings, out)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_where_there_is_no_room_the_one_before_is_kept(tmp_path: Path, asynchronous: bool) -> None:
    wanted = config(**SAVING)
    kept = wanted.checkpoint.model_copy(update={"asynchronous": asynchronous})
    found = ranks.run(2, _no_room, wanted.model_copy(update={"checkpoint": kept}), tmp_path)
    for said in failures(found):
        assert f"cannot write the checkpoint {checkpoint.step_folder(tmp_path, 6)}.incomplete: rank 1: " in said
        assert "Earlier ones were not touched" in said
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


@mounts.needs_mount
def test_where_the_disk_is_full_the_one_before_is_kept_and_goes_on(tmp_path: Path) -> None:
    """A real filesystem with room for one checkpoint of 1.8 MB and a half."""
    wanted = config("qwen2-tiny", **{**SAVING, "data": {"samples": 64, "cache": str(tmp_path / "data")}})
    with mounts.tmpfs(tmp_path / "small", "size=2700k") as small:
        for said in failures(ranks.run(2, ranks.train, wanted, small / "run")):
            assert f"cannot write the checkpoint {checkpoint.step_folder(small / 'run', 6)}.incomplete: rank " in said
            assert f"No space left on device. On {socket.gethostname()}, {small} (tmpfs) has 2.6MiB, " in said
            assert said.endswith(f"Earlier ones were not touched. {disk.REMEDY}")
        assert [path.name for path in (small / "run" / "checkpoints").iterdir()] == ["step-00000003"]
        shorter = resumed(wanted, max_steps=5, checkpoint=Checkpoint(every=0, resume=True))
        fine(ranks.run(2, ranks.train, shorter, small / "run"))


def _thread_fails(settings: TrainConfig, out: Path) -> Any:
    """One of the threads that write beside the main one finds no room; the main one does."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    real, met = FileSystem.create_stream, threading.Event()

    def create_stream(self: Any, path: Any, mode: str) -> Any:
        if threading.current_thread().name.endswith("(_write_files_from_queue)"):
            met.set()
            raise OSError(28, "No space left on device")
        met.wait(60)  # so that another gets a file
        return real(self, path, mode)

    FileSystem.create_stream = create_stream  # type: ignore[method-assign]
    return loop.train(settings, out)


def test_a_file_that_a_thread_could_not_write_is_no_checkpoint(tmp_path: Path) -> None:
    (said,) = failures(ranks.run(1, _thread_fails, config(checkpoint={"every": 4}), tmp_path))
    assert "cannot write the checkpoint" in said
    assert re.search(r"rank 0: \[Errno 28\] No space left on device\. On .* free\. Earlier ones", said)
    assert not checkpoint.complete_checkpoints(tmp_path)


def _all_threads_fail(settings: TrainConfig, out: Path) -> Any:
    """The main one first: DCP then waits for no other."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    def create_stream(*_: Any) -> Any:
        if threading.current_thread().name.endswith("(_write_files_from_queue)"):
            time.sleep(0.5)
        raise OSError(28, "No space left on device")

    FileSystem.create_stream = create_stream  # type: ignore[assignment]
    try:
        return loop.train(settings, out)
    finally:
        time.sleep(1)  # a thread that nobody waited for fails meanwhile


def test_a_full_disk_is_told_without_the_tracebacks_of_threads(tmp_path: Path, capfd: Any) -> None:
    (said,) = failures(ranks.run(1, _all_threads_fail, config(checkpoint={"every": 4}), tmp_path))
    assert "cannot write the checkpoint" in said
    assert "Exception in thread" not in capfd.readouterr().err


def test_saving_beside_the_training_writes_the_same(tmp_path: Path) -> None:
    wanted = config(**SAVING)
    beside = wanted.model_copy(update={"checkpoint": Checkpoint(every=2, asynchronous=True, keep=1)})
    fine(ranks.run(2, ranks.train, wanted, tmp_path / "still"))
    (first, _) = fine(ranks.run(2, ranks.train, beside, tmp_path / "beside"))
    assert checkpoint.file_hashes(checkpoint.step_folder(tmp_path / "still", 6)) == checkpoint.file_hashes(
        checkpoint.step_folder(tmp_path / "beside", 6)
    )
    assert [path.name for path in checkpoint.complete_checkpoints(tmp_path / "beside")] == ["step-00000006"]
    assert [one["kind"] for one in first["checkpoints"]] == ["async save"] * 3
    assert all(one["blocked_s"] <= one["seconds"] and one["mb_per_s"] > 0 for one in first["checkpoints"])


def test_a_run_that_is_done_is_not_resumed(tmp_path: Path) -> None:
    wanted = config(checkpoint={"every": 4})
    (_,) = fine(ranks.run(1, ranks.train, wanted, tmp_path))
    (said,) = failures(ranks.run(1, ranks.train, resumed(wanted), tmp_path))
    assert "has taken all of its 4 steps" in said


def test_an_interrupted_save_is_an_interruption_and_no_fault_of_the_disk(tmp_path: Path) -> None:
    beside = tmp_path / "step-00000003.incomplete"
    beside.mkdir()
    hidden = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 17088 vs 598")
    hidden.__context__ = KeyboardInterrupt()  # in the middle of torch.save
    told: Any = {0: (checkpoint.CheckedWriter(beside)._told(hidden), None)}
    with pytest.raises(KeyboardInterrupt), checkpoint._explained(beside):
        raise CheckpointException("save", told)
    assert not beside.exists()
