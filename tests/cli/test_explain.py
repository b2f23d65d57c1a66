"""The command explain: files, folders, pipes, gzip, growing logs, and what cannot be read."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from seatrial.util import input_files
from tests.processes import call, until

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def test_explain_names_cause_and_fix(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("fine\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    code, out, _ = call("explain", log)
    assert code == 0
    assert "GPU out of memory" in out
    assert "nvidia-smi" in out
    code, out, _ = call("explain", _empty(tmp_path))
    assert (code, "No failure found" in out) == (4, True)
    (tmp_path / "run" / "jobs").mkdir(parents=True)
    log.rename(tmp_path / "run" / "jobs" / "rank0.log")
    assert "GPU out of memory" in call("explain", tmp_path / "run")[1]
    piped = _piped("-")
    assert "Xid 79" in piped
    assert "; standard input:1; " in piped
    assert piped.replace("standard input", "/dev/stdin") == _piped("/dev/stdin")
    for name in (tmp_path / "nosuch.log", "/proc/self/mem"):
        code, _, err = call("explain", name)
        assert (code, f"cannot read {name}: " in err, "Traceback" in err) == (2, True, False)
    closed = ["sh", "-c", 'exec "$0" -m seatrial explain - <&-', sys.executable]
    done = subprocess.run(closed, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "seatrial: standard input is closed\n")


def _piped(name: str) -> str:
    command = [sys.executable, "-m", "seatrial", "explain", name]
    text = "NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.\n"
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=60).stdout


def _empty(folder: Path) -> Path:
    path = folder / "empty.log"
    path.touch()
    return path


def test_folder_and_gzip_are_read(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "messages.1.gz").write_bytes(gzip.compress(b"x\n" * 9 + OOM.encode()))
    (tmp_path / "notes").write_bytes(b"\x00\xff\n")
    code, out, _ = call("explain", tmp_path, "--json")
    (finding,) = json.loads(out)
    assert (code, finding["source"]) == (0, f"{tmp_path}/sub/messages.1.gz:10")


@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(b"0" * 2**24, mtime=0)[:-100],
        gzip.compress(b"x" * 99, mtime=0)[:-9] + b"\0" * 9,
        b"\x1f\x8b\x08" + b"\xff" * 40,
    ],
)
def test_damaged_log_is_named_and_the_rest_is_read(packed: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(packed)
    (tmp_path / "b.log").write_text(OOM)
    code, out, err = call("explain", tmp_path)
    assert (code, "GPU out of memory" in out) == (0, True)
    assert (f"{tmp_path}/a.gz" in err, len(err.splitlines())) == (True, 1)
    assert call("explain", tmp_path / "a.gz")[0] == 2


def test_unreadable_paths_do_not_hide_what_the_others_show(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.log").write_text(OOM)
    code, out, err = call("explain", tmp_path / "empty", tmp_path / "nosuch.log", tmp_path / "x.log")
    assert (code, "GPU out of memory" in out, len(err.splitlines())) == (0, True, 2)
    assert call("explain", tmp_path / "empty")[0] == 2


def test_gzip_bomb_is_read_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "LOG_ALLOWANCE", 2**22)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"0" * 2**24))
    (tmp_path / "x.log").write_text(OOM)
    code, out, err = call("explain", tmp_path)
    assert (code, "GPU out of memory" in out) == (0, True)
    assert f"{tmp_path}/bomb.gz: expands more than 200 times; read up to there" in err


def open_files(process: subprocess.Popen[str], folder: Path) -> list[str]:
    paths = [file.path for file in psutil.Process(process.pid).open_files()]
    return [path for path in paths if path.startswith(str(folder))]


def test_follow_prints_a_failure_when_it_is_written(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1\n")
    command = [sys.executable, "-m", "seatrial", "explain", "--follow", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, log.open("a") as writer:
        until(lambda: str(log) in open_files(process, tmp_path))
        writer.write(OOM[:20])
        writer.flush()
        time.sleep(1)
        writer.write(OOM[20:])
        writer.flush()
        assert process.stdout
        assert "GPU out of memory" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


def test_follow_needs_one_log(tmp_path: Path) -> None:
    for arguments in (("a", "b"), (tmp_path,), ("a", "--json")):
        assert call("explain", "--follow", *arguments)[0] == 2


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (gzip.compress(b"x\n" * 9 + OOM.encode(), mtime=0), 0, "standard input:10"),
        (gzip.compress(b"fine\n" * 99, mtime=0)[:-20], 2, "the gzip data is truncated or damaged"),
        (b"", 4, "No failure found"),
    ],
)
def test_standard_input(data: bytes, code: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, data)
    os.close(write_end)
    with open(read_end) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        exit_code, out, err = call("explain", "-")
    assert (exit_code, message in out + err) == (code, True)


def test_files_of_a_folder_that_are_no_logs(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00" * 600 + OOM.encode())
    (tmp_path / "train.py").write_text(f"# {OOM}")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "log").write_text(OOM)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.log").symlink_to(tmp_path / "nosuch")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "slurm-7.out").write_text("fine\n" + OOM)
    code, out, err = call("explain", tmp_path, "--json")
    assert (code, [finding["source"] for finding in json.loads(out)]) == (0, [f"{tmp_path}/slurm-7.out:2"])
    assert f"binary files that are not read: 1, such as {tmp_path}/model.safetensors" in err
    assert f"cannot read {tmp_path}/gone.log: No such file" in err
    code, _, err = call("explain", tmp_path / "model.safetensors")
    assert (code, "binary files that are not read" in err) == (2, True)


@pytest.mark.parametrize(
    ("head", "command"),
    [
        (b"\x28\xb5\x2f\xfd", "zstd -dc"),
        (b"\xfd7zXZ\x00", "xz -dc"),
        (b"BZh91AY&SY", "bzip2 -dc"),
        (b"LPKSHHRH", "journalctl -o short-iso-precise --file"),
        ("CUDA out of memory\n".encode("utf-16"), "iconv -f UTF-16"),
    ],
)
def test_other_formats_are_named_with_the_command_that_unpacks_them(head: bytes, command: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(head)
    code, _, err = call("explain", tmp_path / "x")
    assert (code, command in err, len(err.splitlines())) == (2, True, 1)


def test_devices_and_folders_without_permission(tmp_path: Path) -> None:
    code, _, err = call("explain", "/dev/zero")
    assert (code, "not a regular file" in err) == (2, True)
    (tmp_path / "closed").mkdir(mode=0)
    (tmp_path / "x.log").write_text(OOM)
    try:
        code, out, err = call("explain", tmp_path)
        assert (code, "GPU out of memory" in out) == (0, True)
        assert os.geteuid() == 0 or f"cannot read {tmp_path}/closed: Permission denied" in err
    finally:
        (tmp_path / "closed").chmod(0o700)


def test_logs_of_ranks_are_ordered_by_time_and_rank(tmp_path: Path) -> None:
    for rank, message in ((10, "Read-only file system"), (2, "Too many open files")):
        (tmp_path / f"rank{rank}.log").write_text(f"2026-11-23T05:56:51Z start\n{message}\n")
    (tmp_path / "dmesg.txt").write_text("[Mon Nov 23 05:56:50 2026] NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n")
    findings = json.loads(call("explain", tmp_path, "--json")[1])
    assert [finding["subject"] for finding in findings] == ["PCI 0000:3b:00", "rank 2", "rank 10"]
    assert "(rank 2; " in call("explain", tmp_path)[1]


def test_escape_sequences_of_a_log_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_bytes(b"\x1b]0;title\x07\x9b31mCUDA out of memory\x1b[2J\n")
    out = call("explain", tmp_path / "x.log")[1]
    assert "CUDA out of memory" in out
    assert not {"\x1b", "\x07", "\x9b"} & set(out)


def test_follow_reads_the_log_that_replaced_a_rotated_one(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1\n")
    command = [sys.executable, "-m", "seatrial", "explain", "--follow", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        until(lambda: str(log) in open_files(process, tmp_path))
        log.rename(tmp_path / "train.log.1")
        log.write_text(OOM)
        assert process.stdout
        assert "GPU out of memory" in process.stdout.readline()
        assert open_files(process, tmp_path) == [str(log)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


def test_without_a_known_failure_first_errors_and_last_lines_of_ranks_are_printed(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("[rank0]: step 3\n[rank1]: flux [bold]error\a\n[rank1]: leaving\n[rank0]: waiting for rank 1\n")
    code, out, err = call("explain", log)
    assert (code, err) == (4, "")
    assert f"Not known; the first errors are:\n  {log}:2: [rank1]: flux [bold]error\ufffd\n" in out
    ends = out.partition("The last line of each rank:\n")[2].splitlines()
    assert [line.partition(": ")[2] for line in ends] == ["[rank1]: leaving", "[rank0]: waiting for rank 1"]
    code, out, err = call("explain", "--json", log)
    assert (code, out.strip(), "a.log:2: [rank1]: flux" in err) == (4, "[]", True)


@pytest.mark.parametrize(("decision", "text"), [("ACCEPTED", "No failure: "), ("REJECTED", "No known failure: ")])
def test_accepted_run_has_no_failure(decision: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "a.log").write_text("flux error\n")
    (tmp_path / "trial.json").write_text(json.dumps({"decision": {"value": decision}}))
    code, out, _ = call("explain", tmp_path)
    assert (code, out.startswith(text)) == (4, True)


def test_own_output_in_a_log_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(f"step 1\n{OOM}OSError: [Errno 28] No space left on device: '/x/y'\n")
    code, out, _ = call("explain", tmp_path / "a.log")
    assert (code, "Log line: " in out) == (0, True)
    (tmp_path / "b.log").write_text(out)
    assert call("explain", tmp_path / "b.log")[0] == 4
