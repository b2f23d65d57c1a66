"""One measured collective: what, among how many, by which way and over which links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seatrial.analysis.algorithms import AlgorithmProtocol
from seatrial.hardware.links import Links, nvlink_to_busbw_ratio
from seatrial.hardware.references import References
from seatrial.model import Measurement

NVLINK, PORT = "NVLink of a GPU", "network port"
_POINT_TO_POINT = ("all_to_all", "send_receive")
# What is reached of the line rate where a link is all that holds a transfer up. NVLink: what NCCL plans with on an
# H200, 370.8 of 478.1 GB/s (SKU files say it of others). A port: 384 of 400 Gb/s, oci-hpc's gate on ib_write_bw
_REACHES = {NVLINK: 0.77, PORT: 0.96}


@dataclass(frozen=True)
class Collective:
    """``operation`` is nccl-tests' name of it, whatever the check is called; ``nvls``: whether the switches can sum."""

    check: str
    operation: str
    ranks: int
    nodes: int
    choices: Mapping[str, AlgorithmProtocol]  # size label → algorithm and protocol, by NCCL's log
    links: Links
    planned_nvlink_gbps: float | None  # GB/s of a GPU's NVLinks that NCCL plans with; None where nobody knows
    nvls: bool = False

    def algorithm(self, label: str) -> str:
        """As NCCL's log names it, else the likeliest: Tree on two nodes (NVIDIA/nccl#812), Ring on one and on many."""
        likeliest = "Tree" if self.nodes == 2 and self.operation == "all_reduce" else "Ring"
        return self.choices[label][0] if label in self.choices else likeliest

    def algorithm_text(self, label: str) -> str:
        """The way of the data, in words, and whether it is known."""
        if self.operation in _POINT_TO_POINT:
            return "from point to point"
        return f"by {self.algorithm(label)}" + ("" if label in self.choices else " (assumed: no log says which)")

    def intra_node_algorithm(self, label: str, expected: float) -> str:
        """The algorithm inside a node that comes to the ``expected`` GB/s of busbw.

        Where no log names it, and Ring would take more of the NVLinks than there is, the switches sum.
        """
        algorithm, line = self.algorithm(label), self.links.nvlink_gbps
        if line is None or label in self.choices or not self.nvls or self.operation != "all_reduce":
            return algorithm
        needed = expected * nvlink_to_busbw_ratio(self.operation, algorithm, self.ranks, self.nodes)
        return "NVLS" if needed > self.achievable_gbps(NVLINK, line) else algorithm

    def achievable_gbps(self, link: str, rate: float) -> float:
        """GB/s of a link, with this line rate, where it is all that holds a collective up."""
        return self.planned_nvlink_gbps if self.planned_nvlink_gbps and link == NVLINK else _REACHES[link] * rate


def collective_from(
    measurement: Measurement, operation: str, ways: Mapping[str, AlgorithmProtocol], links: Links, known: References
) -> Collective | None:
    """None for what is not a collective over NCCL."""
    facts = measurement.facts
    ranks, nodes = facts.get("world_size"), facts.get("nodes")
    if not operation or facts.get("backend") != "nccl":
        return None
    if not isinstance(ranks, int) or not isinstance(nodes, int) or ranks < 2:
        return None
    sku = known.sku(str(facts.get("gpu") or ""))
    if isinstance(sku, str):
        return Collective(measurement.check, operation, ranks, nodes, ways, links, None)
    spec = sku.spec.get("nvlink_nccl")
    return Collective(measurement.check, operation, ranks, nodes, ways, links, spec.value if spec else None, sku.nvls)
