"""Detection of full disks, and the error message."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import socket
from pathlib import Path

import pytest
from safetensors import SafetensorError

from seatrial.train import disk
from seatrial.train.disk import atomic_write_folder
from tests.checks.host import mounts

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NO_SPACE, "[Errno 28] No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "[Errno 122] Disk quota exceeded"),
        (OSError(errno.EFBIG, "File too large"), "[Errno 27] File too large"),
        (OSError("266240 requested and 249824 written"), "266240 requested and 249824 written"),  # numpy's
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "Error while serializing: I/O error: No space left on device (os error 28)",
        ),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534\nframe #0"),
            "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534",
        ),
        (
            RuntimeError("basic_ios::clear: iostream error"),  # torch.save's with no free byte
            "basic_ios::clear: iostream error",
        ),
        (
            Exception("No space left on device (os error 28)"),  # tokenizers'
            "No space left on device (os error 28)",
        ),
        (Exception("the row 'No space left on device (os error 28)' is invalid"), None),
        (ValueError("No space left on device (os error 28)"), None),
        (chained(RuntimeError("a library's"), NO_SPACE), "[Errno 28] No space left on device"),
        (
            chained(NO_SPACE, FileNotFoundError(errno.ENOENT, "nothing in the cache")),
            "[Errno 28] No space left on device",
        ),
        (chained(RuntimeError("inline_container.cc:672] . unexpected pos 64 vs 0"), BROKEN), None),
        (BROKEN, None),  # a fault of the disk
        (PermissionError(errno.EACCES, "Permission denied"), None),
        (SafetensorError("Error while deserializing header: incomplete metadata"), None),
        # NCCL's for /dev/shm: a fault of the node
        (RuntimeError("ncclSystemError: Error while creating shared memory: No space left on device"), None),
    ],
)
def test_disk_full_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, reason: str | None
) -> None:
    monkeypatch.setattr(disk, "_is_full", lambda path: path == tmp_path)
    assert disk.disk_full_reason(error, tmp_path) == reason


SHORT_WRITES = [
    OSError("266240 requested and 249824 written"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
    RuntimeError("basic_ios::clear: iostream error"),
]


@mounts.needs_mount
@pytest.mark.parametrize("error", SHORT_WRITES, ids=str)
def test_a_short_write_on_a_full_filesystem_is_disk_full(error: Exception, tmp_path: Path) -> None:
    assert disk.disk_full_error(error, tmp_path / "not" / "yet") is None  # there is space: a broken disk
    with mounts.tmpfs(tmp_path / "small", "size=64k") as small:
        raised = disk.disk_full_error(error, small / "not" / "yet")
        assert str(raised).startswith(f"cannot write {small}/not/yet: {error}. On ")
        assert not any(small.iterdir())


def test_a_short_write_with_a_file_size_limit_is_disk_full(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, limit[1]))
    try:
        assert disk.disk_full_error(SHORT_WRITES[0], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_disk_full_errors_can_be_pickled() -> None:
    raised = disk.disk_full_error(NO_SPACE, Path("/proc/self"), "cannot save")
    assert str(pickle.loads(pickle.dumps(raised))) == str(raised)
    assert str(raised).startswith(f"cannot save: {NO_SPACE}. On {socket.gethostname()}, /proc (proc) has ")
    assert str(raised).endswith(f". {disk.REMEDY}")


def test_the_message_names_the_file_of_the_os_error(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x/y")
    assert str(disk.disk_full_error(error, tmp_path)).startswith(f"cannot write /dev/shm/x/y: {error}. On ")


@mounts.needs_mount
def test_filesystem_usage_of_a_small_tmpfs(tmp_path: Path) -> None:
    with mounts.tmpfs(tmp_path / "small", "size=64k,nr_inodes=4") as small:
        assert disk.filesystem_usage(small / "not" / "yet").endswith(f", {small} (tmpfs) has 64 KiB, 64 KiB of it free")
        with (
            pytest.raises(disk.DiskFullError, match=r"\(tmpfs\) has 64 KiB, 0 B of it free"),
            atomic_write_folder(small / "a") as folder,
        ):
            (folder / "b").write_bytes(bytes(2**17))
        assert not any(small.iterdir())
        for number in range(3):
            (small / str(number)).touch()
        assert disk.filesystem_usage(small).endswith("64 KiB of it free; no inode is free")


def test_other_write_errors_are_unchanged(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output"), atomic_write_folder(tmp_path / "a"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
