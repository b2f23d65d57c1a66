from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench import storage
from seatrial.bench.storage import SharedFolder

MIB = 2**20


@pytest.mark.parametrize("size", [4096, MIB, 9 * MIB])
def test_stream_is_written_and_read_completely(tmp_path: Path, size: int) -> None:
    path = tmp_path / "large"
    written, read = storage.write_stream(path, size), storage.read_stream(path, size)
    assert path.stat().st_size == size
    assert written.seconds > 0
    assert read.seconds > 0
    content = path.read_bytes()
    assert content[:4096] != bytes(4096)
    assert size <= storage.CHUNK_BYTES or content[storage.CHUNK_BYTES : storage.CHUNK_BYTES + 64] == content[:64]


def test_short_file_is_an_error(tmp_path: Path) -> None:
    storage.write_stream(tmp_path / "short", MIB)
    with pytest.raises(OSError, match="1048576 of 2097152 bytes missing"):
        storage.read_stream(tmp_path / "short", 2 * MIB)


def test_page_cache_is_used_and_reported_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, advised = os.open, list[int]()

    def refuse(path: Any, flags: int, *arguments: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, length, advice: advised.append(advice))
    assert not storage.write_stream(tmp_path / "x", MIB).direct
    assert not storage.read_stream(tmp_path / "x", MIB).direct
    assert advised == [os.POSIX_FADV_DONTNEED]


def test_other_errors_of_open_are_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read_stream(tmp_path / "absent", MIB)


def test_small_files_are_created_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    assert storage.create_small_files(folder, 5) > 0
    assert [path.stat().st_size for path in folder.iterdir()] == [storage.SMALL_FILE_BYTES] * 5
    assert storage.time_small_files(Path.stat, folder, 5) > 0
    assert storage.time_small_files(Path.unlink, folder, 5) > 0
    assert list(folder.iterdir()) == []


def test_stat_of_a_missing_file_is_an_error(tmp_path: Path) -> None:
    storage.create_small_files(tmp_path / "small", 2)
    with pytest.raises(FileNotFoundError):
        storage.time_small_files(Path.stat, tmp_path / "small", 3)


def test_free_space_is_required(tmp_path: Path) -> None:
    storage.require_free_space(tmp_path, 1)
    with pytest.raises(OSError, match="1048576 TiB") as raised:
        storage.require_free_space(tmp_path, 2**60)
    assert raised.value.errno == errno.ENOSPC


def test_paths_of_each_participant(tmp_path: Path) -> None:
    folder = SharedFolder(("a", "b", "c"), 2, True, tmp_path)
    assert [path.name for path in folder.files("x")] == ["x.0", "x.1", "x.2"]
    assert (folder.file("x").name, folder.next_file("x").name) == ("x.2", "x.0")
    assert folder.join_names([0, 2]) == "a, c"
