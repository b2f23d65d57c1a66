"""Checkpoints that are whole or not there, and whose every byte is checked before it is used.

``checkpoints/step-00000020`` holds what torch.distributed.checkpoint wrote (each rank its share, so that any number of
ranks can read it) and a manifest of our own: SHA-256 and size of each file. The formats' own loaders take a flipped bit
for a weight. A folder gets its name when all is written; what was cut short is called ``….incomplete``, and ignored.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from seatrial.model import SeatrialError
from seatrial.train import disk
from seatrial.train.parallel import BuiltModel, World
from seatrial.train.train_config import Checkpoint
from seatrial.util.files import sync_folder, write_json

MANIFEST_FILE = "manifest.json"
THREADS = 4  # that write a rank's files, and read them: one does not fill a fast filesystem
# What does not train is not kept: it is drawn again from the seed, or read again from where it came.
_OPTIONS = StateDictOptions(ignore_frozen_params=True)


@dataclass(frozen=True)
class CheckpointTiming:
    """One save or load. ``blocked_s``: how long training stood still; ``seconds``: until all was on disk, or read."""

    kind: str  # save, async save, load
    step: int
    bytes: int
    blocked_s: float
    seconds: float
    mb_per_s: float


def step_folder(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08}"


def complete_checkpoints(out: Path) -> list[Path]:
    """The checkpoints that were finished, oldest first."""
    return sorted(path for path in (out / "checkpoints").glob("step-????????") if (path / MANIFEST_FILE).is_file())


def file_hashes(place: Path) -> dict[str, str]:
    """SHA-256 of each file of weights and moments in a finished checkpoint; DCP's own index names the folder, too.

    Raises SeatrialError where it has no whole manifest.
    """
    files = _read(place)["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".distcp")}


class CheckedWriter(FileSystemWriter):
    """DCP's own says nothing of a file that one of its threads could not write: the save then counts as done."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Raises what a thread raised, as the disk said it."""
        failures: list[BaseException] = []
        usual = threading.excepthook
        threading.excepthook = lambda thread: failures.append(thread.exc_value or SystemExit())
        try:
            written = super().write_data(plan, planner)
        except Exception as error:
            raise self._told(error) from error
        finally:
            for one in threading.enumerate():  # DCP waits for none of them where its own part failed
                if "_write_files_from_queue" in one.name:
                    one.join()
            threading.excepthook = usual
        if failures or len(written.value()) != len(plan.items):
            raise self._told(failures[0]) if failures else OSError("not all of it was written")
        return written

    def _told(self, error: BaseException) -> BaseException:
        """With what is left of this rank's disk, which the others do not see."""
        reason = _of_the_disk(error)
        return (
            disk.DiskFullError(f"{reason}. {disk.filesystem_usage(Path(self.path))}")
            if disk.disk_full_reason(error, Path(self.path))
            else reason
        )


def _of_the_disk(error: BaseException) -> BaseException:
    """torch.save hides a full disk, and Ctrl-C, behind an error of its own."""
    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, (OSError, KeyboardInterrupt)):
        chain = chain.__cause__ or chain.__context__
    return chain or error


