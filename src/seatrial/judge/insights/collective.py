"""One measured collective: operation, number of ranks and nodes, NCCL's choices, and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seatrial.hardware.links import Links, nvlink_to_busbw_ratio
from seatrial.hardware.references import References
from seatrial.judge.insights.algorithms import AlgorithmProtocol
from seatrial.model import Measurement

NVLINK, PORT = "NVLink of a GPU", "network port"
_POINT_TO_POINT = ("all_to_all", "send_receive")
# Achievable share of the line rate when the link is the bottleneck. NVLink: NCCL's planned bandwidth on an H200, 370.8
# of 478.1 GB/s (SKU files have the value of other models). Port: 384 of 400 Gb/s, oci-hpc's threshold for ib_write_bw
_ACHIEVABLE_SHARE = {NVLINK: 0.77, PORT: 0.96}


@dataclass(frozen=True)
class Collective:
    """A measured collective. ``operation``: its name in nccl-tests.

    ``nvls``: whether the GPU model supports NVLS (NVLink SHARP: the NVSwitches reduce).
    """

    check: str
    operation: str
    ranks: int
    nodes: int
    choices: Mapping[str, AlgorithmProtocol]  # size label → algorithm and protocol, from NCCL's log
    links: Links
    planned_nvlink_gb_s: float | None  # bandwidth that NCCL plans for a GPU's NVLinks; None: unknown
    nvls: bool = False

    def algorithm(self, label: str) -> str:
        """The logged algorithm, else NCCL's default: Tree for all-reduce on two nodes (NVIDIA/nccl#812), else Ring."""
        if label in self.choices:
            return self.choices[label].algorithm
        return "Tree" if self.nodes == 2 and self.operation == "all_reduce" else "Ring"

    def algorithm_text(self, label: str) -> str:
        """The algorithm as text, with a note if it is assumed."""
        if self.operation in _POINT_TO_POINT:
            return "point to point"
        return f"with {self.algorithm(label)}" + ("" if label in self.choices else " (assumed, not in the log)")

    def intra_node_algorithm(self, label: str, expected: float) -> str:
        """The logged algorithm, else the algorithm that is assumed inside a node with the ``expected`` busbw in GB/s.

        NVLS is assumed for an all-reduce if the GPU model supports it and NCCL's default algorithm would need more than
        the NVLinks can carry.
        """
        algorithm, line_rate = self.algorithm(label), self.links.nvlink_gb_s
        if line_rate is None or label in self.choices or not self.nvls or self.operation != "all_reduce":
            return algorithm
        needed = expected * nvlink_to_busbw_ratio(self.operation, algorithm, self.ranks, self.nodes)
        return "NVLS" if needed > self.achievable_gb_s(NVLINK, line_rate) else algorithm

    def achievable_gb_s(self, link: str, line_rate: float) -> float:
        """The bandwidth in GB/s of a link that is the bottleneck of a collective. ``line_rate`` is in GB/s too."""
        if link == NVLINK and self.planned_nvlink_gb_s:
            return self.planned_nvlink_gb_s
        return _ACHIEVABLE_SHARE[link] * line_rate


def build_collective(
    measurement: Measurement,
    operation: str,
    choices: Mapping[str, AlgorithmProtocol],
    links: Links,
    references: References,
) -> Collective | None:
    """The collective of a measurement; None without an operation, without NCCL, or with fewer than two ranks."""
    facts = measurement.facts
    ranks, nodes = facts.get("world_size"), facts.get("nodes")
    if not operation or facts.get("backend") != "nccl":
        return None
    if not isinstance(ranks, int) or not isinstance(nodes, int) or ranks < 2:
        return None
    sku = references.sku(str(facts.get("gpu") or ""))  # a text if the GPU model has no SKU: the reason
    planned_nvlink = None if isinstance(sku, str) else sku.spec.get("nvlink_nccl")
    return Collective(
        check=measurement.check,
        operation=operation,
        ranks=ranks,
        nodes=nodes,
        choices=choices,
        links=links,
        planned_nvlink_gb_s=planned_nvlink.value if planned_nvlink else None,
        nvls=not isinstance(sku, str) and sku.nvls,
    )
