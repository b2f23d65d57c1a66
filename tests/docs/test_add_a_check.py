"""Following docs/add-a-check.md adds checks; the examples of the page are the files in add_a_check."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Trial
from tests.bench.cluster import ONE, THREE, Scenario, run
from tests.docs.add_a_check import driver, free_memory, messages
from tests.paths import ROOT

EXAMPLES = Path(__file__).parent / "add_a_check"
CHECKS = {"gpu/free_memory.py": "free_memory.py", "fabric/messages.py": "messages.py"}
PAGE = (ROOT / "docs" / "add-a-check.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_shows_the_examples() -> None:
    files = ("free_memory.py", "test_free_memory.py", "messages.py", "test_messages.py")
    assert blocks("python") == [(EXAMPLES / name).read_text() for name in files]
    for place in ("checks/gpu/free_memory.py", "checks/fabric/messages.py"):
        assert f"src/seatrial/{place}" in PAGE
        assert f"tests/{place.replace('free', 'test_free').replace('messages', 'test_messages')}" in PAGE


def test_following_the_page_adds_checks(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src" / "seatrial", tmp_path / "seatrial", ignore=shutil.ignore_patterns("*.pyc.*"))
    for place, name in CHECKS.items():
        shutil.copy(EXAMPLES / name, tmp_path / "seatrial" / "checks" / place)
    (trial_file,) = blocks("yaml")
    (tmp_path / "mine.yaml").write_text(trial_file)
    program = [sys.executable, "-m", "seatrial"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "120"}
    command = [*program, "run", "mine.yaml", "--gpus-per-node", "0", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = Trial.model_validate_json(done.stdout)
    verdicts = {(verdict.check, verdict.metric): verdict.outcome for verdict in record.verdicts}
    assert verdicts == {
        ("device.free_memory", "free_memory"): Outcome.SKIP,  # no GPU
        ("device.free_memory", "fits"): Outcome.PASS,
        ("nodes.messages", ""): Outcome.SKIP,  # one node
    }
    for check in (free_memory.CHECK, messages.CHECK):
        shown = subprocess.run(
            [*program, "show", "checks", check.name], env=env, capture_output=True, text=True, check=True
        )
        assert check.title in shown.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Measurement]]:
    check, options = messages.CHECK.name, {"seconds": 0.05}
    scenarios = {
        "three_nodes": Scenario(check, THREE, options, faults=("added",)),
        "one_node": Scenario(check, ONE, options, faults=("added",)),
        "wrong_data": Scenario(check, THREE, options, faults=("added", "wrong_on_rank_2")),
    }
    return run(tmp_path_factory.mktemp("messages"), driver.__name__, scenarios)


@pytest.mark.training
def test_messages_between_real_processes(runs: dict[str, list[Measurement]]) -> None:
    assert [measurement.error for measurement in runs["three_nodes"]] == [None] * 3
    outcomes = {verdict.outcome for verdict in judge_check(messages.CHECK, runs["three_nodes"], {}, "")}
    assert outcomes == {Outcome.PASS, Outcome.SKIP}  # times are compared over NCCL only
    times = [metric for metric in runs["three_nodes"][0].metrics if metric.name == "message_time"]
    assert {metric.subject for metric in times} == {"node0->node1", "node0->node2", "node1->node2"}
    assert all(metric.value > 0 for metric in times)
    assert all("one node" in str(measurement.skipped) for measurement in runs["one_node"])


@pytest.mark.training
def test_wrong_data_fails_on_the_pairs_of_its_sender(runs: dict[str, list[Measurement]]) -> None:
    verdicts = judge_check(messages.CHECK, runs["wrong_data"], {}, "")
    failed = {verdict.subject: verdict.evidence for verdict in verdicts if verdict.outcome is Outcome.FAIL}
    assert failed.keys() == {"node0->node2", "node1->node2"}
    assert "rank 0" in failed["node0->node2"]
