from __future__ import annotations

import os
from pathlib import Path
from threading import Event

import pytest

from seatrial.discover import filesystem
from tests.discover import trees


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    trees.node(tmp_path)
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.delenv("TMPDIR", raising=False)
    return tmp_path


def test_real_filesystems_are_shown_and_the_others_counted(root: Path) -> None:
    facts = filesystem.read(root)
    assert [(mount.target, mount.type) for mount in facts.filesystems] == [
        ("/", "ext4"),
        ("/dev/shm", "tmpfs"),
        ("/mnt/my data", "lustre"),
        ("/opt/b", "xfs"),
        ("/scratch", "xfs"),
        ("/shared", "nfs4"),
    ]
    assert facts.omitted_pseudo == 8
    assert facts.omitted_duplicates == 1  # /scratch/bind/a: the same disk with the same options; /opt/b is read-only
    assert facts.unreadable == {}


def test_options_of_mount_and_filesystem_are_joined(root: Path) -> None:
    options = {mount.target: mount.options.split(",") for mount in filesystem.read(root).filesystems}
    assert {"rw", "vers=4.2", "nconnect=16"} <= set(options["/shared"])
    assert "ro" in options["/opt/b"]
    assert "rw" not in options["/opt/b"]


def test_the_upper_of_two_mounts_counts() -> None:
    lower = "25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw,size=64k\n"
    upper = "30 25 0:27 / /dev/shm rw - tmpfs tmpfs rw,size=16g\n"
    (entry,) = filesystem.mountinfo(lower + upper)
    assert entry.options == "rw,size=16g"


@pytest.mark.parametrize("garbage", ["x", "1 2 0:1 / / rw ext4 /dev/sda rw", "1 2 0:1 / / rw - ext4"])
def test_a_line_that_is_no_mount_is_reported(root: Path, garbage: str) -> None:
    trees.write(root, {"proc/self/mountinfo": trees.MOUNTINFO + garbage + "\n"})
    facts = filesystem.read(root)
    assert facts.filesystems == ()
    assert "expected a mount, found" in facts.unreadable["filesystems"]


def test_a_server_that_does_not_answer_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, ask = Event(), filesystem.usage

    def usage(root: Path, path: str) -> filesystem.Usage:
        if path == "/shared":
            end.wait(30)
        return ask(root, path)

    monkeypatch.setattr(filesystem, "usage", usage)
    monkeypatch.setattr(filesystem, "_ANSWER_S", 1.0)
    facts = filesystem.read(root)
    end.set()
    (hung,) = [mount for mount in facts.filesystems if not mount.responding]
    assert (hung.target, hung.size_bytes) == ("/shared", None)
    assert hung.unreadable == {"size_bytes": "no answer within 1 s"}


def test_free_is_what_an_ordinary_user_may_fill(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = os.statvfs_result((4096, 4096, 1000, 500, 450, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: blocks)
    usage = filesystem.usage(root, "/tmp")
    assert (usage.size, usage.free) == (1000 * 4096, 450 * 4096)


def test_a_folder_that_is_missing_has_no_room(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "dev/shm").rmdir()
    monkeypatch.setenv("HOME", "/nonexistent")
    facts = filesystem.read(root)
    assert (facts.shm.exists, facts.shm.size_bytes, facts.shm.free_bytes) == (False, 0, 0)
    assert (facts.home.exists, facts.home.writable) == (False, False)


def test_the_filesystem_of_a_folder_is_found_through_links(root: Path) -> None:
    (root / "tmp").rmdir()
    (root / "tmp").symlink_to(root / "scratch")
    facts = filesystem.read(root)
    assert (facts.tmp.path, facts.tmp.type) == ("/tmp", "xfs")
    assert (facts.home.type, facts.root.type, facts.shm.type) == ("ext4", "ext4", "tmpfs")


def test_tmpdir_is_the_temporary_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/shared/me")
    assert (filesystem.read(root).tmp.path, filesystem.read(root).tmp.exists) == ("/shared/me", False)


def test_this_machine() -> None:
    facts = filesystem.read()
    found = os.statvfs("/")
    assert facts.root.size_bytes == found.f_blocks * found.f_frsize
    assert "/" in [mount.target for mount in facts.filesystems]
    assert all(mount.type not in ("proc", "sysfs") for mount in facts.filesystems)
