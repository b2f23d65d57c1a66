from __future__ import annotations

import os
from pathlib import Path
from threading import Event

import pytest

from seatrial.discover import filesystem
from tests.discover import trees
from tests.processes import with_enough_time


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    trees.node(tmp_path)
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.delenv("TMPDIR", raising=False)
    return tmp_path


def test_filesystems_with_storage_are_reported_and_others_counted(root: Path) -> None:
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
    assert facts.omitted_duplicates == 1  # /scratch/bind/a: same disk and options; /opt/b is read-only
    assert facts.unreadable == {}


def test_options_of_mount_and_filesystem_are_merged(root: Path) -> None:
    options = {mount.target: mount.options.split(",") for mount in filesystem.read(root).filesystems}
    assert {"rw", "vers=4.2", "nconnect=16"} <= set(options["/shared"])
    assert "ro" in options["/opt/b"]
    assert "rw" not in options["/opt/b"]


def test_the_later_mount_hides_the_earlier_one() -> None:
    lower = "25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw,size=64k\n"
    upper = "30 25 0:27 / /dev/shm rw - tmpfs tmpfs rw,size=16g\n"
    (entry,) = filesystem.mountinfo(lower + upper)
    assert entry.options == "rw,size=16g"


@pytest.mark.parametrize("garbage", ["x", "1 2 0:1 / / rw ext4 /dev/sda rw", "1 2 0:1 / / rw - ext4"])
def test_a_malformed_line_is_reported(root: Path, garbage: str) -> None:
    trees.write(root, {"proc/self/mountinfo": trees.MOUNTINFO + garbage + "\n"})
    facts = filesystem.read(root)
    assert facts.filesystems == ()
    assert "/proc/self/mountinfo: expected a mount" in facts.unreadable["filesystems"]


def test_a_mount_that_does_not_respond(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine needs more than a second for the other mounts."""
    end, real_usage = Event(), filesystem.usage

    def usage(root: Path, path: str) -> filesystem.Usage:
        if path == "/shared":
            end.wait(300)
        return real_usage(root, path)

    monkeypatch.setattr(filesystem, "usage", usage)

    def hung_within(seconds: float) -> list[filesystem.Mount]:
        monkeypatch.setattr(filesystem, "_RESPONSE_TIMEOUT_S", seconds)
        return [mount for mount in filesystem.read(root).filesystems if not mount.responding]

    (hung,) = with_enough_time(hung_within, lambda hung: len(hung) == 1, 1)
    end.set()
    assert (hung.target, hung.size_bytes) == ("/shared", None)
    assert hung.unreadable["size_bytes"].startswith("no response within ")


def test_free_space_is_that_of_an_ordinary_user(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = os.statvfs_result((4096, 4096, 1000, 500, 450, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: blocks)
    usage = filesystem.usage(root, "/tmp")
    assert (usage.size, usage.free) == (1000 * 4096, 450 * 4096)


def test_a_missing_folder_has_no_space(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "dev/shm").rmdir()
    monkeypatch.setenv("HOME", "/nonexistent")
    facts = filesystem.read(root)
    assert (facts.shm.exists, facts.shm.size_bytes, facts.shm.free_bytes) == (False, 0, 0)
    assert (facts.home.exists, facts.home.writable) == (False, False)


def test_the_filesystem_type_is_resolved_through_symbolic_links(root: Path) -> None:
    (root / "tmp").rmdir()
    (root / "tmp").symlink_to(root / "scratch")
    facts = filesystem.read(root)
    assert (facts.tmp.path, facts.tmp.type) == ("/tmp", "xfs")
    assert (facts.home.type, facts.root.type, facts.shm.type) == ("ext4", "ext4", "tmpfs")


def test_the_filesystem_type_of_a_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/self")
    assert filesystem.filesystem_type(Path("/proc")) == filesystem.filesystem_type(tmp_path / "link") == "proc"


def test_tmpdir_is_the_temporary_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/shared/me")
    assert (filesystem.read(root).tmp.path, filesystem.read(root).tmp.exists) == ("/shared/me", False)


def test_this_machine() -> None:
    facts = filesystem.read()
    stat = os.statvfs("/")
    assert facts.root.size_bytes == stat.f_blocks * stat.f_frsize
    assert "/" in [mount.target for mount in facts.filesystems]
    assert all(mount.type not in ("proc", "sysfs") for mount in facts.filesystems)
