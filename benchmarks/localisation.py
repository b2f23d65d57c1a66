"""Simulates the search for slow nodes and paths, and counts the draws in which it names exactly the faulty ones.

    python benchmarks/localisation.py [--draws 1000] [--json FILE]

Each draw gives every pair of nodes the rate of its slower end times normal noise, and runs the search of
collectives.localization (hardware.pair_search) with these rates: three rounds of all nodes, then the repetitions that
the search asks for. A fault multiplies the rates of one node, of one direction of a node, or of one path. In a
bidirectional transfer the slower direction counts. ``first rounds only`` judges by the three rounds alone, without
repetitions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seatrial.hardware.pair_rates import GPU_LIMITS, Conclusion, PairRate, PairStep
from seatrial.hardware.pair_search import ROUNDS, pair_search, round_robin

NOISE, FAULT = 0.01, 0.05  # relative standard deviation of a rate; slowdown of a fault
HEALTHY_GB_S = 48.0
SIZES = (8, 16, 64, 256, 1024)
REQUIRED_SHARE = 0.99


@dataclass(frozen=True)
class Faults:
    """Factors of rates by node that sends, by node that receives, and by (sender, receiver)."""

    sends: dict[str, float]
    receives: dict[str, float]
    paths: dict[tuple[str, str], float]

    def factor(self, sender: str, receiver: str) -> float:
        of_nodes = min(self.sends.get(sender, 1.0), self.receives.get(receiver, 1.0))
        return min(of_nodes, self.paths.get((sender, receiver), 1.0))


def slow_nodes(nodes: Sequence[str], count: int, rng: np.random.Generator) -> Faults:
    slow = {str(node): 1 - FAULT for node in rng.choice(nodes, count, replace=False)}
    return Faults(slow, slow, {})


def one_direction(nodes: Sequence[str], rng: np.random.Generator) -> Faults:
    return Faults({}, {str(rng.choice(nodes)): 1 - FAULT}, {})


def one_path(nodes: Sequence[str], rng: np.random.Generator) -> Faults:
    """One path among the pairs of the first rounds: the search measures no other pairs of healthy nodes."""
    measured = list(first_pairs(nodes))
    first, second = measured[rng.integers(len(measured))]
    return Faults({}, {}, {(first, second): 1 - FAULT, (second, first): 1 - FAULT})


def first_pairs(nodes: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((nodes[a], nodes[b]) for paired in round_robin(len(nodes), ROUNDS) for a, b in paired)


CASES: dict[str, Callable[[Sequence[str], np.random.Generator], Faults]] = {
    "0 slow nodes": lambda nodes, rng: slow_nodes(nodes, 0, rng),
    "1 slow node": lambda nodes, rng: slow_nodes(nodes, 1, rng),
    "2 slow nodes": lambda nodes, rng: slow_nodes(nodes, 2, rng),
    "1 node receives slowly": one_direction,
    "1 slow path": one_path,
}


def draw_rates(step: PairStep, faults: Faults, rng: np.random.Generator) -> list[PairRate]:
    """The rates of one step: the slower direction of each pair, with noise."""
    noise = rng.normal(1.0, NOISE, len(step.pairs))
    rates = []
    for (first, second), factor in zip(step.pairs, noise, strict=True):
        slowdown = faults.factor(first, second)
        slowdown = slowdown if step.unidirectional else min(slowdown, faults.factor(second, first))
        gb_s = (HEALTHY_GB_S * slowdown * float(factor),)
        rates.append(  # without validation, which takes most of the time of a draw
            PairRate.model_construct(
                stage=step.stage, first=first, second=second, gb_s=gb_s, unidirectional=step.unidirectional
            )
        )
    return rates


def search(nodes: Sequence[str], faults: Faults, rng: np.random.Generator) -> tuple[Conclusion, int]:
    """The conclusion of one search, and the number of its steps."""
    steps = 0
    generator = pair_search(nodes, GPU_LIMITS)
    step = next(generator)
    while True:
        steps += 1
        try:
            step = generator.send(draw_rates(step, faults, rng))
        except StopIteration as end:
            conclusion: Conclusion = end.value
            return conclusion, steps


def is_exact(conclusion: Conclusion, faults: Faults) -> bool:
    """Whether the search names the faulty nodes, directions and paths, and nothing else."""
    nodes = {*faults.sends, *faults.receives}
    paths = {(min(pair), max(pair)) for pair in faults.paths}
    return {rank.node for rank in conclusion.ranks} == nodes and {path.pair for path in conclusion.paths} == paths


def has_direction(conclusion: Conclusion, faults: Faults) -> bool:
    """Whether the direction of each slow node is the faulty one."""
    expected = {
        node: "both"
        if node in faults.sends and node in faults.receives
        else "sends"
        if node in faults.sends
        else "receives"
        for node in {*faults.sends, *faults.receives}
    }
    return all(expected.get(rank.node) == rank.direction for rank in conclusion.ranks)


def simulate(case: str, size: int, draws: int) -> dict[str, Any]:
    """One row of the result: exact draws of one case at one number of nodes."""
    rng = np.random.default_rng([size, draws, list(CASES).index(case)])
    nodes = [f"node{number:04}" for number in range(size)]
    exact = directions = first_only = steps = 0
    started = time.monotonic()
    for _ in range(draws):
        faults = CASES[case](nodes, rng)
        conclusion, step_count = search(nodes, faults, rng)
        named = is_exact(conclusion, faults)
        exact += named
        directions += named and has_direction(conclusion, faults)
        suspects = set(conclusion.suspects)
        first_only += suspects == {*faults.sends, *faults.receives}
        steps += step_count
    return {
        "case": case,
        "nodes": size,
        "draws": draws,
        "exact": exact,
        "exact_with_direction": directions,
        "exact_nodes_by_first_rounds_only": first_only,
        "mean_steps": round(steps / draws, 2),
        "seconds_per_draw": round((time.monotonic() - started) / draws, 4),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for case in CASES:
        for size in options.sizes:
            rows.append(simulate(case, size, options.draws))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        header = {"noise": NOISE, "fault": FAULT, "rounds": ROUNDS, "required_share": REQUIRED_SHARE}
        options.json.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return int(any(row["exact"] < REQUIRED_SHARE * row["draws"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
