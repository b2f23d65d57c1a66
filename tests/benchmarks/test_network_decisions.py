"""benchmarks/network_decisions.py with few draws: healthy clusters are accepted, faults rejected by a collective."""

from __future__ import annotations

import pytest
from benchmarks.network_decisions import FAULTS, LINKS_OF_TWO_NODES, Machine, count_decisions, healthy_shares


@pytest.mark.parametrize(
    ("gpu", "network", "ports", "gbps", "nodes"),
    [
        ("NVIDIA H200", "InfiniBand", 8, 400, 2),
        ("NVIDIA H200", "Unspecified", 16, 200, 4),
        ("NVIDIA B200", "Ethernet", 8, 400, 16),
    ],
)
def test_each_case_has_the_wanted_decision(gpu: str, network: str, ports: int, gbps: float, nodes: int) -> None:
    cases = {**FAULTS, **(LINKS_OF_TWO_NODES if nodes == 2 else {})}
    rows = list(count_decisions(Machine(gpu, network, ports, gbps, nodes), 2, cases))
    assert {row["case"]: row["good"] for row in rows} == dict.fromkeys(cases, 2)


def test_healthy_shares_are_those_of_published_runs() -> None:
    shares = healthy_shares()
    assert min(shares["all_reduce"]) == pytest.approx(0.794, abs=0.001)  # without the run with software of 2023
    assert min(shares["reduce_scatter"]) == pytest.approx(0.753, abs=0.001)
