from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.slurm.partitions import CHECK
from seatrial.model import Outcome
from tests.fakes.slurm import PARTITIONS, Bench, Reply, cluster, recorded, run, said

# The recorded cluster has four partitions, one of them closed, and one open to the account "members" without a limit.
MEMBERS = {"partitions_without_limit": Outcome.WARN}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(CHECK, monkeypatch, tmp_path)


def changed(*changes: tuple[str, str]) -> dict[str, Reply]:
    """The recorded cluster but for these words."""
    text = recorded("scontrol-show-partition.txt").out
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return {**cluster(), PARTITIONS: said(text)}


def test_a_partition_without_limit_is_named(bench: Bench) -> None:
    (verdict,) = (v for v in bench.verdicts(changed()) if v.outcome is not Outcome.PASS)
    assert (verdict.metric, verdict.outcome) == ("partitions_without_limit", Outcome.WARN)
    assert 'without_limit: ["members"]' in verdict.evidence


def test_a_default_time_is_a_limit_for_who_forgets_one(bench: Bench) -> None:
    assert bench.bad(changed(("DefaultTime=NONE", "DefaultTime=01:00:00"))) == {}
    assert bench.bad(changed(("DefaultTime=NONE", "DefaultTime=UNLIMITED"))) == MEMBERS


def test_all_closed(bench: Bench) -> None:
    bad = bench.bad(changed(("State=UP", "State=DRAIN")))
    assert bad == {"partitions_up": Outcome.FAIL, "nodes_out_of_reach": Outcome.WARN}


def test_no_default(bench: Bench) -> None:
    assert bench.bad(changed(("Default=YES", "Default=NO"))) == {**MEMBERS, "default_partitions": Outcome.WARN}


def test_nodes_that_no_open_partition_has(bench: Bench) -> None:
    """node0 and node1 are in the partition ``short`` as well."""
    closed = (("Default=YES", "Default=NO"), ("State=UP TotalCPUs=32", "State=DOWN TotalCPUs=32"))
    verdicts = {v.metric: v for v in bench.verdicts(changed(*closed))}
    assert verdicts["nodes_out_of_reach"].outcome is Outcome.WARN
    assert 'out_of_reach: ["node2", "node3"]' in verdicts["nodes_out_of_reach"].evidence


def test_none_at_all(bench: Bench) -> None:
    bad = bench.bad({**cluster(), PARTITIONS: said("No partitions in the system\n")})
    assert bad["partitions_up"] is Outcome.FAIL


def test_no_controller(bench: Bench) -> None:
    bad = bench.bad({**cluster(), PARTITIONS: recorded("scontrol-show-config-controller-down.txt")})
    assert bad == {"login": Outcome.ERROR}


def test_no_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(CHECK, tmp_path).skipped == "no Slurm client (sinfo) on this machine"
