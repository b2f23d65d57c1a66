"""Sharded checkpoints: written atomically, verified by SHA-256 before they are loaded.

``checkpoints/step-00000020`` holds the files of torch.distributed.checkpoint (DCP), up to THREADS shard files per rank.
Any number of ranks can load them. manifest.json has the size and SHA-256 of each file: DCP itself does not detect a
flipped bit. A save writes to ``step-00000020.incomplete`` and renames this folder at the end; incomplete folders are
ignored.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from seatrial.bench.rank import gather
from seatrial.model import SeatrialError
from seatrial.train import data_cache, disk, safe_loading
from seatrial.train.parallel import BuiltModel, World
from seatrial.train.train_config import Checkpoint
from seatrial.util.files import sync_folder, write_json
from seatrial.util.input_files import read_json

MANIFEST_FILE = "manifest.json"
THREADS = 4  # per rank, for writing and hashing: one thread does not saturate a fast filesystem
# Frozen parameters are not saved, since a resumed run generates them from the seed or reads them from model.weights.
_OPTIONS = StateDictOptions(ignore_frozen_params=True)


class DamagedCheckpointError(SeatrialError):
    """``files`` of the checkpoint, or its manifest, cannot be read or differ from what was saved."""

    def __init__(self, message: str, files: tuple[str, ...]) -> None:
        super().__init__(message)
        self.files = files


@dataclass(frozen=True)
class CheckpointTiming:
    """Size and duration of one save or load."""

    kind: str  # "save", "async save" or "load"
    step: int
    bytes: int
    blocked_s: float  # seconds for which training was paused
    seconds: float  # duration of the whole load or save, including hashes, manifest and rename


def step_folder(out: Path, step: int) -> Path:
    """The checkpoint folder of ``step`` in the run folder ``out``."""
    return out / "checkpoints" / f"step-{step:08}"


def complete_checkpoints(out: Path) -> list[Path]:
    """The folders of all complete checkpoints, oldest first."""
    return sorted(path for path in (out / "checkpoints").glob("step-????????") if (path / MANIFEST_FILE).is_file())


def file_hashes(folder: Path) -> dict[str, str]:
    """File name → SHA-256 of each shard of a complete checkpoint. DCP's index is excluded: it contains the path.

    Raises SeatrialError if the manifest cannot be read.
    """
    files = _read_manifest(folder)["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".distcp")}


class CheckedWriter(FileSystemWriter):
    """FileSystemWriter that raises the errors of its writer threads; DCP ignores these errors and reports success."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Writes as FileSystemWriter does. Raises a thread's first error, or OSError if an item was not written."""
        thread_errors: list[BaseException] = []
        previous_hook = threading.excepthook
        threading.excepthook = lambda failure: thread_errors.append(failure.exc_value or SystemExit())
        try:
            results = super().write_data(plan, planner)
        except Exception as error:
            raise self._write_error(error) from error
        finally:
            for thread in threading.enumerate():  # DCP does not join them if the main thread failed
                if "_write_files_from_queue" in thread.name:
                    thread.join()
            threading.excepthook = previous_hook
        if thread_errors:
            raise self._write_error(thread_errors[0])
        if len(results.value()) != len(plan.items):
            raise OSError(f"{len(results.value())} of {len(plan.items)} items were written")
        return results

    def _write_error(self, error: BaseException) -> BaseException:
        """The root error of ``error``; if the disk is full, a DiskFullError with the usage of the filesystem.

        The rank that failed adds the usage, since the filesystem may be local to its node.
        """
        # torch.save wraps the OSError or KeyboardInterrupt
        root_causes = (cause for cause in disk.error_chain(error) if isinstance(cause, (OSError, KeyboardInterrupt)))
        cause = next(root_causes, error)
        if disk.disk_full_reason(error, Path(self.path)):
            return disk.DiskFullError(f"{cause}. {disk.filesystem_usage(Path(self.path))}")
        return cause


