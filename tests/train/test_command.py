"""The command `seatrial train run`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import CONFIGS
from tests.processes import call

TINY = CONFIGS / "tiny"


@pytest.mark.training
def test_training_on_two_ranks_with_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    config = TINY / "lora-mistral-7b-ddp.yaml"
    done = subprocess.run(
        [*torchrun, "-m", "seatrial", "train", "run", config, "--max_steps", "3", "--use_lora", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)  # of rank 0 only
    out = Path(metrics["out"])
    assert (metrics["world_size"], metrics["steps_measured"], metrics["use_lora"]) == (2, 1, True)
    assert out.parent == tmp_path / "seatrial-runs"
    files = {"config.json", "data", "final", "metrics.json", "run_args.json", "steps.jsonl", "summary.txt"}
    assert {path.name for path in out.iterdir()} == files
    assert len((out / "steps.jsonl").read_text().splitlines()) == 3
    assert "training 17,920 of 137,024 parameters" in done.stderr
    assert "step 3/3  loss 5." in done.stderr
    assert metrics["phases_s"]["time_to_first_step"] > metrics["phases_s"]["imports"] > 0.5


def test_an_invalid_config_is_a_usage_error(tmp_path: Path) -> None:
    code, out, err = call(
        "train", "run", str(TINY / "throughput.yaml"), "--set", "bsz=none", "--out", str(tmp_path / "out")
    )
    assert (code, out) == (2, "")
    assert "--set bsz=none: expected a valid integer" in err
    assert not (tmp_path / "out").exists()
