"""The command explain: files, folders, pipes, gzip, growing logs, and what cannot be read."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import call

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def test_explain_names_cause_and_fix(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("fine\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    code, out, _ = call("explain", log)
    assert code == 0
    assert "GPU out of memory" in out
    assert "nvidia-smi" in out
    code, out, _ = call("explain", _empty(tmp_path))
    assert (code, "No known failure" in out) == (4, True)
    (tmp_path / "run" / "jobs").mkdir(parents=True)
    log.rename(tmp_path / "run" / "jobs" / "rank0.log")
    assert "GPU out of memory" in call("explain", tmp_path / "run")[1]
    assert "Xid 79" in _piped("-")
    assert "(standard input:1; " in _piped("-")
    assert _piped("-").replace("standard input", "/dev/stdin") == _piped("/dev/stdin")
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


def test_gzip_bomb_is_read_up_to_the_limit(tmp_path: Path) -> None:
    members = gzip.compress(b"0" * 2**24) * 80  # 1.3 GB in 1.3 MB
    (tmp_path / "bomb.gz").write_bytes(members)
    code, _, err = call("explain", tmp_path / "bomb.gz")
    assert (code, "expands more than" in err) == (2, True)


def test_follow_prints_a_failure_when_it_is_written(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1\n")
    command = [sys.executable, "-m", "seatrial", "explain", "--follow", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, log.open("a") as writer:
        time.sleep(2)
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