class Checkpointer:
    """Saves and restores the checkpoints of one run. All ranks make the same calls; ``results`` holds the timings."""

    def __init__(self, settings: Checkpoint, world: World) -> None:
        self._settings, self._world = settings, world
        self.results: list[CheckpointTiming] = []
        # a separate CPU group: collectives of a background save must not interleave with those of training
        self._group = dist.new_group(backend="gloo") if settings.every or settings.resume else None
        # Copies the state to pinned memory that all saves reuse. On an H200, the copy of 5.9 GB took 2.5 s in the first
        # save and 0.11 s in later saves. With memory allocated for each save (DCP's default), each copy took 4 to 6 s.
        # docs/results has the durations of whole saves
        self._stager = BlockingAsyncStager(cache_staged_state_dict=world.device.type == "cuda")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending_save: Future[CheckpointTiming] | None = None  # the asynchronous save in progress

    def should_save(self, step: int, last: int) -> bool:
        """Whether ``step`` is a multiple of checkpoint.every, or the ``last`` step."""
        every = self._settings.every
        return every > 0 and (step % every == 0 or step == last)

    def save(self, out: Path, step: int, built: BuiltModel, optimizer: Any) -> None:
        """Saves the model and optimizer. An asynchronous save copies their state and writes it in the background.

        Raises SeatrialError on all ranks if a synchronous save fails, or if the previous asynchronous save failed. A
        failed save leaves earlier checkpoints unchanged.
        """
        self.wait()
        start = time.monotonic()
        folder = step_folder(out, step)
        incomplete = folder.with_name(f"{folder.name}.incomplete")
        if self._world.is_rank_0:
            shutil.rmtree(incomplete, ignore_errors=True)
            incomplete.mkdir(parents=True)
        gather(None, self._group)  # all ranks wait for the folder
        shapes, state = trained_shapes(built.model), _state(built.model, optimizer)
        writer = CheckedWriter(incomplete, thread_count=THREADS)
        if not self._settings.asynchronous:
            with _convert_dcp_errors(incomplete):
                state_dict_saver.save(state, storage_writer=writer, process_group=self._group)
            self.results.append(self._finalize("save", incomplete, folder, step, shapes, start, None))
            return
        pending_write: Any = state_dict_saver.async_save(
            state, storage_writer=writer, process_group=self._group, async_stager=self._stager
        )
        blocked = time.monotonic() - start

        def finalize() -> CheckpointTiming:
            with _convert_dcp_errors(incomplete):
                pending_write.result()
            return self._finalize("async save", incomplete, folder, step, shapes, start, blocked)

        self._pending_save = self._thread.submit(finalize)

    def wait(self) -> None:
        """Waits for the asynchronous save in progress. Raises SeatrialError if it failed."""
        if self._pending_save is not None:
            pending_save, self._pending_save = self._pending_save, None
            self.results.append(pending_save.result())

    def _finalize(
        self, kind: str, incomplete: Path, folder: Path, step: int, shapes: Any, start: float, blocked: float | None
    ) -> CheckpointTiming:
        """Hashes this rank's files; rank 0 writes the manifest, renames the folder and removes old checkpoints.

        ``start``: time.monotonic() at the start of the save. ``blocked``: seconds for which an asynchronous save paused
        training; None for a synchronous one, which pauses training until it ends.
        """
        with ThreadPoolExecutor(THREADS) as threads:
            paths = [path for path in sorted(incomplete.iterdir()) if _belongs_to(path, self._world.rank)]
            names = [path.name for path in paths]
            rank_entries = list(zip(names, threads.map(data_cache.file_properties, paths), strict=True))
        files = dict(chain.from_iterable(gather(rank_entries, self._group)))
        if self._world.is_rank_0:
            write_json(incomplete / MANIFEST_FILE, {"step": step, "shapes": shapes, "files": files})
            shutil.rmtree(folder, ignore_errors=True)
            incomplete.rename(folder)
            sync_folder(folder.parent)
            out = folder.parent.parent
            for old in complete_checkpoints(out)[: -self._settings.keep]:
                shutil.rmtree(old)
        gather(None, self._group)  # all ranks wait for the rename
        size = sum(entry["bytes"] for entry in files.values())
        seconds = time.monotonic() - start
        return CheckpointTiming(kind, step, size, seconds if blocked is None else blocked, seconds)

    def restore(self, out: Path, built: BuiltModel, optimizer: Any) -> int:
        """Loads the newest complete checkpoint; returns its step, or 0 if there is none.

        Raises DamagedCheckpointError (see _newest_intact), and on all ranks SeatrialError if the checkpoint belongs to
        another model or if the newest checkpoint differs between ranks.
        """
        checkpoints = complete_checkpoints(out)
        newest = set(self._world.gather(str(checkpoints[-1]) if checkpoints else ""))
        if len(newest) > 1:
            listed = ", ".join(path or "none" for path in sorted(newest))
            raise SeatrialError(f"ranks see different newest checkpoints: {listed}; set --out to a shared directory")
        if not checkpoints:
            return 0
        start = time.monotonic()
        folder = self._newest_intact(checkpoints)
        manifest = _read_manifest(folder)
        if difference := shape_difference(manifest["shapes"], trained_shapes(built.model)):
            raise SeatrialError(f"checkpoint {folder} belongs to another model: {difference}")
        state = _state(built.model, optimizer)
        with _convert_dcp_errors(folder, "read"):
            reader, planner = safe_loading.Reader(folder), safe_loading.Planner()
            state_dict_loader.load(state, storage_reader=reader, planner=planner, process_group=self._group)
        set_state_dict(
            built.model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(ignore_frozen_params=True, strict=False),
        )
        size, seconds = sum(entry["bytes"] for entry in manifest["files"].values()), time.monotonic() - start
        step: int = manifest["step"]
        self.results.append(CheckpointTiming("load", step, size, seconds, seconds))
        return step

    def _newest_intact(self, checkpoints: list[Path]) -> Path:
        """The newest checkpoint; with checkpoint.requeue (for unattended jobs), the newest one that is not damaged.

        Raises DamagedCheckpointError on all ranks if the newest is damaged; with checkpoint.requeue, only if all are.
        """
        *older, candidate = checkpoints
        while damage := self._damage(candidate):
            message = f"checkpoint {candidate} is damaged: {'; '.join(damage.values())}"
            if not older or not self._settings.requeue:
                remedy = f"resume from {older[-1].name}" if older else "restart at step 1"
                raise DamagedCheckpointError(f"{message}; remove it to {remedy}", tuple(damage))
            candidate = older.pop()
            if self._world.is_rank_0:
                print(f"{message}; using {candidate.name}", file=sys.stderr)
        return candidate

    def _damage(self, folder: Path) -> dict[str, str]:
        """File of a checkpoint → its difference from the manifest; the same on all ranks, each hashes a part."""
        try:
            files: Mapping[str, Mapping[str, Any]] = _read_manifest(folder)["files"]
            names = sorted(files)[self._world.rank :: self._world.size]
            with ThreadPoolExecutor(THREADS) as threads:
                results = threads.map(lambda name: data_cache.file_difference(folder / name, files[name]), names)
                damage = {name: difference for name, difference in zip(names, results, strict=True) if difference}
        except SeatrialError as error:
            damage = {MANIFEST_FILE: str(error)}
        return {name: text for of_rank in self._world.gather(damage) for name, text in of_rank.items()}


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": weights, "optimizer": moments}


