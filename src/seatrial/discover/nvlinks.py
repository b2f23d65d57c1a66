"""Missing NVLinks of a GPU, by comparison with other GPUs of its model, and the link types between GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import permutations

from seatrial.discover.gpu import GpuFacts
from seatrial.discover.nvml import Gpu

NVLINK, UNKNOWN_LINK = "NVLink", "unknown link"

# NVML names of models that are PCIe cards. Cards can run without an NVLink bridge
# (frankdenneman.nl/2025/09/02/which-multi-gpu-configurations-are-you-planning-to-deploy). Other models can be part of
# a baseboard.
_PCIE_CARD = re.compile(r"PCIe|\bNVL$|\bActive$|\bA[34]0\b|RTX|Quadro|TITAN", re.IGNORECASE)
# Cards whose NVLink bridges leave 6 of 18 ports unused (Azure/azurehpc-health-checks#162); those of H200 NVL use all
_UNUSED_PORTS, _PARTLY_BRIDGED_CARD = 6, re.compile(r"\bH[18]00 (PCIe|NVL)")


def links_down(gpu: Gpu, same_model: Sequence[Gpu]) -> int | None:
    """The number of NVLinks that should be active and are not; None if unknown.

    ``same_model``: the GPUs of this model, including ``gpu``.
    For a GPU without an active link and without NVSwitches: 0 for a PCIe card, which may have no NVLink bridge, and for
    a single GPU, as of GH200. For any other model: all links if another GPU in ``same_model`` has an active link,
    otherwise None.
    """
    port_count = max(len(other.nvlinks) for other in same_model)
    if not port_count or not gpu.nvlink_states_readable:
        return None
    if gpu.active_nvlinks or any(has_nvswitch(other) for other in same_model):
        unused = _UNUSED_PORTS if _PARTLY_BRIDGED_CARD.search(gpu.name or "") else 0
        return max(0, port_count - gpu.active_nvlinks - unused)
    if len(same_model) == 1 or _PCIE_CARD.search(gpu.name or ""):
        return 0
    return port_count if any(other.active_nvlinks for other in same_model) else None


def has_nvswitch(gpu: Gpu) -> bool:
    """Whether the GPU reports a link to an NVSwitch, or supports an NVSwitch fabric."""
    return _supports_fabric(gpu) or _is_linked_to_switch(gpu)


def _supports_fabric(gpu: Gpu) -> bool:
    return gpu.fabric is not None and gpu.fabric.state != "not supported"


def _is_linked_to_switch(gpu: Gpu) -> bool:
    return any(link.remote == "switch" for link in gpu.nvlinks)


def links_missing(gpu: Gpu, same_model: Sequence[Gpu]) -> int | None:
    """The largest number of active NVLinks of a GPU in ``same_model`` minus the number of ``gpu``; None if unknown."""
    if not gpu.nvlink_states_readable or not any(other.nvlinks for other in same_model):
        return None
    return max(other.active_nvlinks for other in same_model) - gpu.active_nvlinks


def expects_fabric(gpu: Gpu, gpus: Sequence[Gpu]) -> bool:
    """Whether the GPU should join an NVSwitch fabric: it supports one, or has a link to a switch and another does."""
    is_supported_by_another = gpu.fabric is not None and any(map(_supports_fabric, gpus))
    return _supports_fabric(gpu) or (is_supported_by_another and _is_linked_to_switch(gpu))


def fabric_ready(gpu: Gpu) -> bool:
    """Whether the GPU has joined the NVSwitch fabric without error or health problem."""
    fabric = gpu.fabric
    return fabric is not None and fabric.state == "completed" and fabric.status == 0 and not fabric.problems


def link_types(facts: GpuFacts, indices: Sequence[int | None]) -> frozenset[str]:
    """The types of link between any two of the GPUs with these NVML indices: NVLINK, or a name of nvidia-smi topo -m.

    UNKNOWN_LINK is in the result if an index or a connection is unknown. With NVSwitches the type is NVLINK for all
    pairs, even for a GPU that has lost its links. Without switches, healthy pairs can have different numbers of links,
    as with V100, and these are different types (NV1, NV2).
    """
    position_by_index = {gpu.index: position for position, gpu in enumerate(facts.gpus)}
    positions = [position_by_index[index] for index in indices if index in position_by_index]
    if len(positions) < len(indices):
        return frozenset({UNKNOWN_LINK})
    if any(has_nvswitch(facts.gpus[position]) for position in positions):
        return frozenset({NVLINK})
    connections = {facts.topology[i][j] for i, j in permutations(positions, 2)}
    nvlinks = {name for name in connections if name.startswith("NV")}
    nvlink_types = {NVLINK} if len(nvlinks) == 1 else nvlinks
    return frozenset(nvlink_types | {UNKNOWN_LINK if name == "?" else name for name in connections - nvlinks})
