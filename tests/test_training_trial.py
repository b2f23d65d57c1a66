"""The training ladder as a user starts it: two processes of this machine rehearse every workload."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Program

CRASH = """
checks:
  train.fsdp:
    options: {hf: false, overrides: [learning_rate.peak=1.0e30]}
"""


def record(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("seatrial-runs/*/trial.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_ladder_is_climbed_on_two_cores(tmp_path: Path) -> None:
    code, out, err = Program("run", "training", cwd=tmp_path).finish(800)
    trial = record(tmp_path)
    bad = [one for one in trial["verdicts"] if one["outcome"] not in ("PASS", "SKIP")]
    assert (code, bad) == (0, []), err[-2000:]
    assert "REHEARSAL" in out
    told = {metric["name"]: metric["value"] for one in trial["measurements"] for metric in one["metrics"]}
    assert told["generated_tokens"] >= 1
    assert {"efficiency.native", "efficiency.hf", "native_over_hf", "efficiency.node_of_gpu"} <= told.keys()
    facts = {one["check"]: one["facts"] for one in trial["measurements"] if one["facts"]}
    assert facts["train.lora"]["trained_parameters"]["expected"] == 17_920
    assert facts["train.fsdp"]["run.hf"]["strategy"] == "fsdp2"
    assert facts["train.fsdp"]["run.hf"]["flops_per_token"] == facts["train.fsdp"]["run.native"]["flops_per_token"] > 0
    assert all("rehearsal" in found for name, found in facts.items() if name.startswith("train."))
    assert re.search(r"train\.\w+: [\w-]+: step \d+ of \d+", err)  # live, of one of ten trainings at least


@pytest.mark.slow
def test_a_training_that_breaks_is_a_verdict_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "crash.yaml").write_text(CRASH)
    code, _, _ = Program("run", "crash.yaml", cwd=tmp_path).finish()
    (failed,) = [one for one in record(tmp_path)["verdicts"] if one["outcome"] == "FAIL"]
    assert (code, failed["metric"], failed["check"]) == (1, "exit_code", "train.fsdp")
    assert "NotFinite: step 2: loss nan" in failed["evidence"]
