"""The table of scaling in all reports: shown for several nodes only."""

from __future__ import annotations

import io

import pytest
from pydantic import JsonValue
from rich.console import Console

from seatrial.report import html_page, markdown, terminal
from seatrial.report.scaling import scaling_table
from tests.report import samples
from tests.report.conftest import assert_golden


def test_one_node_and_all_nodes_side_by_side() -> None:
    table = scaling_table(samples.four_nodes())
    assert table
    headings = (table.node, table.two_nodes, table.cluster)
    assert headings == ("1 node (8 GPUs)", "2 nodes (16 GPUs)", "4 nodes (32 GPUs)")
    all_reduce, training = table.rows
    assert (all_reduce.gpu, all_reduce.node, all_reduce.cluster) == ("", "478.6 GB/s", "371.4 GB/s")
    assert (all_reduce.two_nodes, all_reduce.ratio) == ("466.3 GB/s", "77.6 %")
    assert (training.gpu, training.ratio) == ("31,000 tokens/s/GPU", "86.0 %")


@pytest.mark.parametrize("name", ["accepted", "rejected", "hostile", "large_cluster"])
def test_no_table_without_such_measurements(name: str) -> None:
    trial = samples.SAMPLES[name]()
    assert scaling_table(trial) is None
    assert 'id="scaling"' not in html_page.render(trial)


@pytest.mark.parametrize("value", [None, "4", True, -1, [4], 1])
def test_no_table_with_facts_of_another_type(value: JsonValue) -> None:
    trial = samples.four_nodes()
    measurements = [
        measurement.model_copy(update={"facts": {**measurement.facts, "nodes": value}})
        for measurement in trial.measurements
    ]
    assert scaling_table(trial.model_copy(update={"measurements": tuple(measurements)})) is None


def test_golden() -> None:
    trial = samples.four_nodes()
    console = Console(file=io.StringIO(), width=120, no_color=True)
    terminal.summary(trial, console)
    assert isinstance(console.file, io.StringIO)
    assert_golden("report-four-nodes.txt", console.file.getvalue())
    assert_golden("report-four-nodes.md", markdown.render(trial))


def test_html_shows_the_table() -> None:
    page = html_page.render(samples.four_nodes())
    section = page[page.index('id="scaling"') : page.index('id="map"')]
    for text in (
        "1 node (8 GPUs)",
        "2 nodes (16 GPUs)",
        "466.3",
        "4 nodes (32 GPUs)",
        "478.6",
        "86.0 %",
    ):
        assert text in section, text
