from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.discover import filesystem
from seatrial.train import page_cache

SIZE = 64 * 4096


def test_a_written_file_leaves_the_page_cache(tmp_path: Path) -> None:
    if (kind := filesystem.filesystem_type(tmp_path)) in ("tmpfs", "ramfs", "overlay"):
        pytest.skip(f"{kind} keeps the pages")
    path = tmp_path / "data"
    path.write_bytes(os.urandom(SIZE))
    assert page_cache.cached_share(path) == 1.0
    page_cache.evict(path)
    assert page_cache.cached_share(path) < 0.5
    path.read_bytes()
    assert page_cache.cached_share(path) == 1.0


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a tmpfs")
def test_tmpfs_keeps_all_pages() -> None:
    path = Path(f"/dev/shm/seatrial-test-{os.getpid()}")
    try:
        path.write_bytes(bytes(SIZE))
        page_cache.evict(path)
        assert page_cache.cached_share(path) == 1.0
    finally:
        path.unlink()


def test_unreadable_and_empty_files(tmp_path: Path) -> None:
    page_cache.evict(tmp_path / "absent")
    assert page_cache.cached_share(tmp_path / "absent") == 1.0
    (tmp_path / "empty").touch()
    assert page_cache.cached_share(tmp_path / "empty") == 0.0
