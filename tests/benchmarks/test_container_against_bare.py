"""The programs that stand for seatrial write a record of the size of a real one's part; nothing is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.container_against_bare import figures, main, summary

FAKE = """#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" = --out ] && out=$2; shift; done
mkdir "$out" && cat > "$out/trial.json" <<END
RECORD
END
"""


def record(seconds: float, rate: float) -> dict[str, object]:
    metrics = {
        "collectives.all_reduce": [("busbw.10MiB", 1.0), ("busbw.1MiB", 9.0)],
        "train.cnn": [("images_per_second", rate), ("images_per_second", rate + 50)],  # two ranks
        "train.ddp": [("tokens_per_second", 200.0)],
    }
    measurements = [
        {"check": check, "metrics": [{"name": name, "value": value} for name, value in rows]}
        for check, rows in metrics.items()
    ]
    return {"seconds": seconds, "measurements": measurements}


def seatrial(path: Path, seconds: float, rate: float) -> str:
    path.write_text(FAKE.replace("RECORD", json.dumps(record(seconds, rate))))
    path.chmod(0o755)
    return str(path)


def test_pairs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare, container = seatrial(tmp_path / "bare", 50, 100), seatrial(tmp_path / "container", 60, 90)
    folder = tmp_path / "pairs"
    folder.mkdir()
    assert main(["--bare", bare, "--container", container, "--folder", str(folder), "--pairs", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)["summary"]
    assert printed["trial_s"] == {"ratio": 1.2, "smallest_ratio": 1.2, "largest_ratio": 1.2, "bare_spread": 0.0}
    assert printed["cnn_images_per_s"]["ratio"] == 0.9
    assert printed["all_reduce_GB_per_s"]["ratio"] == 1.0


def test_the_spread_is_reported() -> None:
    pairs = [
        {"bare": {"s": bare}, "container": {"s": inside}} for bare, inside in ((10.0, 12.0), (20.0, 20.0), (12.0, 11.0))
    ]
    assert summary(pairs) == {"s": {"ratio": 1.0, "smallest_ratio": 0.917, "largest_ratio": 1.2, "bare_spread": 0.833}}


def test_a_trial_without_a_figure_is_refused() -> None:
    trial = {"measurements": [{"check": "train.cnn", "metrics": [{"name": "images_per_second", "value": 1.0}]}]}
    with pytest.raises(ValueError, match="all_reduce_GB_per_s, ddp_tokens_per_s"):
        figures(trial)


def test_a_command_without_a_record_ends_the_comparison(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"left no .*trial\.json"):
        main(["--bare", "false", "--container", "false", "--folder", str(tmp_path)])
