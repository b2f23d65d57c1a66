"""The smallest fault that gates see which judge every node by itself; of others: test_insights."""

from __future__ import annotations

import runpy
from typing import Any

from seatrial.analysis import trial_insights
from seatrial.checks import catalog
from seatrial.config.schema import CheckSettings, Config
from seatrial.model import Insight, Measurement, Metric, Threshold
from tests.analysis.test_insights import collective
from tests.analysis.test_insights import told as told_of_all_reduce
from tests.hardware.test_links import gpus
from tests.paths import BENCHMARKS

SCRIPT = BENCHMARKS / "judging.py"
LINK = 370.8 / 18  # GB/s that NCCL plans with of each NVLink of an H200
EACH, PAIRS = "collectives.each_node", "collectives.gpu_pairs"


def node(check: str, number: int, ranks: int, size: str, value: float, gpu: str = "NVIDIA H200") -> Measurement:
    metric = Metric(name=f"busbw.{size}", value=value, unit="GB/s", subject=f"n{number}")
    facts: dict[str, Any] = {"backend": "nccl", "gpu": gpu, "world_size": ranks, "nodes": 1}
    return Measurement(check=check, subject=f"n{number}/gpu0", metrics=(metric,), facts=facts)


def gates(*measurements: Measurement, **expect: str) -> list[Insight]:
    """``expect``: of the check of the first, by metric, whose dots are written as ``__``."""
    check = measurements[0].check
    limits = {metric.replace("__", "."): Threshold.parse(text) for metric, text in expect.items()}
    config = Config(name="mine", checks={check: CheckSettings(expect=limits)})
    return [
        one for one in trial_insights(config, measurements, catalog()) if one.title == "gate" and one.check == check
    ]


def carried(links: int, per_busbw: float) -> float:
    """GB/s of busbw that so many NVLinks carry."""
    return links * LINK / per_busbw


def test_every_nodes_own_all_reduce_is_told_once_and_in_links() -> None:
    (gate,) = gates(*(node(EACH, number, 4, "8GiB", 360) for number in range(64)), gpus(18, 18, 18, 18))
    assert gate.text == (
        "busbw.8GiB >= 327 GB/s: 90% of the 363.3 GB/s of SKU NVIDIA H200 SXM; "
        "the least that it sees is 3 of a GPU's 18 NVLinks down"
    )
    assert carried(18 - 2, 1) > 0.9 * 363.3 > carried(18 - 3, 1)  # Ring: a GPU's links carry busbw


def test_where_the_switches_sum_fewer_links_carry_the_floor() -> None:
    """A GPU sends S for the sum and S/8 of the result, and busbw is 2 · 7/8 · S over the time: 9/14 of it."""
    (gate,) = gates(node(EACH, 0, 8, "8GiB", 470), node(EACH, 1, 8, "8GiB", 470), gpus(*[18] * 8))
    assert gate.text == (
        "busbw.8GiB >= 350 GB/s: 74% of the 473 GB/s of SKU NVIDIA H200 SXM; "
        "the least that it sees is 8 of a GPU's 18 NVLinks down where the switches sum"
    )
    assert carried(18 - 7, 9 / 14) > 350 > carried(18 - 8, 9 / 14)
    assert carried(18, 1) < 473  # so that Ring cannot be what came to it
    alone = told_of_all_reduce(collective("all_reduce", 473, 8, 1), gpus(*[18] * 8))["gate"]
    assert alone.text == gate.text


def test_pairs_of_gpus_are_told_once_for_each_model() -> None:
    mine = [node(PAIRS, number, 2, "1GiB", 360) for number in range(3)]
    other = [node(PAIRS, number, 2, "1GiB", 20, gpu="Tesla T4") for number in range(3, 6)]
    (gate,) = gates(*mine, *other, gpus(18, 18))  # of the other no figure is known, and no gate judges it
    assert gate.text == (
        "busbw.1GiB >= 323.9 GB/s: 90% of the 359.9 GB/s of SKU NVIDIA H200 SXM; "
        "the least that it sees is 3 of a GPU's 18 NVLinks down"
    )
    assert carried(18 - 2, 1) > 0.9 * 359.9 > carried(18 - 3, 1)
    known, asked = gates(*mine, *other, gpus(18, 12), busbw__1GiB=">= 15 GB/s")
    assert "of a GPU's 18 NVLinks down" in known.text  # the model's, where a GPU of another model has 12
    assert asked.text.startswith("busbw.1GiB >= 15 GB/s: 75% of the 20 GB/s of what was measured here; ")


def test_where_no_nvlinks_are_known_it_is_a_share() -> None:
    (gate,) = gates(node(PAIRS, 0, 2, "1GiB", 360))
    assert gate.text.endswith("; the least that it sees is 10% missing")


def test_what_was_not_measured_has_no_gate() -> None:
    assert gates(node(PAIRS, 0, 2, "64MiB", 250), gpus(18, 18)) == []
    measured = node(PAIRS, 0, 2, "1GiB", 360)
    assert gates(measured.model_copy(update={"facts": {**measured.facts, "backend": "gloo"}})) == []
    assert gates(measured.model_copy(update={"facts": {}})) == []


def test_a_thousand_nodes_have_one_line_a_rule() -> None:
    script = runpy.run_path(str(SCRIPT))
    config, _, measurements = script["enlarged"](script["load_trial"](script["RECORD"]), 64, 8)
    of_pairs = [one for one in measurements if one.check == PAIRS and one.metrics]
    assert len(of_pairs) >= 64
    every = [node(EACH, number, 8, "8GiB", 470) for number in range(64)]
    found = [one for one in trial_insights(config, [*measurements, *every], catalog()) if one.title == "gate"]
    told = [(one.check, one.text.partition(" ")[0]) for one in found if one.check in (EACH, PAIRS)]
    assert sorted(told) == sorted(
        [(EACH, "busbw.8GiB"), (PAIRS, "busbw.1GiB"), (PAIRS, "gpu_share"), (PAIRS, "path_share")]
    )