class Checkpointer:
    """Saves and restores of one run. All ranks take part in each call; ``results`` says what each took."""

    def __init__(self, settings: Checkpoint, world: World) -> None:
        self._settings, self._world = settings, world
        self.results: list[CheckpointTiming] = []
        # a group of its own, on the CPU: a save in the background must not mix with the training's exchanges
        self._group = dist.new_group(backend="gloo") if settings.every or settings.resume else None
        # Pinned memory that is kept: the copy of 5.9 GB by itself took 2.5 s the first time, then 0.11; into memory
        # that is new each time, as DCP has it by default, 4 to 6 s (H200; of a whole save more is left: docs/results)
        self._stager = BlockingAsyncStager(cache_staged_state_dict=world.device.type == "cuda")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._running: Future[CheckpointTiming] | None = None

    def should_save(self, step: int, last: int) -> bool:
        every = self._settings.every
        return every > 0 and (step % every == 0 or step == last)

    def save(self, out: Path, step: int, built: BuiltModel, optimizer: Any) -> None:
        """Save; when asynchronous, return once the state has been copied. Raises SeatrialError, on all ranks, where it
        (or the one before, in the background) could not be written: the checkpoint before it is then still there.
        """
        self.wait()
        began = time.monotonic()
        place = step_folder(out, step)
        beside = place.with_name(f"{place.name}.incomplete")
        if self._world.is_rank0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        self._meet(None)
        shapes, state = _shapes(built), _state(built.model, optimizer)
        writer = CheckedWriter(beside, thread_count=THREADS)
        if not self._settings.asynchronous:
            with _explained(beside):
                state_dict_saver.save(state, storage_writer=writer, process_group=self._group)
            self.results.append(self._finalize("save", beside, place, step, shapes, began, None))
            return
        written: Any = state_dict_saver.async_save(
            state, storage_writer=writer, process_group=self._group, async_stager=self._stager
        )
        blocked = time.monotonic() - began

        def seal() -> CheckpointTiming:
            with _explained(beside):
                written.result()
            return self._finalize("async save", beside, place, step, shapes, began, blocked)

        self._running = self._thread.submit(seal)

    def _meet(self, said: Any) -> list[Any]:
        """What every rank said, in the checkpoints' own group."""
        values: list[Any] = [None] * self._world.size
        dist.all_gather_object(values, said, group=self._group)
        return values

    def wait(self) -> None:
        """Wait for what is still being written. Raises SeatrialError where it could not be."""
        if self._running is not None:
            running, self._running = self._running, None
            self.results.append(running.result())

    def _finalize(
        self, kind: str, beside: Path, place: Path, step: int, shapes: Any, began: float, blocked: float | None
    ) -> CheckpointTiming:
        """Digest what was written, each rank its own, and give the folder its name. Runs beside the training, too."""
        with ThreadPoolExecutor(THREADS) as threads:
            paths = [path for path in sorted(beside.iterdir()) if _is_mine(path, self._world.rank)]
            mine = list(threads.map(_entry, paths))
        files = {name: entry for share in self._meet(mine) for name, entry in share}
        if self._world.is_rank0:
            write_json(beside / MANIFEST_FILE, {"step": step, "shapes": shapes, "files": files})
            shutil.rmtree(place, ignore_errors=True)
            beside.rename(place)
            sync_folder(place.parent)
            for old in complete_checkpoints(place.parent.parent)[: -self._settings.keep]:
                shutil.rmtree(old)
        self._meet(None)
        size = sum(entry["bytes"] for entry in files.values())
        seconds = time.monotonic() - began
        return CheckpointTiming(
            kind, step, size, seconds if blocked is None else blocked, seconds, size / 1e6 / seconds
        )

    def restore(self, out: Path, built: BuiltModel, optimizer: Any) -> int:
        """Put back the newest finished checkpoint; the steps it had taken, 0 where there is none.

        Raises SeatrialError, on all ranks, where a byte of it has changed or it is of another model.
        """
        found = complete_checkpoints(out)
        places = self._world.gather(str(found[-1]) if found else "")
        if len(set(places)) > 1:
            raise SeatrialError(f"the ranks see different checkpoints: {sorted(set(places))}; is {out} shared?")
        if not found:
            return 0
        began = time.monotonic()
        manifest = _read(found[-1])
        if difference := _difference(manifest["shapes"], _shapes(built)):
            raise SeatrialError(f"the checkpoint {found[-1]} is of another model: {difference}")
        self._verify(found, manifest["files"])
        state = _state(built.model, optimizer)
        with _explained(found[-1], "read"):
            state_dict_loader.load(state, storage_reader=FileSystemReader(found[-1]), process_group=self._group)
        set_state_dict(
            built.model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(ignore_frozen_params=True, strict=False),
        )
        size, seconds = sum(entry["bytes"] for entry in manifest["files"].values()), time.monotonic() - began
        step: int = manifest["step"]
        self.results.append(CheckpointTiming("load", step, size, seconds, seconds, size / 1e6 / seconds))
        return step

    def _verify(self, found: list[Path], files: Mapping[str, Mapping[str, Any]]) -> None:
        """Each rank reads its share of the files, and all learn what any of them found."""
        mine = sorted(files)[self._world.rank :: self._world.size]
        with ThreadPoolExecutor(THREADS) as threads:
            faults = list(filter(None, threads.map(lambda name: _fault(found[-1] / name, files[name]), mine)))
        if every := [fault for share in self._world.gather(faults) for fault in share]:
            older = f"; {found[-2].name} is older, to go on from it remove {found[-1]}" if len(found) > 1 else ""
            raise SeatrialError(f"the checkpoint {found[-1]} is damaged: {'; '.join(every)}{older}")


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": weights, "optimizer": moments}


