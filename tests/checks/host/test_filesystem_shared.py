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
PROBES = ("rename", "append", "flock", "fcntl", "mmap", "owner")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def runs(out: Path) -> Iterator[Runs]:
    for folder in ("a", "b", "c", "own0", "own1", "own2", "there0", "there2"):
        (out / folder).mkdir()
    (out / "file").write_text("no folder")

    def at(*folders: str, faults: tuple[str, ...] = ("hurry",), **others: Any) -> Scenario:
        return Scenario(NAME, options={"paths": [str(out / folder) for folder in folders]}, faults=faults, **others)

    faulty = (
        *("no_flock", "no_fcntl", "flock_unsupported", "never_contended", "partial_rename", "no_append"),
        *("stale_pages", "other_owner", "other_user"),
    )
    scenarios = {fault: at("a", faults=("hurry", fault)) for fault in faulty} | {
        "healthy": at("a", faults=()),
        "two_ranks_a_node": at("a", nodes=TWO),
        "one_node": at("a", nodes=ONE),
        "run_directory": Scenario(NAME, faults=("hurry",)),
        "own_run_directories": Scenario(NAME, faults=("hurry",), folder="{rank}"),
        "two_paths": at("a", "b"),
        "not_shared": at("own{rank}"),
        "one_of_two_not_shared": at("a", "own{rank}"),
        "missing": at("absent"),
        "missing_on_one": at("there{rank}"),
        "no_folder": at("file"),
        "flock_hangs": at("a", faults=("hurry", "flock_hangs", "brief_locks")),
        "late_names": at("a", faults=("late_names",)),
        "never_seen": at("a", faults=("hurry", "late_names")),
        "remains": at("c", faults=("hurry", "remains")),
    }
    with ExitStack() as stack:
        if mounts.CAN_MOUNT:
            mount_faulty(out, stack)
            scenarios |= {"full": at("full{rank}"), "readonly": at("readonly{rank}"), "little": at("little")}
        yield run(out, filesystem_driver.__name__, scenarios)


def mount_faulty(out: Path, stack: ExitStack) -> None:
    """One of three nodes gets a filesystem that is full, or read-only; all share one that has little room."""
    for folder in ("full0", "full2", "readonly0", "readonly2"):
        (out / folder).mkdir()
    full = stack.enter_context(mounts.tmpfs(out / "full1", "size=4k"))
    (full / "filler").write_bytes(bytes(4096))
    stack.enter_context(mounts.tmpfs(out / "readonly1", "ro"))
    stack.enter_context(mounts.tmpfs(out / "little", "size=4m,nr_inodes=200"))


def verdicts(measurements: list[Measurement]) -> list[Verdict]:
    assert [measurement.error for measurement in measurements] == [None] * len(measurements)
    return judge_check(CHECK, measurements, {}, "t")


def broken(measurements: list[Measurement]) -> dict[str, Outcome]:
    quiet = (Outcome.PASS, Outcome.SKIP)
    return {found.metric: found.outcome for found in verdicts(measurements) if found.outcome not in quiet}


def skipped(measurements: list[Measurement]) -> list[str]:
    return [found.metric for found in verdicts(measurements) if found.outcome is Outcome.SKIP]


def fact(measurements: list[Measurement], name: str) -> Any:
    return measurements[0].facts[name]


def value(measurements: list[Measurement], name: str) -> float:
    (found,) = (metric.value for metric in measurements[0].metrics if metric.name == name)
    return found


@pytest.mark.parametrize("scenario", ["healthy", "two_ranks_a_node", "run_directory", "two_paths"])
def test_a_shared_filesystem_passes_every_rule_in_time(runs: Runs, scenario: str) -> None:
    assert broken(runs[scenario]) == {}
    assert skipped(runs[scenario]) == ["paths_not_shared"]  # there are two rules: for promised paths, and for others
    assert max(measurement.seconds for measurement in runs[scenario]) < 15  # without waiting for anything in vain


def test_one_rank_speaks_and_every_metric_is_declared(runs: Runs) -> None:
    lead, *others = runs["healthy"]
    assert {metric.name: metric.unit for metric in lead.metrics} == CHECK.metrics
    assert [(other.metrics, other.facts) for other in others] == [((), {}), ((), {})]


def test_on_one_node_only_what_needs_several_is_skipped(runs: Runs) -> None:
    assert broken(runs["one_node"]) == {}
    assert skipped(runs["one_node"]) == ["paths_not_shared", "paths_not_shared", "user_id_mismatches"]
    assert set(fact(runs["one_node"], "visibility_ms").popitem()[1]) == {"node0/rank0", "node0/rank1"}


def test_the_filesystem_is_described_with_its_room(runs: Runs, out: Path) -> None:
    path = str(out / "a")
    assert fact(runs["healthy"], "filesystems")[path].endswith("(node0, node1, node2)")
    assert 0 < fact(runs["healthy"], "space")[path]["free"] < fact(runs["healthy"], "space")[path]["size"]


def test_separate_folders_under_one_name_fail_and_nothing_else_is_tried(runs: Runs) -> None:
    found = runs["not_shared"]
    assert broken(found) == {"paths_not_shared": Outcome.FAIL}
    assert {f"{probe}_faults" for probe in PROBES} < set(skipped(found))
    (said,) = fact(found, "not_shared").values()
    assert said.split("; ") == [f"node{rank} saw only what node{rank} wrote" for rank in range(3)]


def test_run_directories_that_are_not_shared_are_only_a_warning(runs: Runs) -> None:
    assert broken(runs["own_run_directories"]) == {"paths_not_shared": Outcome.WARN}