def trained_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Name → unsharded shape (``ds_shape`` under ZeRO-3) of each trained parameter."""
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters() if p.requires_grad}


def shape_difference(saved: Mapping[str, list[int]], current: Mapping[str, list[int]]) -> str:
    """The first parameter whose shape differs between checkpoint and model; empty if all are equal."""
    for name in sorted({*saved, *current}):
        saved_shape, current_shape = saved.get(name, "missing"), current.get(name, "missing")
        if saved_shape != current_shape:
            return f"shape of {name} is {saved_shape} in the checkpoint, {current_shape} in this run's model"
    return ""


def _belongs_to(path: Path, rank: int) -> bool:
    """Whether ``rank`` hashes this file.

    A rank hashes its own shards, which DCP names ``__RANK_N.distcp``. Rank 0 also hashes all files that are not shards.
    """
    owner = path.name.removeprefix("__").partition("_")[0]
    return int(owner) == rank if owner.isdigit() else rank == 0


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = read_json(folder / MANIFEST_FILE)
        _ = manifest["step"], manifest["files"], manifest["shapes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SeatrialError(f"cannot read {folder / MANIFEST_FILE}: {error}") from error
    return manifest


@contextmanager
def _convert_dcp_errors(folder: Path, action: str = "write") -> Iterator[None]:
    """Context manager: converts DCP's errors of all ranks to one SeatrialError.

    If a rank was interrupted, raises KeyboardInterrupt instead. If ``action`` is "write", an error also removes the
    partly written ``folder``.
    """
    try:
        yield
    except (CheckpointException, OSError) as error:
        failures = error.failures if isinstance(error, CheckpointException) else {}
        causes = {rank: cause for rank, (cause, _traceback) in sorted(failures.items())}
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes.values()):
            if action == "write":
                shutil.rmtree(folder, ignore_errors=True)
            raise KeyboardInterrupt from error  # DCP reports a KeyboardInterrupt as an error of its rank
        reasons = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items()) or str(error)
        unchanged = "Earlier checkpoints are" if action == "write" else "The checkpoint is"
        message = f"cannot {action} checkpoint {folder}: {reasons}. {unchanged} unchanged"
        converted = SeatrialError(message)
        has_usage = any(isinstance(cause, disk.DiskFullError) for cause in causes.values())
        if has_usage or any(disk.disk_full_reason(cause, folder) for cause in (error, *causes.values())):
            usage = "" if has_usage else f". {disk.filesystem_usage(folder)}"  # read before the folder is removed
            converted = disk.DiskFullError(f"{message}{usage}. {disk.REMEDY}")
        if action == "write":
            shutil.rmtree(folder, ignore_errors=True)
        raise converted from error
