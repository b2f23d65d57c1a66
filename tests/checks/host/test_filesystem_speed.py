from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.checks.host.filesystem_speed import CHECK
from seatrial.config.expect import declared_unit
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from tests.bench.cluster import ONE, TWO, Scenario, run
from tests.checks.host import filesystem_driver, mounts

Runs = dict[str, list[Measurement]]
NAME = CHECK.name
SMALL = {"size": "4MiB", "files": 20}
OPERATIONS = ("write", "read", "create", "stat", "unlink")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speed")


@pytest.fixture(scope="module")
def runs(out: Path) -> Iterator[Runs]:
    for folder in ("a", "own0", "own1", "own2"):
        (out / folder).mkdir()

    def at(folder: str, *faults: str, **options: Any) -> Scenario:
        return Scenario(NAME, options={**SMALL, "paths": [str(out / folder)], **options}, faults=faults)

    scenarios = {
        "default": Scenario(NAME, nodes=TWO),
        "three_nodes": at("a"),
        "one_node": Scenario(NAME, nodes=ONE, options=SMALL),
        "own_disks": at("own{rank}"),
        "no_direct_io": at("a", "no_direct_io"),
        "slow_disk": at("a", "slow_disk"),
        "missing": at("absent"),
        "too_large": at("a", size="1024TiB"),
        "one_of_two": Scenario(NAME, options={**SMALL, "paths": [str(out / "a"), str(out / "absent")]}),
    }
    with ExitStack() as stack:
        if mounts.CAN_MOUNT:
            stack.enter_context(mounts.tmpfs(out / "few", "size=64m,nr_inodes=30"))
            scenarios["few_inodes"] = at("few", files=100)
        yield run(out, filesystem_driver.__name__, scenarios)


def outcomes(measurements: list[Measurement]) -> list[Outcome]:
    assert [measurement.error for measurement in measurements] == [None] * len(measurements)
    verdicts = judge_check(CHECK, measurements, {}, "t")
    return [verdict.outcome for verdict in verdicts if verdict.metric == "paths_failed"]


def metrics(measurements: list[Measurement]) -> dict[str, float]:
    return {metric.name: metric.value for metric in measurements[0].metrics}


def failed(measurements: list[Measurement]) -> dict[str, str]:
    (evidence,) = (metric.evidence for metric in measurements[0].metrics if metric.name == "paths_failed")
    assert isinstance(evidence, dict)
    reasons = evidence["failed"]
    assert isinstance(reasons, dict)
    return {path: str(reason) for path, reason in reasons.items()}


def test_default_options(runs: Runs) -> None:
    assert outcomes(runs["default"]) == [Outcome.PASS]
    assert "64 MiB per node" in str(runs["default"][0].facts["method"])


def test_all_rates_are_declared(runs: Runs, out: Path) -> None:
    metrics = runs["three_nodes"][0].metrics
    rates = {f"{operation}_{mode}.{out / 'a'}" for operation in OPERATIONS for mode in ("single", "concurrent")}
    assert {metric.name for metric in metrics} == rates | {"paths_failed"}
    assert {metric.name: metric.unit for metric in metrics} == {
        metric.name: declared_unit(metric.name, CHECK.units) for metric in metrics
    }
    assert [other.metrics for other in runs["three_nodes"][1:]] == [(), ()]


def test_concurrent_rate_ends_with_the_slowest_node(runs: Runs, out: Path) -> None:
    (write,) = (metric for metric in runs["slow_disk"][0].metrics if metric.name == f"write_concurrent.{out / 'a'}")
    assert len(write.samples) == 3
    assert write.value == pytest.approx(3 * min(write.samples))
    assert write.value < 3 * 4 * 2**20 / 1e9 / filesystem_driver.SLOW_S
    assert max(write.samples) > 2 * min(write.samples)


def test_one_node_has_no_concurrent_rates(runs: Runs) -> None:
    assert outcomes(runs["one_node"]) == [Outcome.PASS]
    assert set(metrics(runs["one_node"])) == {f"{operation}_single.run_directory" for operation in OPERATIONS} | {
        "paths_failed"
    }


def test_local_disks(runs: Runs, out: Path) -> None:
    assert outcomes(runs["own_disks"]) == [Outcome.PASS]
    assert "different folder on each node" in str(runs["own_disks"][0].facts[f"shared.{out / 'own0'}"])
    assert "next node" in str(runs["three_nodes"][0].facts[f"shared.{out / 'a'}"])


def test_cache_facts(runs: Runs, out: Path) -> None:
    caches = f"caches.{out / 'a'}"
    assert "posix_fadvise" in str(runs["no_direct_io"][0].facts[caches])
    assert outcomes(runs["no_direct_io"]) == [Outcome.PASS]


def test_missing_path(runs: Runs, out: Path) -> None:
    assert outcomes(runs["missing"]) == [Outcome.FAIL]
    assert outcomes(runs["one_of_two"]) == [Outcome.FAIL]
    ((path, reason),) = failed(runs["one_of_two"]).items()
    assert path == str(out / "absent")
    assert "No such file or directory (node0, node1, node2)" in reason
    assert f"write_concurrent.{out / 'a'}" in metrics(runs["one_of_two"])


def test_insufficient_space(runs: Runs) -> None:
    assert outcomes(runs["too_large"]) == [Outcome.FAIL]
    assert "1024 TiB" in str(failed(runs["too_large"]))


def test_all_files_are_removed(runs: Runs, out: Path) -> None:
    assert runs
    assert list(out.glob("**/seatrial-*")) == []


@mounts.needs_mount
def test_filesystem_full_during_the_measurement(runs: Runs, out: Path) -> None:
    assert outcomes(runs["few_inodes"]) == [Outcome.FAIL]
    assert "No space left on device (node0)" in failed(runs["few_inodes"])[str(out / "few")]


@pytest.mark.parametrize("options", [{"size": "1000 B"}, {"size": "1.5MiB"}, {"files": 0}, {"paths": ["relative"]}])
def test_invalid_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CHECK.options.model_validate(options)


def test_run_directory_has_a_floor_and_other_paths_have_none(runs: Runs) -> None:
    def by_metric(measured: list[Measurement]) -> dict[str, Outcome]:
        found = {verdict.metric: verdict.outcome for verdict in judge_check(CHECK, measured, {}, "t")}
        return {name: found[name] for name in ("write_single.run_directory", "read_single.run_directory")}

    first, *others = runs["one_node"]
    slow = [
        first.model_copy(update={"metrics": tuple(replace(each, value=2e-4, samples=()) for each in first.metrics)})
    ]
    assert set(by_metric([first, *others]).values()) == {Outcome.PASS}
    assert set(by_metric([*slow, *others]).values()) == {Outcome.FAIL}
    assert set(by_metric(runs["three_nodes"]).values()) == {Outcome.SKIP}
