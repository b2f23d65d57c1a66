"""Which errors are of a disk without room, and what is said of it."""

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

NONE = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NONE, "[Errno 28] No space left on device"),
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
            RuntimeError("basic_ios::clear: iostream error"),  # torch.save's, where not a byte was free
            "basic_ios::clear: iostream error",
        ),
        (
            Exception("No space left on device (os error 28)"),  # tokenizers'
            "No space left on device (os error 28)",
        ),
        (Exception("the row 'No space left on device (os error 28)' is none"), None),
        (ValueError("No space left on device (os error 28)"), None),
        (chained(RuntimeError("a library's"), NONE), "[Errno 28] No space left on device"),
        (chained(NONE, FileNotFoundError(errno.ENOENT, "nothing in the cache")), "[Errno 28] No space left on device"),
        (chained(RuntimeError("inline_container.cc:672] . unexpected pos 64 vs 0"), BROKEN), None),
        (BROKEN, None),  # a finding
        (PermissionError(errno.EACCES, "Permission denied"), None),
        (SafetensorError("Error while deserializing header: incomplete metadata"), None),
        # NCCL's of /dev/shm: a finding, too
        (RuntimeError("ncclSystemError: Error while creating shared memory: No space left on device"), None),
    ],
)
def test_want_of_room_is_told_from_all_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, said: str | None
) -> None:
    monkeypatch.setattr(disk, "_is_full", lambda context: context == tmp_path)
    assert disk.disk_full_reason(error, tmp_path) == said


CUT_SHORT = [
    OSError("266240 requested and 249824 written"),
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
    RuntimeError("basic_ios::clear: iostream error"),
]


@mounts.needs_mount
@pytest.mark.parametrize("error", CUT_SHORT, ids=str)
def test_a_write_that_was_cut_short_is_for_want_of_room_where_nothing_more_fits(
    error: Exception, tmp_path: Path
) -> None:
    assert disk.disk_full_error(error, tmp_path / "not" / "yet") is None  # a broken disk's, then
    with mounts.tmpfs(tmp_path / "small", "size=64k") as small:
        told = disk.disk_full_error(error, small / "not" / "yet")
        assert str(told).startswith(f"cannot write {small}/not/yet: {error}. On ")
        assert not any(small.iterdir())


def test_where_files_have_a_limit_of_their_own_it_may_be_that(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, limit[1]))
    try:
        assert disk.disk_full_error(CUT_SHORT[0], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_what_is_said_reaches_the_other_ranks_whole() -> None:
    told = disk.disk_full_error(NONE, Path("/proc/self"), "cannot keep it")
    assert str(pickle.loads(pickle.dumps(told))) == str(told)
    assert str(told).startswith(f"cannot keep it: {NONE}. On {socket.gethostname()}, /proc (proc) has ")
    assert str(told).endswith(f". {disk.REMEDY}")


def test_the_file_that_the_system_names_is_the_one_that_is_told(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x/y")
    assert str(disk.disk_full_error(error, tmp_path)).startswith(f"cannot write /dev/shm/x/y: {error}. On ")


@mounts.needs_mount
def test_a_real_one_is_named_with_its_size_and_what_is_free(tmp_path: Path) -> None:
    with mounts.tmpfs(tmp_path / "small", "size=64k,nr_inodes=4") as small:
        assert disk.filesystem_usage(small / "not" / "yet").endswith(f", {small} (tmpfs) has 64KiB, 64KiB of it free")
        with (
            pytest.raises(disk.DiskFullError, match=r"\(tmpfs\) has 64KiB, 0B of it free"),
            atomic_write_folder(small / "a") as it,
        ):
            (it / "b").write_bytes(bytes(2**17))
        assert not any(small.iterdir())
        for number in range(3):
            (small / str(number)).touch()
        assert disk.filesystem_usage(small).endswith("64KiB of it free; no inode is free")


def test_a_folder_that_cannot_be_written_for_another_reason_keeps_its_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output"), atomic_write_folder(tmp_path / "a"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
