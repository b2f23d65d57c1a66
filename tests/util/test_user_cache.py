from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.util import user_cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "seatrial"


def test_a_result_is_read_under_its_key_and_replaces_earlier_ones(folder: Path) -> None:
    assert user_cache.read("a", "1") is None
    user_cache.write("a", "1", b"first")
    user_cache.write("b", "1", b"")
    assert (user_cache.read("a", "1"), user_cache.read("b", "1"), user_cache.read("a", "2")) == (b"first", b"", None)
    user_cache.write("a", "2", b"second")
    assert (user_cache.read("a", "1"), user_cache.read("a", "2")) == (None, b"second")
    assert sorted(os.listdir(folder)) == ["a-2", "b-1"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_keys_depend_on_each_input() -> None:
    assert len({user_cache.key(*inputs) for inputs in ([b"ab"], [b"a", b"b"], [b"b", b"a"], [b"ab", b""], [])}) == 5


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 200, None])
def test_a_damaged_file_is_ignored_and_replaced(folder: Path, damage: bytes | None) -> None:
    user_cache.write("a", "1", b"content")
    file = folder / "a-1"
    file.write_bytes(file.read_bytes()[:-1] if damage is None else damage)
    assert user_cache.read("a", "1") is None
    user_cache.write("a", "1", b"content")
    assert user_cache.read("a", "1") == b"content"


def test_files_that_another_user_could_have_written_are_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_cache.write("a", "1", b"content")
    (folder / "a-1").chmod(0o620)
    assert user_cache.read("a", "1") is None
    (folder / "a-1").chmod(0o600)
    assert user_cache.read("a", "1") == b"content"
    (folder / "a-1").rename(folder / "target")
    (folder / "a-1").symlink_to("target")
    assert user_cache.read("a", "1") is None
    (folder / "target").rename(folder / "a-1")
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    assert user_cache.read("a", "1") is None


def test_nothing_is_written_into_the_folder_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as HOME of the user who called sudo."""
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    user_cache.write("a", "1", b"content")
    assert not folder.exists()


@pytest.mark.parametrize("value", ["relative", "/dev/null", "/proc/nosuch"])
def test_a_folder_that_cannot_be_used_is_no_error(value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    user_cache.write("a", "1", b"content")
    assert user_cache.read("a", "1") is None
    assert not any(tmp_path.iterdir())


def test_a_relative_folder_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The current folder may hold files that another user has written, such as an unpacked archive: they are code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    user_cache.write("a", "1", b"content")
    monkeypatch.setenv("XDG_CACHE_HOME", ".")
    assert user_cache.read("a", "1") is None