def _shapes(built: BuiltModel) -> dict[str, list[int]]:
    return {name: list(one.shape) for name, one in built.model.named_parameters() if one.requires_grad}


def _difference(saved: Mapping[str, list[int]], own: Mapping[str, list[int]]) -> str:
    """The first weight that is not the same in both; empty when all are."""
    for name in sorted({*saved, *own}):
        if saved.get(name) != own.get(name):
            return f"{name} is {saved.get(name, 'not there')}, this run's is {own.get(name, 'not there')}"
    return ""


def _is_mine(path: Path, rank: int) -> bool:
    """DCP names a rank's files ``__RANK_N.distcp``; what belongs to nobody is the first rank's."""
    owner = path.name.removeprefix("__").partition("_")[0]
    return int(owner) == rank if owner.isdigit() else rank == 0


def _entry(path: Path) -> tuple[str, dict[str, Any]]:
    return path.name, {"sha256": _digest(path), "bytes": path.stat().st_size}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fault(path: Path, entry: Mapping[str, Any]) -> str:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path.name} has {size} bytes, {entry['bytes']} were written"
        return "" if _digest(path) == entry["sha256"] else f"{path.name} is not what was written (SHA-256)"
    except OSError as error:
        return f"{path.name}: {error.strerror}"


def _read(place: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((place / MANIFEST_FILE).read_text(encoding="utf-8"))
        _ = manifest["step"], manifest["files"], manifest["shapes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SeatrialError(f"the checkpoint {place} has no whole {MANIFEST_FILE}: {error}") from error
    return manifest


@contextmanager
def _explained(place: Path, verb: str = "write") -> Iterator[None]:
    """What DCP raises for any rank's failure, as one sentence; half a checkpoint is removed, it may fill the disk."""
    try:
        yield
    except (CheckpointException, OSError) as error:
        found = error.failures if isinstance(error, CheckpointException) else {}
        failures = {rank: failure[0] for rank, failure in sorted(found.items())}
        if any(isinstance(failure, KeyboardInterrupt) for failure in failures.values()):
            if verb == "write":
                shutil.rmtree(place, ignore_errors=True)
            raise KeyboardInterrupt from error  # DCP makes a failure of whatever ends it
        reasons = "; ".join(f"rank {rank}: {failure}" for rank, failure in failures.items()) or str(error)
        what = f"cannot {verb} the checkpoint {place}: {reasons}. Earlier ones were not touched"
        told = any(isinstance(failure, disk.DiskFullError) for failure in failures.values())
        if told or any(disk.disk_full_reason(one, place) for one in (error, *failures.values())):
            there = "" if told else f". {disk.filesystem_usage(place)}"  # before it is removed
            problem: SeatrialError = disk.DiskFullError(f"{what}{there}. {disk.REMEDY}")
        else:
            problem = SeatrialError(what)
        if verb == "write":
            shutil.rmtree(place, ignore_errors=True)
        raise problem from error
