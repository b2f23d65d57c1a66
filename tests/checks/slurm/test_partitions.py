from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.slurm.partitions import CHECK
from seatrial.model import Outcome
from tests.fakes.slurm import PARTITIONS, CheckRunner, Reply, cluster, recorded, run_check, success

# The recorded cluster has four partitions: one is DOWN; "members" has an account restriction and no time limit.
MEMBERS = {"partitions_without_limit": Outcome.WARN}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CheckRunner:
    return CheckRunner(CHECK, monkeypatch, tmp_path)


def partitions_with(*changes: tuple[str, str]) -> dict[str, Reply]:
    """Return the recorded cluster with text replacements in its partitions."""
    text = recorded("scontrol-show-partition.txt").out
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return {**cluster(), PARTITIONS: success(text)}


def test_partition_without_time_limit(runner: CheckRunner) -> None:
    assert runner.not_passed(partitions_with()) == MEMBERS
    evidence = {metric.name: metric.evidence for metric in runner.measure(partitions_with(), (4, None)).metrics}
    assert evidence["partitions_without_limit"] == ["members"]


def test_default_time_is_a_time_limit(runner: CheckRunner) -> None:
    assert runner.not_passed(partitions_with(("DefaultTime=NONE", "DefaultTime=01:00:00"))) == {}
    assert runner.not_passed(partitions_with(("DefaultTime=NONE", "DefaultTime=UNLIMITED"))) == MEMBERS


def test_no_partition_is_up(runner: CheckRunner) -> None:
    bad = runner.not_passed(partitions_with(("State=UP", "State=DRAIN")))
    assert bad == {"partitions_up": Outcome.FAIL, "nodes_without_partition": Outcome.WARN}


@pytest.mark.parametrize(
    ("partition", "up"), [(None, 1), ("short", 1), ("closed", 0), ("closed,short", 1), ("nosuch", 0)]
)
def test_only_partitions_of_the_trial_are_counted(runner: CheckRunner, partition: str | None, up: int) -> None:
    (value,) = (
        metric.value
        for metric in runner.measure(partitions_with(), (4, None), partition=partition).metrics
        if metric.name == "partitions_up"
    )
    assert value == up


def test_no_default_partition(runner: CheckRunner) -> None:
    assert runner.not_passed(partitions_with(("Default=YES", "Default=NO"))) == {
        **MEMBERS,
        "default_partitions": Outcome.WARN,
    }


def test_nodes_without_partition(runner: CheckRunner) -> None:
    """node0 and node1 are also in partition ``short``."""
    closed = (("Default=YES", "Default=NO"), ("State=UP TotalCPUs=32", "State=DOWN TotalCPUs=32"))
    assert runner.not_passed(partitions_with(*closed))["nodes_without_partition"] is Outcome.WARN
    evidence = {metric.name: metric.evidence for metric in runner.measure(partitions_with(*closed), (4, None)).metrics}
    assert evidence["nodes_without_partition"] == ["node2", "node3"]


def test_no_partitions(runner: CheckRunner) -> None:
    bad = runner.not_passed({**cluster(), PARTITIONS: success("No partitions in the system\n")})
    assert bad["partitions_up"] is Outcome.FAIL


def test_no_controller(runner: CheckRunner) -> None:
    bad = runner.not_passed({**cluster(), PARTITIONS: recorded("scontrol-show-config-controller-down.txt")})
    assert bad == {"login": Outcome.ERROR}


def test_no_slurm_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_check(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
