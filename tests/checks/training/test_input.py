from __future__ import annotations

import json
from pathlib import Path
from tempfile import gettempdir

import pytest

from seatrial.checks.training.input import CHECK, data_cold, reads_text
from seatrial.discover import filesystem
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Metric, Outcome
from tests.processes import Program

GOOD = {"exit_code": 0.0, "steps_missing": 0.0, "nonfinite_losses": 0.0, "loss_drop": 1.0}


def wait_outcome(percent: float, **changed: str) -> set[Outcome]:
    """The outcomes on a wait of this share of the step time."""
    facts = {
        "device": "cuda",
        "trained": "yes",
        "ranks_compared": "no: x",
        "data_wait_timed": "yes",
        "data_cold": "yes",
    }
    metrics = [
        Metric(name=name, value=value, unit=CHECK.metrics[name], subject="cluster") for name, value in GOOD.items()
    ]
    metrics.append(Metric(name="rank_data_wait", value=percent, unit="%", subject="n0/gpu0"))
    measurement = Measurement(check=CHECK.name, subject="n0/rank0", metrics=tuple(metrics), facts={**facts, **changed})
    verdicts = judge_check(CHECK, [measurement], {}, "t")
    return {verdict.outcome for verdict in verdicts if verdict.metric == "rank_data_wait"} - {Outcome.SKIP}


def test_the_limit_depends_on_the_device() -> None:
    assert wait_outcome(9.0) == {Outcome.PASS}
    assert wait_outcome(11.0) == {Outcome.FAIL}
    assert wait_outcome(29.0, device="cpu") == {Outcome.PASS}
    assert wait_outcome(31.0, device="cpu") == {Outcome.FAIL}


def test_data_wait_is_unjudged_with_data_in_the_page_cache() -> None:
    assert data_cold(0.05) == "yes"
    assert wait_outcome(0.0, data_cold=data_cold(1.0)) == {Outcome.UNJUDGED}
    assert wait_outcome(0.0, data_cold=data_cold(None)) == set()


def test_more_sequences_than_the_data_has_are_read_repeatedly() -> None:
    assert reads_text(64 * 30 * 136, 2**18) == " once"
    assert reads_text(64 * 30 * 1024, 2**18) == " 7.5 times on average"
    assert reads_text(64 * 30, None) == "", "data of the user"


TRIAL = """
limits: {startup_s: 300}
retry: false
telemetry: {enabled: false}
checks:
  train.input: {options: {path: %s, overrides: [max_steps=8, untimed_steps=2, bsz=1, seq_len=32, model.layers=1]}}
"""


@pytest.mark.training
@pytest.mark.skipif(
    filesystem.filesystem_type(Path(gettempdir())) == "tmpfs", reason="tmpfs keeps data in the page cache"
)
def test_a_rank_whose_filesystem_is_slow(tmp_path: Path) -> None:
    """Each batch of rank 1 takes a second; rank 0 reads from the same folder without a fault."""
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "mine.yaml").write_text(TRIAL % data)
    (tmp_path / "sitecustomize.py").write_text(
        "from seatrial.drill.faults import slow_input\nslow_input.SECONDS = 1\nslow_input.install()\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    program = Program("run", "mine.yaml", "--gpus-per-node", "0", "--out", "run", cwd=tmp_path, env=environment)
    program.finish()
    trial = json.loads((tmp_path / "run" / "trial.json").read_text())
    (measurement,) = [item for item in trial["measurements"] if item["facts"].get("method")]
    assert measurement["facts"]["data_cold"] == "yes"
    waits = {item["subject"]: item["value"] for item in measurement["metrics"] if item["name"] == "rank_data_wait"}
    assert len(waits) == 2
    failed = [verdict["subject"] for verdict in trial["verdicts"] if verdict["outcome"] == "FAIL"]
    assert list(data.iterdir()) == []
    assert failed == [subject for subject in waits if subject.endswith("rank1")]
    assert "slow_input" in {finding["cause"] for finding in trial["findings"]}
