from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from seatrial.util.journal import Journal, JournalReader, lock, read, record_line

PATH = Path("runs/today")
A = record_line({"a": 1})


def test_appended_records_are_read_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "j.jsonl")
    journal.append({"a": 1})
    journal.append({"b": "ü"})
    assert read(journal.path) == ([{"a": 1}, {"b": "ü"}], [])


def test_truncated_line_is_reported_and_ignored(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text(A + record_line({"b": 2}) + '{"c": [1, 2')
    records, warnings = read(path)
    assert records == [{"a": 1}, {"b": 2}]
    assert len(warnings) == 1
    assert f"{path}:3" in warnings[0]


def test_a_changed_byte_or_a_cut_line_is_no_record(tmp_path: Path) -> None:
    """Also where the line remains valid JSON."""
    path = tmp_path / "j.jsonl"
    written = record_line({"measurement": {"value": 1.5, "sha256": "of something else"}, "time": 2.0}).encode()
    path.write_bytes(written)
    assert read(path) == ([{"measurement": {"value": 1.5, "sha256": "of something else"}, "time": 2.0}], [])
    digest_key = written.rindex(b', "sha256"')
    changed = [written[:at] + b"%c" % (written[at] ^ 1) + written[at + 1 :] for at in range(len(written) - 1)]
    for damaged in (*changed, written[:digest_key] + b"}\n", written.replace(b", ", b",  ", 1), written[:-4] + b"\n"):
        path.write_bytes(damaged)
        assert read(path)[0] == [], damaged
        reader = JournalReader(path)
        assert (reader.poll(), bool(reader.warnings)) == ([], True)


def test_append_after_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text(A + '{"cut')
    Journal(path).append({"d": 4})
    assert read(path)[0] == [{"a": 1}, {"d": 4}]


def test_invalid_bytes_give_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n[1]\n" + A.encode())
    records, warnings = read(path)
    assert records == [{"a": 1}]
    assert len(warnings) == 2


def test_deeply_nested_line_gives_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b"[" * 100_000 + b"\n" + A.encode())
    records, warnings = read(path)
    assert (records, len(warnings)) == ([{"a": 1}], 1)
    assert len(warnings[0]) < 300


def test_journal_reader_warns_once_and_continues(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'[1]\n{"bytes": "\xff"}\n' + b"[" * 100_000 + b"\n" + A.encode())
    reader = JournalReader(path)
    assert reader.poll() == [{"a": 1}]
    assert reader.poll() == []
    assert len(reader.warnings) == 3


def test_directory_and_pipe_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        assert JournalReader(path).poll() == []
        assert read(path) == ([], [])


def test_journal_reader_waits_for_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    reader = JournalReader(path)
    assert reader.poll() == []
    path.write_text(A + record_line({"b": 2})[:40])
    assert reader.poll() == [{"a": 1}]
    with path.open("a") as file:
        file.write(record_line({"b": 2})[40:])
    assert reader.poll() == [{"b": 2}]
    assert reader.poll() == []


def test_lock_is_exclusive_until_close(tmp_path: Path) -> None:
    with (tmp_path / "j").open("a") as first, (tmp_path / "j").open("a") as second:
        assert (lock(first.fileno(), PATH), lock(second.fileno(), PATH)) == (True, False)
        first.close()
        assert lock(second.fileno(), PATH)


def test_file_system_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("seatrial.util.journal.fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, "")))
    with (tmp_path / "j").open("a") as file:
        assert lock(file.fileno(), PATH)
    assert "runs/today: the file system has no locks" in capsys.readouterr().err


def test_failed_lock_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.util.journal.fcntl.flock", Mock(side_effect=OSError(errno.EIO, "")))
    with (tmp_path / "j").open("a") as file, pytest.raises(OSError, match="Errno 5"):
        lock(file.fileno(), PATH)


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999"])
def test_number_that_is_not_finite_gives_a_warning(text: str, tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text(f'{{"a": {text}}}\n' + record_line({"b": 1}))
    records, (warning,) = read(path)
    assert records == [{"b": 1}]
    assert f"number not finite: {text}" in warning
    reader = JournalReader(path)
    assert reader.poll() == [{"b": 1}]
    assert f"number not finite: {text}" in reader.warnings[0]


def test_reader_skips_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.util.journal.MAX_LINE_BYTES", 100)
    path = tmp_path / "j.jsonl"
    path.write_bytes(bytes(250) + b"\n" + A.encode())
    reader = JournalReader(path)
    records = [record for _ in range(4) for record in reader.poll()]
    assert records == [{"a": 1}]
    assert reader.warnings
