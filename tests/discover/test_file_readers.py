from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest

from seatrial.discover import file_readers
from seatrial.discover.file_readers import FieldReader


def test_an_unreadable_field_is_none_and_its_error_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "speed").write_text("fast\n")
    reader = FieldReader()
    assert reader("mtu", lambda: file_readers.read_number(tmp_path / "mtu")) is None
    assert reader("loop", lambda: file_readers.read_line(tmp_path / "loop")) is None
    assert reader("speed", lambda: file_readers.read_number(tmp_path / "speed")) is None
    assert reader("folder", lambda: file_readers.read_line(tmp_path)) is None
    assert reader.unreadable == {
        "mtu": f"{tmp_path}/mtu: No such file or directory",
        "loop": f"{tmp_path}/loop: Too many levels of symbolic links",
        "speed": f"{tmp_path}/speed: expected an integer, read 'fast'",
        "folder": f"{tmp_path}: Is a directory",
    }


def test_other_exceptions_are_raised() -> None:
    with pytest.raises(KeyError):
        FieldReader()("field", lambda: os.environ["NO_SUCH_VARIABLE"])


def test_unprintable_bytes_become_escapes(tmp_path: Path) -> None:
    (tmp_path / "value").write_bytes(b"\xff\x1b[31mred\n")
    assert file_readers.read_line(tmp_path / "value") == r"\xff\x1b[31mred"


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="empty is empty"):
        file_readers.read_line(tmp_path / "empty")


@pytest.mark.parametrize(
    ("numbers", "text"), [({0}, "0"), ({3, 1, 2, 0, 8}, "0-3,8"), ((1, 3, 5, 6, 6), "1,3,5-6"), (set(), "")]
)
def test_id_list_has_the_format_of_the_kernel(numbers: Collection[int], text: str) -> None:
    assert file_readers.id_list(numbers) == text


def test_parse_id_list() -> None:
    assert file_readers.parse_id_list("0-2,8,10-11") == [0, 1, 2, 8, 10, 11]


@pytest.mark.parametrize("garbage", ["", "all", "0-", "1,,2", "0-99999999999"])
def test_parse_id_list_rejects_other_formats(garbage: str) -> None:
    with pytest.raises(ValueError, match="expected a list such as"):
        file_readers.parse_id_list(garbage)
