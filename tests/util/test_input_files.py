"""Files of users and nodes: nothing blocks, fills memory or passes unnoticed."""

from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from seatrial.util import input_files
from seatrial.util.input_files import (
    gunzip,
    gzip_lines,
    open_file,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    tail_lines,
    with_limit,
)


def test_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"ü": [1, 2.5]}')
    assert read_json(path) == {"ü": [1, 2.5]}
    assert read_text(path, max_bytes=path.stat().st_size) == path.read_text()
    with pytest.raises(OSError, match="larger than the limit of 3 bytes"):
        read_bytes(path, max_bytes=3)


def test_file_without_a_size_is_read_to_the_limit() -> None:
    """A file of /proc has size 0."""
    assert read_bytes(Path("/proc/self/status"))
    with pytest.raises(OSError, match="larger than the limit"):
        read_bytes(Path("/proc/self/status"), max_bytes=10)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/", "/nowhere", "pipe"])
def test_other_files_are_refused(path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=path):
        open_file(tmp_path / path)


def test_pipe_is_read_on_request(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with open_file(tmp_path / "pipe", pipes=True) as empty:
        assert empty.read() == b""
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with (tmp_path / "pipe").open("wb") as writer, open_file(tmp_path / "pipe", pipes=True) as file:
        writer.write(b"line\n")
        writer.flush()
        assert file.readline() == b"line\n"
    os.close(reader)
    with pytest.raises(OSError, match="not a regular file"):
        open_file(Path("/dev/zero"), pipes=True)


def test_device_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MAX_PIPE_BYTES", 2**20)
    with Path("/dev/zero").open("rb", buffering=0) as file:
        stream = with_limit(cast("BinaryIO", file), "standard input", is_stdin=True)
        assert sum(len(stream.read(2**16)) for _ in range(16)) == 2**20
        with pytest.raises(ValueError, match="standard input: does not end"):
            stream.read(1)


def test_regular_file_has_no_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(input_files, "MAX_PIPE_BYTES", 3)
    (tmp_path / "log").write_bytes(b"x" * 100)
    with (tmp_path / "log").open("rb") as file:
        assert with_limit(file, "standard input", is_stdin=True).read() == b"x" * 100


def test_pipe_gives_what_has_arrived_and_reports_silence_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(input_files, "SILENT_S", 0.2)
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as file, open(write_end, "wb", buffering=0) as writer:
        stream = with_limit(file, "standard input", is_stdin=True)
        writer.write(b"one\n")
        assert stream.read(2**16) == b"one\n"
        assert capsys.readouterr().err == ""
        for text in (b"two\n", b"three\n"):
            timer = threading.Timer(0.3, writer.write, [text])
            timer.start()
            assert stream.read(2**16) == text
            timer.join()
        err = capsys.readouterr().err
        assert (err.count("standard input: 0 MiB so far; still waiting"), len(err.splitlines())) == (1, 1)


def test_named_pipe_needs_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (
        open_file(tmp_path / "pipe", pipes=True) as file,
        pytest.raises(OSError, match="no process writes"),
    ):
        with_limit(file, "pipe", is_stdin=False)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with (tmp_path / "pipe").open("wb", buffering=0) as writer, open_file(tmp_path / "pipe", pipes=True) as file:
        silent = with_limit(file, "pipe", is_stdin=False)
        writer.write(b"first\n")
        assert silent.read(100) == b"first\n"
        writer.write(b"second\n")
        stream = with_limit(file, "pipe", is_stdin=False)
        assert stream.read(100) + stream.read(100) == b"second\n"
    os.close(reader)


@pytest.mark.parametrize(
    "text",
    [
        *("NaN", "[-Infinity]", '{"a": 1e999}', "1" * 21, "9" * 5000, "", "{", b"\xff"),
        *("[" * 100_000, '{"a":' * 100_000, "[" * 102 + "]" * 102),
    ],
)
def test_json_that_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(text)


def test_nesting_up_to_the_limit() -> None:
    assert parse_json("[" * 100 + "]" * 100)
    assert parse_json("[1e3, -5, 18446744073709551615]") == [1000.0, -5, 2**64 - 1]


def test_gunzip(tmp_path: Path) -> None:
    packed = gzip.compress(bytes(1000))
    assert gunzip(packed, 1000) == bytes(1000)
    with pytest.raises(ValueError, match="limit of 999 bytes"):
        gunzip(packed, 999)
    for damaged in (packed[:-9], b"no gzip", packed[:12] + b"\xff\xff" + packed[14:]):
        with pytest.raises(ValueError, match="is truncated or damaged"):
            gunzip(damaged, 1000)


def test_gzip_lines_up_to_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    packed = gzip.compress(b"".join(b"%d\n" % number for number in range(10_000)))
    path.write_bytes(packed)
    assert list(gzip_lines(path))[-1] == b"9999\n"
    path.write_bytes(packed[: len(packed) // 2])
    assert 0 < len(list(gzip_lines(path))) < 10_000


@pytest.mark.parametrize("content", [bytes(2**24), b"\n" * 2**24])
def test_gzip_bomb(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(content))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which may be that of an earlier test: proc(5)
    before = peak_memory_kib()
    with pytest.raises(ValueError, match="expands more than 200 times"):
        for _ in gzip_lines(path):
            pass
    assert peak_memory_kib() - before < 50_000


def peak_memory_kib() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1])


def test_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MAX_LINE_BYTES", 100)
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(bytes(101)))
    with pytest.raises(ValueError, match="line of more than 100 bytes"):
        list(gzip_lines(path))


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a\nb\nc\n", ["b", "c"]),
        (b"a\nb\nc", ["b", "c"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"1%\r50%\r100%\n", ["100%"]),
        (b"\xff\n", ["\ufffd"]),
        (b"\n\n", ["", ""]),
    ],
)
def test_last_lines(content: bytes, lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    assert tail_lines(path, 2, 1000) == lines


def test_last_lines_of_a_huge_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse
        file.seek(2**40)
        file.write(b"\nlast\n")
    assert tail_lines(path, 10, 100) == ["last"]
    path.write_bytes(b"x" * 1000)
    assert tail_lines(path, 10, 100) == ["x" * 100]


def test_last_lines_of_a_file_that_blocks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match="not a regular file"):
        tail_lines(tmp_path / "log", 10, 100)
