from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.slurm.partitions import CHECK
from seatrial.model import Outcome
from tests.fakes.slurm import PARTITIONS, CheckRunner, Reply, cluster, recorded, run_check, success

# The recorded cluster has four partitions, one of them closed, and one open to the account "members" without a limit.
MEMBERS = {"partitions_without_limit": Outcome.WARN}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CheckRunner:
    return CheckRunner(CHECK, monkeypatch, tmp_path)


def changed(*changes: tuple[str, str]) -> dict[str, Reply]:
    """The recorded cluster but for these words."""
    text = recorded("scontrol-show-partition.txt").out
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return {**cluster(), PARTITIONS: success(text)}


def test_a_partition_without_limit_is_named(bench: CheckRunner) -> None:
    (verdict,) = (v for v in bench.verdicts(changed()) if v.outcome is not Outcome.PASS)
    assert (verdict.metric, verdict.outcome) == ("partitions_without_limit", Outcome.WARN)
    assert 'without_limit: ["members"]' in verdict.evidence


def test_a_default_time_is_a_limit_for_who_forgets_one(bench: CheckRunner) -> None:
    assert bench.not_passed(changed(("DefaultTime=NONE", "DefaultTime=01:00:00"))) == {}
    assert bench.not_passed(changed(("DefaultTime=NONE", "DefaultTime=UNLIMITED"))) == MEMBERS


def test_all_closed(bench: CheckRunner) -> None:
    bad = bench.not_passed(changed(("State=UP", "State=DRAIN")))
    assert bad == {"partitions_up": Outcome.FAIL, "nodes_without_partition": Outcome.WARN}


def test_no_default(bench: CheckRunner) -> None:
    assert bench.not_passed(changed(("Default=YES", "Default=NO"))) == {**MEMBERS, "default_partitions": Outcome.WARN}


def test_nodes_that_no_open_partition_has(bench: CheckRunner) -> None:
    """node0 and node1 are in the partition ``short`` as well."""
    closed = (("Default=YES", "Default=NO"), ("State=UP TotalCPUs=32", "State=DOWN TotalCPUs=32"))
    verdicts = {v.metric: v for v in bench.verdicts(changed(*closed))}
    assert verdicts["nodes_without_partition"].outcome is Outcome.WARN
    assert 'out_of_reach: ["node2", "node3"]' in verdicts["nodes_without_partition"].evidence


def test_none_at_all(bench: CheckRunner) -> None:
    bad = bench.not_passed({**cluster(), PARTITIONS: success("No partitions in the system\n")})
    assert bad["partitions_up"] is Outcome.FAIL


def test_no_controller(bench: CheckRunner) -> None:
    bad = bench.not_passed({**cluster(), PARTITIONS: recorded("scontrol-show-config-controller-down.txt")})
    assert bad == {"login": Outcome.ERROR}


def test_no_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_check(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
