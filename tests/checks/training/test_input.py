from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir

import pytest

from seatrial.checks.declare import Answer
from seatrial.checks.training._workload import TrainingResult
from seatrial.checks.training.input import CHECK, data_wait
from seatrial.discover import filesystem
from seatrial.judge.rules import judge_check
from seatrial.model import Outcome
from tests.checks.training.check_helpers import measured
from tests.processes import Program, load


def waiting(share: float, cached: float | None = 0.05) -> list[Answer]:
    """The answers of a rank that waits for this share of the step time, with this share of data in the page cache."""
    rank = {"device": "H", "compute_s": [], "data_wait_s": [share] * 8, "seconds": [1.0] * 8}
    result = TrainingResult({"ranks": [rank], "data_cached_share": cached}, Path(), "", ranks=(0,))
    return list(data_wait(result, ["n0/rank0"], "nfs at /data"))


def wait_outcome(answers: list[Answer], device: str = "cuda") -> set[Outcome]:
    verdicts = judge_check(CHECK, [measured(CHECK, answers, device=device, trained="yes")], {}, "t")
    return {verdict.outcome for verdict in verdicts if verdict.metric == "rank_data_wait"} - {Outcome.SKIP}


def test_the_limit_depends_on_the_device() -> None:
    assert wait_outcome(waiting(0.09)) == {Outcome.PASS}
    assert wait_outcome(waiting(0.11)) == {Outcome.FAIL}
    assert wait_outcome(waiting(0.29), "cpu") == {Outcome.PASS}
    assert wait_outcome(waiting(0.31), "cpu") == {Outcome.FAIL}


def test_evidence_is_the_filesystem_and_the_share_in_the_page_cache() -> None:
    (metric,) = measured(CHECK, waiting(0.5)).metrics
    assert (metric.subject, metric.value) == ("n0/rank0", 50)
    assert metric.evidence == {"filesystem": "nfs at /data", "data in the page cache": "5%"}


def test_data_wait_is_unjudged_with_data_in_the_page_cache() -> None:
    assert wait_outcome(waiting(0.0, cached=1.0)) == {Outcome.UNJUDGED}
    assert wait_outcome(waiting(0.0, cached=None)) == set()


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
        "from seatrial.drill.faults import install, slow_input\nslow_input.SECONDS = 1\ninstall('slow_input')\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    program = Program("run", "mine.yaml", "--gpus-per-node", "0", "--out", "run", cwd=tmp_path, env=environment)
    program.finish()
    trial = load(tmp_path / "run")
    (measurement,) = [item for item in trial.measurements if item.facts.get("method")]
    assert "rank_data_wait" not in {each.metric for each in measurement.absent}
    waits = {item.subject: item.value for item in measurement.metrics if item.name == "rank_data_wait"}
    assert len(waits) == 2
    failed = [verdict.subject for verdict in trial.verdicts if verdict.outcome is Outcome.FAIL]
    assert list(data.iterdir()) == []
    assert failed == [subject for subject in waits if subject.endswith("rank1")]
    assert "slow_input" in {finding.cause for finding in trial.findings}
