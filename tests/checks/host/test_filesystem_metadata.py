from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from seatrial.bench import metadata
from seatrial.checks.host.filesystem_metadata import CHECK, MODES, OPERATIONS, MetadataOptions
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from tests.bench.cluster import ONE, Scenario, run
from tests.checks.host import filesystem_driver

Runs = dict[str, list[Measurement]]
NAME = CHECK.name


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metadata")


@pytest.fixture(scope="module")
def runs(out: Path) -> Runs:
    for name in ("shared", "used", "own0", "own1", "own2"):
        (out / name).mkdir()
    (out / "used" / f"{metadata.PREFIX}new").mkdir()
    old = out / "shared" / f"{metadata.PREFIX}killed"
    old.mkdir()
    os.utime(old, (1, 1))

    def at(speed: str = "fast_metadata", **paths: str) -> Scenario:
        options = {"files": 300, "paths": {tier: str(out / path) for tier, path in paths.items()}}
        return Scenario(NAME, options=options, faults=(speed,))

    scenarios = {
        "default": Scenario(NAME, nodes=ONE, options={"files": 100, "repeats": 1}, faults=("fast_metadata",)),
        "shared": at(run_directory="shared"),
        "own_disks": at(local_scratch="own{rank}"),
        "used": at(home="used"),
        "slow": at("slow_metadata", run_directory="shared"),
        "slow_home": at("slow_metadata", home="shared"),
        "unknown_tier": at(archive="shared"),
        "missing": at(run_directory="shared", hf_cache="absent"),
    }
    return run(out, filesystem_driver.__name__, scenarios)


def outcomes(measurements: list[Measurement]) -> dict[str, set[Outcome]]:
    assert [measurement.error for measurement in measurements] == [None] * len(measurements)
    by_metric: dict[str, set[Outcome]] = {}
    for verdict in judge_check(CHECK, measurements, {}, "t"):
        by_metric.setdefault(verdict.metric, set()).add(verdict.outcome)
    return by_metric


def rates(measurements: list[Measurement]) -> dict[str, float]:
    return {metric.name: metric.value for metric in measurements[0].metrics if metric.unit == "files/s"}


def evidence(measurements: list[Measurement], name: str) -> Any:
    (evidence,) = (metric.evidence for metric in measurements[0].metrics if metric.name == name)
    return evidence


def test_one_node(runs: Runs) -> None:
    assert set(rates(runs["default"])) == {f"{operation}_single.run_directory" for operation in OPERATIONS}
    by_metric = outcomes(runs["default"])
    assert by_metric["create_single.run_directory"] == {Outcome.PASS}
    assert by_metric["create_concurrent.run_directory"] == by_metric["create_single.home"] == {Outcome.SKIP}


def test_all_rates_with_their_repeats(runs: Runs) -> None:
    first = runs["shared"][0]
    names = {f"{operation}_{mode}.run_directory" for operation in OPERATIONS for mode in MODES}
    assert set(rates(runs["shared"])) == names
    for metric in first.metrics:
        if metric.name in names:
            assert len(metric.samples) == 3
            assert metric.value == median(metric.samples)
    files: Any = first.facts["files.run_directory"]
    assert files["create_single"] == files["create_concurrent"] == 300  # of all nodes together
    assert set(files) == {name.partition(".")[0] for name in names}
    assert {outcome for name in names for outcome in outcomes(runs["shared"])[name]} == {Outcome.PASS}


def test_the_next_run_removes_what_a_killed_run_left(runs: Runs, out: Path) -> None:
    assert evidence(runs["shared"], "leftover_folders") == {
        "leftovers": {str(out / "shared" / f"{metadata.PREFIX}killed"): "removed"}
    }
    assert outcomes(runs["shared"])["leftover_folders"] == {Outcome.PASS}
    assert [path.parent.name for path in out.glob(f"**/{metadata.PREFIX}*")] == ["used"]


def test_a_folder_that_may_be_in_use_is_named_and_kept(runs: Runs, out: Path) -> None:
    assert outcomes(runs["used"])["leftover_folders"] == {Outcome.WARN}
    assert list(evidence(runs["used"], "leftover_folders")["leftovers"]) == [
        str(out / "used" / f"{metadata.PREFIX}new")
    ]


def test_local_disks_of_each_node(runs: Runs) -> None:
    assert outcomes(runs["own_disks"])["create_concurrent.local_scratch"] == {Outcome.PASS}


def test_each_tier_has_its_own_rule(runs: Runs) -> None:
    assert outcomes(runs["slow"])["create_single.run_directory"] == {Outcome.FAIL}
    assert outcomes(runs["slow_home"])["create_single.home"] == {Outcome.WARN}
    assert outcomes(runs["slow_home"])["create_single.run_directory"] == {Outcome.SKIP}


def test_an_unknown_tier_is_measured_and_not_judged(runs: Runs) -> None:
    assert "create_single.archive" in rates(runs["unknown_tier"])
    by_metric = outcomes(runs["unknown_tier"])
    assert by_metric["unknown_tiers"] == {Outcome.UNJUDGED}
    assert Outcome.FAIL not in set().union(*by_metric.values())


def test_a_missing_path_does_not_stop_the_others(runs: Runs) -> None:
    by_metric = outcomes(runs["missing"])
    assert by_metric["paths_failed"] == {Outcome.FAIL}
    assert by_metric["create_single.run_directory"] == {Outcome.PASS}
    assert by_metric["create_single.hf_cache"] == {Outcome.SKIP}


@pytest.mark.parametrize("options", [{"files": 0}, {"repeats": 0}, {"step_s": 0}, {"paths": {"home": "x"}}])
def test_invalid_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        MetadataOptions.model_validate(options)
