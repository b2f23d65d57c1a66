"""The commands discover, checks, skus and explain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from seatrial.checks import catalog
from seatrial.hardware.references import skus
from tests.processes import call


def test_checks_lists_every_check_with_its_rules() -> None:
    _, out, _ = call("checks")
    for check in catalog().values():
        assert check.name in out
    code, out, _ = call("checks", "--json")
    assert code == 0
    assert {entry["name"] for entry in json.loads(out)} == set(catalog())


def test_skus_lists_models_and_the_values_of_one() -> None:
    code, out, _ = call("skus", "--json")
    assert (code, len(json.loads(out))) == (0, len(skus()))
    for sku in skus():
        assert sku.name in call("skus")[1]
    code, out, _ = call("skus", "gb200")
    assert code == 0
    assert "679.6 GB/s" in out
    assert "NVIDIA B200" not in out
    code, _, err = call("skus", "nosuch")
    assert (code, "no GPU model matches 'nosuch'" in err) == (2, True)


def test_discover_prints_json_or_text() -> None:
    code, out, _ = call("discover", "--json")
    assert code == 0
    assert set(json.loads(out)) == {"host", "gpu"}
    assert "kernel" in call("discover")[1]


def test_explain_names_cause_and_fix(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("fine\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    code, out, _ = call("explain", log)
    assert code == 0
    assert "GPU out of memory" in out
    assert "nvidia-smi" in out
    assert "No known failure" in call("explain", _empty(tmp_path))[1]
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
