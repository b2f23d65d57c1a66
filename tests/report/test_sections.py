"""Parts that only the HTML report has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from seatrial.model import Measurement, Metric, Outcome, Timing, Verdict
from seatrial.report.sections import (
    fact_rows,
    is_pair_table,
    is_table,
    make_rug,
    node_groups,
    node_map,
    pretty,
    settings,
    subject_table,
    time_bar,
)
from seatrial.report.view import WORST_SUBJECTS, chapters
from tests.report import samples


def test_the_time_bar_covers_the_whole_wall_time() -> None:
    trial = samples.accepted().model_copy(
        update={
            "seconds": 100.0,
            "timings": (
                Timing(name="start", kind="overhead", seconds=10),
                Timing(name="b", kind="check", seconds=20),
                Timing(name="a", kind="check", seconds=60),
            ),
        }
    )
    bar = time_bar(trial)
    assert [(part.name, part.left, part.width) for part in bar.parts] == [
        ("a", 0, 60),
        ("b", 60, 20),
        ("start", 80, 10),
        ("not accounted for", 90, 10),
    ]
    assert (bar.check_seconds, bar.overhead_seconds, bar.overhead_percent) == (80, 20, 20)


def test_the_time_bar_adds_up_the_sessions_of_a_resumed_trial() -> None:
    two_sessions = tuple(Timing(name="discover", kind="overhead", seconds=seconds) for seconds in (1.0, 2.0))
    trial = samples.accepted().model_copy(update={"seconds": 3.0, "timings": two_sessions})
    assert [(part.name, part.seconds, part.width) for part in time_bar(trial).parts] == [("discover", 3.0, 100.0)]


def test_the_time_bar_of_an_empty_trial_is_empty() -> None:
    bar = time_bar(samples.accepted().model_copy(update={"seconds": 0.0, "timings": ()}))
    assert (bar.parts, bar.overhead_percent) == ((), 0)


def test_the_node_map_shows_the_worst_outcome_of_nodes_and_devices() -> None:
    nodes = {node.name: node for node in node_map(samples.large_cluster())}
    assert len(nodes) == 64
    assert list(nodes)[:2] == ["node01", "node02"]
    outcomes = {device.index: device.outcome for device in nodes["node17"].devices}
    assert (len(outcomes), outcomes["5"], outcomes["4"]) == (8, Outcome.FAIL, Outcome.PASS)
    assert nodes["node41"].outcome is Outcome.WARN
    assert nodes["node51"].devices[7].outcome is Outcome.ERROR


def test_the_table_by_subject_has_the_worst_subjects_of_many_first() -> None:
    checks = {check.name: check for chapter in chapters(samples.large_cluster()) for check in chapter.checks}
    table = subject_table(checks["gpu.inventory"])
    assert table is not None
    assert table.figures[0].metric == "ecc_uncorrected"
    assert len(table.rows) == WORST_SUBJECTS
    assert [(subject, cells[0]) for subject, cells in table.rows[:2]] == [
        ("node17/gpu5", ("3", Outcome.FAIL)),
        ("node42/gpu2", ("3", Outcome.FAIL)),
    ]
    assert table.rows[2][1][0] == ("0", None)


def test_a_check_with_one_subject_has_no_table_by_subject() -> None:
    checks = {check.name: check for chapter in chapters(samples.accepted()) for check in chapter.checks}
    assert subject_table(checks["host.inventory"]) is None


def test_a_row_has_a_rug_plot_only_if_values_differ() -> None:
    checks = {check.name: check for chapter in chapters(samples.accepted()) for check in chapter.checks}
    has_rug = {row.metric: make_rug(row) is not None for row in checks["gpu.inventory"].figures}
    assert has_rug == {
        "ecc_uncorrected": False,
        "pcie_width": False,
        "temperature": True,
        "power_limit": False,
        "memory": False,
    }


def test_a_fact_that_differs_has_its_values_with_subjects() -> None:
    measurements = tuple(
        Measurement(
            check="x",
            subject=f"node{number}",
            facts={"method": "text", "driver": "570" if number == 3 else "580", "os": "U"},
        )
        for number in (10, 2, 3)
    )
    rows = {row.name: row.values for row in fact_rows(measurements)}
    assert rows == {
        "driver": (("580", ("node2", "node10")), ("570", ("node3",))),
        "os": (("U", ("node10", "node2", "node3")),),
    }


def test_equal_facts_of_different_types_are_different_values() -> None:
    measurements = tuple(Measurement(check="x", subject="n", facts={"f": value}) for value in (1, "1", True))
    assert [value for value, _ in fact_rows(measurements)[0].values] == [1, "1", True]


def test_a_setting_without_an_origin_has_that_of_its_parent() -> None:
    config: dict[str, Any] = {"name": "t", "limits": {"a": 1, "b": {}}, "checks": {"x.y": {"on": True}}, "unset": None}
    origins = {"name": "trial file", "limits": "default", "checks.x.y.on": "--set"}
    assert list(settings(config, origins)) == [
        ("name", "t", "trial file"),
        ("limits.a", "1", "default"),
        ("limits.b", "none", "default"),
        ("checks.x.y.on", "yes", "--set"),
        ("unset", "–", "not recorded"),
    ]


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        ("text", "", "text"),
        (True, "", "yes"),
        (None, "", "–"),
        ([], "", "none"),
        (["a", 1, 2.5], "", "a, 1, 2.5"),
        (895.1152083416976, "", "895.1"),
        (65536, "", "65536"),
        (2**34, "total_bytes", "16 GiB"),
        ([[1]], "", "[\n [\n  1\n ]\n]"),
    ],
)
def test_pretty_formats_values(value: Any, name: str, expected: str) -> None:
    assert pretty(value, name) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"a": 1}], True),
        ({"k": {"a": 1}}, True),
        ([], False),
        ([{}], False),
        ([{"a": 1}, 2], False),
        ({"k": 1}, False),
        ("t", False),
    ],
)
def test_lists_and_mappings_of_records_are_tables(value: Any, expected: bool) -> None:
    assert is_table(value) is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"gpus": ["a", "b"], "gb_s": [[None, 1.5], [2.0, None]]}, True),
        ({"gpus": ["a", "b"], "gb_s": [[None, 1.5]]}, False),
        ({"gpus": ["a"], "gb_s": [1.5]}, False),
        ({"gpus": 8, "gb_s": []}, False),
        ({"gpus": ["a"], "gb_s": [[None]], "more": 1}, False),
        ([1], False),
    ],
)
def test_a_square_matrix_with_gpu_names_is_a_pair_table(value: Any, expected: bool) -> None:
    assert is_pair_table(value) is expected


def test_a_subject_without_a_value_has_an_empty_cell() -> None:
    metrics = [
        Metric(name=name, value=1, unit="s", subject=f"n/gpu{gpu}")
        for name in "ab"
        for gpu in range(3)
        if f"{name}{gpu}" != "b2"
    ]
    missing = Verdict(check="train.cnn", subject="n/gpu2", metric="b", outcome=Outcome.ERROR, detail="not measured")
    measurement = Measurement(check="train.cnn", subject="n", metrics=tuple(metrics))
    trial = samples.accepted().model_copy(update={"measurements": (measurement,), "verdicts": (missing,), "jobs": ()})
    table = subject_table(chapters(trial)[0].checks[0])
    assert table is not None
    columns = [figure.metric for figure in table.figures]
    assert table.rows[2][1][columns.index("b")] == ("", Outcome.ERROR)


def test_the_map_of_many_nodes_shows_the_bad_ones() -> None:
    trial = samples.large_cluster()
    renamed = [replace(v, subject=f"x{v.subject}") for v in trial.verdicts if v.subject.startswith("node0")]
    (group,) = node_groups(trial.model_copy(update={"verdicts": (*trial.verdicts, *renamed)}))
    assert "node17" in {node.name for node in group.nodes}
    assert "xnode01" not in {node.name for node in group.nodes}
    assert group.healthy_count + len(group.nodes) == 64 + 9