def test_one_path_of_two_is_blamed_and_the_other_examined(runs: Runs, out: Path) -> None:
    found = runs["one_of_two_not_shared"]
    assert broken(found) == {"paths_not_shared": Outcome.FAIL}
    assert list(fact(found, "not_shared")) == [str(out / "own0")]
    assert list(fact(found, "visibility_ms")) == [str(out / "a")]


@pytest.mark.parametrize(
    ("scenario", "where", "why"),
    [
        ("missing", "node0, node1, node2", "absent: No such file or directory"),
        ("missing_on_one", "(node1)", "there1: No such file or directory"),
        ("no_folder", "(node0, node1, node2)", "Not a directory"),
        ("flock_hangs", "(node1)", "flock: no answer within"),
    ],
)
def test_a_path_that_cannot_be_used_is_named_with_node_and_reason(
    runs: Runs, scenario: str, where: str, why: str
) -> None:
    assert broken(runs[scenario]) == {"paths_unusable": Outcome.FAIL}
    (said,) = fact(runs[scenario], "unusable").values()
    assert where in said
    assert why in said


@mounts.needs_mount
@pytest.mark.parametrize(
    ("scenario", "why"), [("full", "No space left on device"), ("readonly", "Read-only file system")]
)
def test_a_full_or_read_only_filesystem_of_one_node_is_named(runs: Runs, scenario: str, why: str) -> None:
    assert broken(runs[scenario]) == {"paths_unusable": Outcome.FAIL}
    (said,) = fact(runs[scenario], "unusable").values()
    assert why in said
    assert "(node1)" in said


@mounts.needs_mount
def test_little_room_is_a_warning(runs: Runs) -> None:
    assert broken(runs["little"]) == {"free_bytes": Outcome.WARN, "free_inodes": Outcome.WARN}
    assert value(runs["little"], "free_bytes") <= 4 * 2**20
    assert value(runs["little"], "free_inodes") < 200
    assert "local (tmpfs)" in str(fact(runs["little"], "filesystems"))


@pytest.mark.parametrize(
    ("scenario", "probe", "outcome", "said"),
    [
        ("no_flock", "flock", Outcome.WARN, "granted while another held it"),
        ("flock_unsupported", "flock", Outcome.WARN, "No locks available (node0, node1, node2)"),
        ("no_fcntl", "fcntl", Outcome.WARN, "times by node"),
        ("partial_rename", "rename", Outcome.FAIL, "missing or partial while node0 replaced it"),
        ("no_append", "append", Outcome.WARN, "of 30 records lost"),
        ("stale_pages", "mmap", Outcome.FAIL, "node1 read old content of node0"),
        ("other_owner", "owner", Outcome.FAIL, "1:"),
    ],
)
def test_a_promise_that_is_broken_is_found_and_said(
    runs: Runs, scenario: str, probe: str, outcome: Outcome, said: str
) -> None:
    assert broken(runs[scenario]) == {f"{probe}_faults": outcome}
    assert value(runs[scenario], f"{probe}_faults") == 1
    (text,) = fact(runs[scenario], probe).values()
    assert said in text
    (verdict,) = (found for found in verdicts(runs[scenario]) if found.outcome is outcome)
    assert said[:20] in verdict.evidence


def test_locks_that_nobody_ever_contended_prove_nothing(runs: Runs) -> None:
    assert broken(runs["never_contended"]) == {"flock_failures": Outcome.ERROR, "fcntl_failures": Outcome.ERROR}
    assert "no two actors ever met" in str(fact(runs["never_contended"], "flock_untested"))


def test_a_name_that_shows_late_is_timed(runs: Runs) -> None:
    assert broken(runs["late_names"]) == {"visibility_delay": Outcome.WARN}
    cached_ms, patience_ms = filesystem_driver.CACHED_S * 1e3, shared_files.VISIBILITY_TIMEOUT_S * 1e3
    assert cached_ms <= value(runs["late_names"], "visibility_delay") < patience_ms
    (delays,) = fact(runs["late_names"], "visibility_ms").values()
    assert delays["node0"] < cached_ms <= delays["node1"]


def test_a_name_that_never_shows_counts_as_the_longest_wait(runs: Runs) -> None:
    assert value(runs["never_seen"], "visibility_delay") == 300


def test_a_user_who_is_another_elsewhere_is_named(runs: Runs) -> None:
    assert broken(runs["other_user"])["user_id_mismatches"] is Outcome.FAIL
    assert fact(runs["other_user"], "users").endswith("(node2)")
    assert "1234" in fact(runs["other_user"], "users")


def test_nothing_remains_but_where_it_could_not_be_removed(runs: Runs, out: Path) -> None:
    (left,) = fact(runs["remains"], "left_behind").values()
    assert [str(path) for path in out.glob("**/seatrial-*")] == [left]
    assert fact(runs["healthy"], "left_behind") == {}


def test_the_type_of_a_filesystem_is_known_by_its_name(tmp_path: Path) -> None:
    line = "36 25 0:32 / {} rw,noatime - {} {} rw,flock"
    for kind, source, name in (("lustre", "10.0.0.1@tcp:/scratch", "Lustre"), ("pmemfs", "x", "unknown type pmemfs")):
        trees.write(tmp_path, {"proc/self/mountinfo": line.format(tmp_path.resolve(), kind, source)})
        found = read_volume(tmp_path, str(tmp_path))
        assert found.mount == f"{name}, {source} at {tmp_path.resolve()} with rw,noatime,flock"


def test_a_path_must_be_the_same_on_every_node() -> None:
    with pytest.raises(ValueError, match="'data' is not an absolute path"):
        CHECK.options.model_validate({"paths": ["data"]})
