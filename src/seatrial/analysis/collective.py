"""One measured collective: what, among how many, by which way and over which links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seatrial.analysis.algorithms import Way
from seatrial.hardware.links import Links, nvlink_share
from seatrial.hardware.references import Known
from seatrial.model import Measurement

NVLINK, PORT = "NVLink of a GPU", "network port"
_POINT_TO_POINT = ("all_to_all", "send_receive")
# What is reached of the line rate where a link is all that holds a transfer up. NVLink: what NCCL plans with on an
# H200, 370.8 of 478.1 GB/s (SKU files say it of others). A port: 384 of 400 Gb/s, oci-hpc's gate on ib_write_bw
_REACHES = {NVLINK: 0.77, PORT: 0.96}


@dataclass(frozen=True)
class Scene:
    """``operation`` is nccl-tests' name of it, whatever the check is called; ``nvls``: whether the switches can sum."""

    check: str
    operation: str
    ranks: int
    nodes: int
    ways: Mapping[str, Way]  # size label → algorithm and protocol, by NCCL's log
    links: Links
    planned: float | None  # GB/s of a GPU's NVLinks that NCCL plans with; None where nobody knows
    nvls: bool = False

    def algorithm(self, label: str) -> str:
        """As NCCL's log names it, else the likeliest: Tree on two nodes (NVIDIA/nccl#812), Ring on one and on many."""
        likeliest = "Tree" if self.nodes == 2 and self.operation == "all_reduce" else "Ring"
        return self.ways[label][0] if label in self.ways else likeliest

    def by(self, label: str) -> str:
        """The way of the data, in words, and whether it is known."""
        if self.operation in _POINT_TO_POINT:
            return "from point to point"
        return f"by {self.algorithm(label)}" + ("" if label in self.ways else " (assumed: no log says which)")

    def within(self, label: str, expected: float) -> str:
        """The algorithm inside a node that comes to the ``expected`` GB/s of busbw.

        Where no log names it, and Ring would take more of the NVLinks than there is, the switches sum.
        """
        algorithm, line = self.algorithm(label), self.links.nvlink_gbps
        if line is None or label in self.ways or not self.nvls or self.operation != "all_reduce":
            return algorithm
        needed = expected * nvlink_share(self.operation, algorithm, self.ranks, self.nodes)
        return "NVLS" if needed > self.reach(NVLINK, line) else algorithm

    def reach(self, link: str, rate: float) -> float:
        """GB/s of a link, with this line rate, where it is all that holds a collective up."""
        return self.planned if self.planned and link == NVLINK else _REACHES[link] * rate


def scene(
    measurement: Measurement, operation: str, ways: Mapping[str, Way], links: Links, known: Known
) -> Scene | None:
    """None for what is not a collective over NCCL."""
    facts = measurement.facts
    ranks, nodes = facts.get("world_size"), facts.get("nodes")
    if not operation or facts.get("backend") != "nccl":
        return None
    if not isinstance(ranks, int) or not isinstance(nodes, int) or ranks < 2:
        return None
    sku = known.sku(str(facts.get("gpu") or ""))
    if isinstance(sku, str):
        return Scene(measurement.check, operation, ranks, nodes, ways, links, None)
    spec = sku.spec.get("nvlink_nccl")
    return Scene(measurement.check, operation, ranks, nodes, ways, links, spec.value if spec else None, sku.nvls)
