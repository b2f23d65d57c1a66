from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from seatrial.bench import shared_files
from seatrial.checks.host.filesystem_shared import CHECK, read_volume
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Verdict
from tests.bench.cluster import ONE, TWO, Scenario, run
from tests.checks.host import filesystem_driver, mounts
from tests.discover import trees

Runs = dict[str, list[Measurement]]
NAME = CHECK.name
PROBE_METRICS = {
    *("rename_failures", "append_failures", "flock_failures", "fcntl_failures", "mmap_failures", "owner_mismatches"),
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def runs(out: Path) -> Iterator[Runs]:
    for folder in ("a", "b", "c", "own0", "own1", "own2", "partial0", "partial2"):
        (out / folder).mkdir()
    (out / "file").write_text("not a folder")

    def on_folders(*folders: str, faults: tuple[str, ...] = ("short_timeouts",), **others: Any) -> Scenario:
        return Scenario(NAME, options={"paths": [str(out / folder) for folder in folders]}, faults=faults, **others)

    faults = (
        *("no_flock", "no_fcntl", "flock_unsupported", "never_contended", "partial_rename", "no_append"),
        *("stale_pages", "other_owner", "other_user"),
    )
    scenarios = {fault: on_folders("a", faults=("short_timeouts", fault)) for fault in faults} | {
        "healthy": on_folders("a", faults=()),
        "two_ranks_a_node": on_folders("a", nodes=TWO),
        "one_node": on_folders("a", nodes=ONE),
        "run_directory": Scenario(NAME, faults=("short_timeouts",)),
        "own_run_directories": Scenario(NAME, faults=("short_timeouts",), folder="{rank}"),
        "two_paths": on_folders("a", "b"),
        "not_shared": on_folders("own{rank}"),
        "one_of_two_not_shared": on_folders("a", "own{rank}"),
        "missing": on_folders("absent"),
        "missing_on_one": on_folders("partial{rank}"),
        "no_folder": on_folders("file"),
        "flock_hangs": on_folders("a", faults=("short_timeouts", "flock_hangs", "short_lock_timeout")),
        "late_names": on_folders("a", faults=("late_names",)),
        "never_seen": on_folders("a", faults=("short_timeouts", "late_names")),
        "rmtree_fails": on_folders("c", faults=("short_timeouts", "rmtree_fails")),
    }
    with ExitStack() as stack:
        if mounts.CAN_MOUNT:
            mount_faulty(out, stack)
            scenarios |= {
                "full": on_folders("full{rank}"),
                "readonly": on_folders("readonly{rank}"),
                "little": on_folders("little"),
            }
        yield run(out, filesystem_driver.__name__, scenarios)


def mount_faulty(out: Path, stack: ExitStack) -> None:
    """Mount a full and a read-only filesystem on one of three nodes, and a small one for all."""
    for folder in ("full0", "full2", "readonly0", "readonly2"):
        (out / folder).mkdir()
    full = stack.enter_context(mounts.tmpfs(out / "full1", "size=4k"))
    (full / "filler").write_bytes(bytes(4096))
    stack.enter_context(mounts.tmpfs(out / "readonly1", "ro"))
    stack.enter_context(mounts.tmpfs(out / "little", "size=4m,nr_inodes=200"))


def verdicts(measurements: list[Measurement]) -> list[Verdict]:
    assert [measurement.error for measurement in measurements] == [None] * len(measurements)
    return judge_check(CHECK, measurements, {}, "t")


def not_passed(measurements: list[Measurement]) -> dict[str, Outcome]:
    return {
        verdict.metric: verdict.outcome
        for verdict in verdicts(measurements)
        if verdict.outcome not in (Outcome.PASS, Outcome.SKIP)
    }


def skipped(measurements: list[Measurement]) -> list[str]:
    return [verdict.metric for verdict in verdicts(measurements) if verdict.outcome is Outcome.SKIP]


def fact(measurements: list[Measurement], name: str) -> Any:
    return measurements[0].facts[name]


def evidence(measurements: list[Measurement], name: str) -> Any:
    (evidence,) = (metric.evidence for metric in measurements[0].metrics if metric.name == name)
    return evidence


def value(measurements: list[Measurement], name: str) -> float:
    (metric_value,) = (metric.value for metric in measurements[0].metrics if metric.name == name)
    return metric_value


@pytest.mark.parametrize("scenario", ["healthy", "two_ranks_a_node", "run_directory", "two_paths"])
def test_healthy_filesystem(runs: Runs, scenario: str) -> None:
    assert not_passed(runs[scenario]) == {}
    # paths_not_shared has two rules: one for configured paths, one for the run directory
    assert skipped(runs[scenario]) == ["paths_not_shared"]


def test_rank_0_reports_all_declared_metrics(runs: Runs) -> None:
    first_rank, *others = runs["healthy"]
    assert {metric.name: metric.unit for metric in first_rank.metrics} == CHECK.units
    assert [(other.metrics, other.facts) for other in others] == [((), {}), ((), {})]


def test_rules_for_several_nodes_are_skipped_on_one_node(runs: Runs) -> None:
    assert not_passed(runs["one_node"]) == {}
    assert skipped(runs["one_node"]) == ["paths_not_shared", "paths_not_shared", "user_id_mismatches"]
    assert set(evidence(runs["one_node"], "visibility_delay").popitem()[1]) == {"node0/rank0", "node0/rank1"}


def test_facts_of_mount_and_space(runs: Runs, out: Path) -> None:
    path = str(out / "a")
    assert fact(runs["healthy"], "filesystems")[path].endswith("(node0, node1, node2)")
    space = evidence(runs["healthy"], "free_bytes")["space"][path]
    assert 0 < space["free"] < space["size"]


def test_folder_not_shared(runs: Runs) -> None:
    measurements = runs["not_shared"]
    assert not_passed(measurements) == {"paths_not_shared": Outcome.FAIL}
    assert set(skipped(measurements)) > PROBE_METRICS
    (reason,) = evidence(measurements, "paths_not_shared")["not_shared"].values()
    assert all(f"node{rank}" in reason for rank in range(3))


def test_run_directory_not_shared_is_a_warning(runs: Runs) -> None:
    assert not_passed(runs["own_run_directories"]) == {"paths_not_shared": Outcome.WARN}


def test_one_of_two_paths_not_shared(runs: Runs, out: Path) -> None:
    measurements = runs["one_of_two_not_shared"]
    assert not_passed(measurements) == {"paths_not_shared": Outcome.FAIL}
    assert list(evidence(measurements, "paths_not_shared")["not_shared"]) == [str(out / "own0")]
    assert list(evidence(measurements, "visibility_delay")) == [str(out / "a")]


@pytest.mark.parametrize(
    ("scenario", "node", "reason"),
    [
        ("missing", "node0, node1, node2", "absent: No such file or directory"),
        ("missing_on_one", "(node1)", "partial1: No such file or directory"),
        ("no_folder", "(node0, node1, node2)", "Not a directory"),
        ("flock_hangs", "(node1)", "flock"),
    ],
)
def test_unusable_path_has_node_and_reason(runs: Runs, scenario: str, node: str, reason: str) -> None:
    assert not_passed(runs[scenario]) == {"paths_unusable": Outcome.FAIL}
    (text,) = evidence(runs[scenario], "paths_unusable").values()
    assert node in text
    assert reason in text


@mounts.needs_mount
@pytest.mark.parametrize(
    ("scenario", "reason"), [("full", "No space left on device"), ("readonly", "Read-only file system")]
)
def test_full_or_read_only_filesystem_on_one_node(runs: Runs, scenario: str, reason: str) -> None:
    assert not_passed(runs[scenario]) == {"paths_unusable": Outcome.FAIL}
    (text,) = evidence(runs[scenario], "paths_unusable").values()
    assert reason in text
    assert "(node1)" in text


@mounts.needs_mount
def test_little_free_space_is_a_warning(runs: Runs) -> None:
    assert not_passed(runs["little"]) == {"free_bytes": Outcome.WARN, "free_inodes": Outcome.WARN}
    assert value(runs["little"], "free_bytes") <= 4 * 2**20
    assert value(runs["little"], "free_inodes") < 200
    assert "local (tmpfs)" in str(fact(runs["little"], "filesystems"))


@pytest.mark.parametrize(
    ("scenario", "metric", "outcome", "detail"),
    [
        ("no_flock", "flock_failures", Outcome.WARN, "node"),
        ("flock_unsupported", "flock_failures", Outcome.WARN, "No locks available (node0, node1, node2)"),
        ("no_fcntl", "fcntl_failures", Outcome.WARN, "node"),
        ("partial_rename", "rename_failures", Outcome.FAIL, "node0"),
        ("no_append", "append_failures", Outcome.WARN, "of 30 records"),
        ("stale_pages", "mmap_failures", Outcome.FAIL, "node1"),
        ("other_owner", "owner_mismatches", Outcome.FAIL, "1:"),
    ],
)
def test_failed_probe(runs: Runs, scenario: str, metric: str, outcome: Outcome, detail: str) -> None:
    assert not_passed(runs[scenario]) == {metric: outcome}
    assert value(runs[scenario], metric) == 1
    (text,) = evidence(runs[scenario], metric).values()
    assert detail in text
    (verdict,) = (verdict for verdict in verdicts(runs[scenario]) if verdict.outcome is outcome)
    assert text[:20] in verdict.evidence


def test_locks_without_contention_are_untested(runs: Runs, out: Path) -> None:
    assert not_passed(runs["never_contended"]) == {"flock_failures": Outcome.ERROR, "fcntl_failures": Outcome.ERROR}
    (reason,) = (absent.reason for absent in runs["never_contended"][0].absent if absent.metric == "flock_failures")
    assert reason.startswith(str(out / "a"))


def test_late_visibility(runs: Runs) -> None:
    assert not_passed(runs["late_names"]) == {"visibility_delay": Outcome.WARN}
    cached_ms, timeout_ms = filesystem_driver.CACHED_S * 1e3, shared_files.VISIBILITY_TIMEOUT_S * 1e3
    assert cached_ms <= value(runs["late_names"], "visibility_delay") < timeout_ms
    (delays,) = evidence(runs["late_names"], "visibility_delay").values()
    assert delays["node0"] < cached_ms <= delays["node1"]


def test_invisible_name_has_the_timeout_as_delay(runs: Runs) -> None:
    assert value(runs["never_seen"], "visibility_delay") == 300


def test_other_user_id_on_one_node(runs: Runs) -> None:
    assert not_passed(runs["other_user"])["user_id_mismatches"] is Outcome.FAIL
    assert evidence(runs["other_user"], "user_id_mismatches").endswith("(node2)")
    assert "1234" in evidence(runs["other_user"], "user_id_mismatches")


def test_files_not_removed(runs: Runs, out: Path) -> None:
    (path_left,) = fact(runs["rmtree_fails"], "files_not_removed").values()
    assert [str(path) for path in out.glob("**/seatrial-*")] == [path_left]
    assert fact(runs["healthy"], "files_not_removed") == {}


def test_filesystem_names(tmp_path: Path) -> None:
    line = "36 25 0:32 / {} rw,noatime - {} {} rw,flock"
    for kind, source, name in (("lustre", "10.0.0.1@tcp:/scratch", "Lustre"), ("pmemfs", "x", "unknown type pmemfs")):
        trees.write(tmp_path, {"proc/self/mountinfo": line.format(tmp_path.resolve(), kind, source)})
        volume = read_volume(tmp_path, str(tmp_path))
        assert volume.mount == f"{name}, {source} at {tmp_path.resolve()} with rw,noatime,flock"


def test_relative_path_is_an_error() -> None:
    with pytest.raises(ValueError, match="'data'"):
        CHECK.options.model_validate({"paths": ["data"]})
