"""seatrial.diagnose.log_files: the logs of folders, and logs as unpacked streams."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from seatrial.diagnose.log_files import BinaryFileError, log_files, open_log
from seatrial.model import UsageError


def _fill(folder: Path, *names: str) -> None:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("text\n")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("rank10.log", "rank2.log"), ["rank2.log", "rank10.log"]),
        (("slurm-7.out", "train.py", ".git/HEAD"), ["slurm-7.out"]),
        (("jobs/a/slurm.out", "jobs/a/result.json", "report.log"), ["jobs/a/slurm.out"]),
        (
            (
                *("runs/1/run.json", "runs/1/measurements.jsonl", "runs/1/trial.json", "runs/1/junit.xml"),
                *("runs/1/jobs/a/attempt1/rank0.err", "runs/1/jobs/a/attempt1/job.json", "runs/1/data/x.log"),
                *("runs/2/run.json", "runs/2/measurements.jsonl", "runs/2/trial.json.before"),
                *("runs/dmesg.txt", "runs/other/jobs/notes.txt", "runs/other/trial.json"),
            ),
            [
                "runs/dmesg.txt",
                "runs/other/jobs/notes.txt",
                "runs/other/trial.json",
                "runs/1/jobs/a/attempt1/rank0.err",
            ],
        ),
    ],
)
def test_logs_of_a_folder(names: tuple[str, ...], expected: list[str], tmp_path: Path) -> None:
    _fill(tmp_path, *names)
    errors: list[str] = []
    assert [str(file.relative_to(tmp_path)) for file in log_files(tmp_path, errors)] == expected
    assert errors == []


@pytest.mark.parametrize("names", [(), ("run.json", "measurements.jsonl", "trial.json")])
def test_folder_without_logs_is_named(names: tuple[str, ...], tmp_path: Path) -> None:
    _fill(tmp_path, *names)
    errors: list[str] = []
    assert log_files(tmp_path, errors) == []
    assert errors == [f"no logs in {tmp_path}"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_streams_are_unpacked(pack: type[bytes], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(pack(b"a\nb\n"))
    with open_log(log) as (stream, name):
        assert b"".join(iter(lambda: stream.read(3), b"")) == b"a\nb\n"
    assert name == str(log)


def test_truncated_gzip_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log.gz"
    log.write_bytes(gzip.compress(b"text\n" * 1000)[:-12])
    with pytest.raises(UsageError, match="truncated or damaged"), open_log(log) as (stream, _):
        b"".join(iter(lambda: stream.read(1024), b""))


@pytest.mark.parametrize(
    ("data", "in_folder", "binary"),
    [
        (b"\0\0\0\0text of a log\n", False, False),
        (b"\0\0\0\0text of a log\n", True, True),
        (bytes(range(256)), False, True),
        (b"text\n", True, False),
    ],
)
def test_binary_files(data: bytes, in_folder: bool, binary: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(data)
    try:
        with open_log(log, in_folder) as (stream, _):
            assert stream.read(1024) == data
        found = False
    except BinaryFileError:
        found = True
    assert found is binary
