"""benchmarks/published_figures.py: the committed table, and figures in which the fault is known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import published_figures
from seatrial.util import data_files
from tests.paths import ROOT

FIGURE = {
    "op": "all_gather",
    "size": "1GiB",
    "busbw": 364.0,
    "gpu": "H100 SXM",
    "gpus_per_node": 8,
    "nodes": 2,
    "fabric": "IB",
    "nics": "8x400",
    "verdict": "healthy",
    "source": "here",
}


def rows() -> list[published_figures.Row]:
    figures = data_files.parse(published_figures.FIGURES.read_text(encoding="utf-8"))
    return [published_figures.judged(figure) for figure in figures]


def test_published_figures_meet_the_requirements() -> None:
    found = rows()
    assert published_figures.meets_requirements(found)
    modelled = [row for row in found if row.outcome]
    assert len(modelled) >= 230
    assert not [row for row in modelled if row.figure["verdict"] == "slow" and row.outcome == "PASS"]
    assert all(row.explanation for row in modelled if row.is_miss)
    assert all(row.outcome or row.reason for row in found)


def test_the_committed_table_is_that_of_the_script() -> None:
    found = rows()
    page = (ROOT / "docs/results/published-figures.md").read_text(encoding="utf-8")
    assert page == published_figures.markdown(found), (
        "run: python benchmarks/published_figures.py --json docs/results/published-figures.json "
        "--markdown docs/results/published-figures.md"
    )
    committed = json.loads((ROOT / "docs/results/published-figures.json").read_text(encoding="utf-8"))
    assert [row["outcome"] for row in committed] == [row.outcome for row in found]


@pytest.mark.parametrize(("busbw", "outcome"), [(364, "PASS"), (310, "WARN"), (200, "FAIL"), (101, "FAIL")])
def test_outcome_by_share(busbw: float, outcome: str) -> None:
    assert published_figures.judged({**FIGURE, "busbw": busbw}).outcome == outcome


@pytest.mark.parametrize(
    ("gpu", "value", "outcome"),
    [("B200", 843.5, "PASS"), ("B200", 600, "FAIL"), ("H20", 138, "PASS"), ("H20", 120, "FAIL")],
)
def test_figures_of_one_node_are_judged_by_reference_values(gpu: str, value: float, outcome: str) -> None:
    shape = (
        {"op": "all_reduce", "size": "8GiB", "algo": "NVLS"} if gpu == "B200" else {"op": "gemm.bf16", "size": "8192^3"}
    )
    gpus = 8 if gpu == "B200" else 1
    figure = {**FIGURE, **shape, "gpu": gpu, "gpus_per_node": gpus, "nodes": 1, "nics": "none", "busbw": value}
    assert published_figures.judged(figure).outcome == outcome


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"nics": "not said"}, "rate of the ports"),
        ({"nodes": None}, "number of nodes"),
        ({"size": "512MiB"}, "below 1 GiB"),
        ({"size": "large"}, "size: large"),
        ({"verdict": "threshold"}, "threshold"),
        ({"gpu": "Unheard of"}, "no links"),
        ({"gpu": "GB200", "gpus_per_node": 4}, "NVLink can connect"),
    ],
)
def test_reason_of_a_figure_that_is_not_modelled(change: dict[str, Any], reason: str) -> None:
    row = published_figures.judged({**FIGURE, **change})
    assert not row.outcome
    assert reason in row.reason
