"""Tables of facts, settings and results as text."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from pydantic import JsonValue
from rich.console import Console

from seatrial.model import Measurement
from seatrial.report.tables import Table, fact_tables, fact_text, print_tables, settings, shared_facts
from tests.report import samples


def texts(facts: dict[str, Any]) -> list[str]:
    return [table.text for table in fact_tables(facts, "gpu")]


def test_columns_are_aligned_below_the_title() -> None:
    assert Table("T", [("a", "1"), ("long", "2")], ("name", "value")).text == "T\nname  value\na     1\nlong  2"


def test_each_list_of_records_is_a_table_and_an_inner_list_its_length() -> None:
    links = [{"link": 0}, {"link": 1}]
    assert texts({"total_bytes": 2**30, "gpus": [{"index": 0, "ecc": True, "links": links}, {"index": 1}]}) == [
        "gpu\ntotal  1 GiB",
        "gpu gpus\nindex  ecc  links\n0      yes  2\n1",
    ]


def test_bandwidths_of_gpu_pairs_are_a_table() -> None:
    matrix = {"gpus": ["gpu0", "gpu1"], "gb_s": [[None, 780.25], [781.0, None]]}
    assert texts({"pairs": matrix}) == ["gpu pairs\nGB/s  gpu0  gpu1\ngpu0  –     780.2\ngpu1  781   –"]
    assert texts({"pairs": {"gpus": 8, "gb_s": []}}) == ["gpu\npairs  gpus 8"]


def test_a_fact_that_differs_has_its_values_with_subjects_the_most_frequent_first() -> None:
    measurements = [
        Measurement(
            check="x", subject=f"node{n}", facts={"method": "m", "driver": "570" if n == 3 else "580", "os": "U"}
        )
        for n in (10, 2, 3)
    ]
    shared, differing = shared_facts(measurements, "method")
    assert shared.rows == [("os", "U")]
    assert differing.rows == [("driver", "node2, node10", "580"), ("driver", "node3", "570")]


def test_equal_facts_of_different_types_are_different_values() -> None:
    measurements = [Measurement(check="x", subject="n", facts={"f": value}) for value in (1, "1", True)]
    assert [row[2] for row in shared_facts(measurements)[0].rows] == ["1", "1", "yes"]


def test_a_fact_that_many_measurements_have_as_one_object_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: JsonValue = {"torch": "2.13", "nccl": "2.28"}
    measurements = [Measurement(check="x", subject=f"n{n}", facts={}) for n in range(100)]
    for measurement in measurements:
        measurement.facts["versions"] = versions
    read: list[object] = []

    def dumps(value: object, **_: object) -> str:
        read.append(value)
        return repr(value)

    monkeypatch.setattr(json, "dumps", dumps)
    assert [table.rows for table in shared_facts(measurements)] == [[("versions", "torch 2.13, nccl 2.28")]]
    assert read == [versions]


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
        ([], "", ""),
        (["a", 1, 2.5], "", "a, 1, 2.5"),
        (895.1152083416976, "", "895.1"),
        (2**34, "total_bytes", "16 GiB"),
        ({"a": 1, "b_bytes": 2**30, "c": None}, "", "(a 1, b 1 GiB)"),
    ],
)
def test_a_fact_is_one_line(value: Any, name: str, expected: str) -> None:
    assert fact_text(value, name) == expected


def test_outcomes_have_a_colour_and_hostile_cells_no_markup() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard")
    print_tables([Table("T", [("FAIL", samples.HOSTILE)])], console)
    assert "\x1b[1;31mFAIL" in file.getvalue()
    assert "\x1b]8" not in file.getvalue()
