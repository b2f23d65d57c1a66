"""Verdicts on the all-reduce within each node; real groups: test_real_groups.py."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from seatrial.checks import catalog
from seatrial.checks.fabric.each_node import CHECK, REFERENCE_METRIC
from seatrial.model import Outcome
from tests.checks.fabric.verdicts import outcomes

FACTS = {"gpu": "unknown GPU", "world_size": 8, "nodes": 1}
ALONE = {"node_share": "no other node has the same GPUs"}


def test_unknown_gpu_is_unjudged_and_cpu_is_skipped() -> None:
    figures = {f"{REFERENCE_METRIC} node0": 400.0, "wrong_elements node0": 0, "sizes_not_allocated node0": 0}
    assert outcomes(CHECK, figures, ALONE, backend="nccl", **FACTS)[REFERENCE_METRIC] is Outcome.UNJUDGED
    assert outcomes(CHECK, figures, ALONE, backend="gloo", **FACTS)[REFERENCE_METRIC] is Outcome.SKIP


def test_wrong_data_fails_and_size_not_allocated_is_an_error() -> None:
    figures = {f"{REFERENCE_METRIC} node0": 400.0, "wrong_elements node0": 1, "sizes_not_allocated node0": 2}
    judged = outcomes(CHECK, figures, ALONE, backend="nccl", **FACTS)
    assert (judged["wrong_elements"], judged["sizes_not_allocated"]) == (Outcome.FAIL, Outcome.ERROR)


@pytest.mark.parametrize("size", ["6B", "0B"])
@pytest.mark.parametrize(
    "name", ["each_node", "gpu_pairs", "localization", "nccl_settings", "pairs", "rails", "scaling"]
)
def test_size_must_be_a_whole_number_of_elements(name: str, size: str) -> None:
    """Otherwise the rate would be computed from more bytes than are sent."""
    with pytest.raises(ValidationError, match="size"):
        catalog()[f"collectives.{name}"].options.model_validate({"size": size})


@pytest.mark.parametrize(("share", "outcome"), [(0.85, Outcome.FAIL), (0.98, Outcome.PASS)])
def test_a_node_slower_than_another_of_its_kind_fails(share: float, outcome: Outcome) -> None:
    figures = {f"{REFERENCE_METRIC} node0": 402.0, "node_share node0": share}
    assert outcomes(CHECK, figures, backend="nccl", **FACTS)["node_share"] is outcome


def test_a_node_without_others_of_its_kind_is_not_compared() -> None:
    figures = {f"{REFERENCE_METRIC} node0": 402.0}
    assert outcomes(CHECK, figures, ALONE, backend="nccl", **FACTS)["node_share"] is Outcome.SKIP
