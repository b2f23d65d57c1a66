"""Which NVLinks of a GPU should be active, told from what NVML says of it and of the others of its model.

And whether it is NVLinks that join the GPUs of a machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import permutations

from seatrial.discover.gpu import GpuFacts
from seatrial.discover.nvml import Gpu

NVLINK, UNKNOWN_LINK = "NVLink", "a way that the driver does not tell"

# Models that plug into PCIe, by their NVML names. Such cards may be run without an NVLink bridge
# (frankdenneman.nl/2025/09/02/which-multi-gpu-configurations-are-you-planning-to-deploy). Any other may be of a board.
_CARD = re.compile(r"PCIe|\bNVL$|\bA[34]0\b|RTX|Quadro|TITAN", re.IGNORECASE)


def links_down(gpu: Gpu, twins: Sequence[Gpu]) -> int | None:
    """Ports that should be active and are not.

    A card without a bridge looks like a board whose links are all down. Only a model that is known to come as a card is
    taken for one: any other has its links in use where its twins have, and without those nothing is known.
    """
    ports = max(len(twin.nvlinks) for twin in twins)
    if not ports or not gpu.nvlink_states_readable:
        return None
    if gpu.active_nvlinks or any(has_nvswitch(twin) for twin in twins):
        return ports - gpu.active_nvlinks
    if _CARD.search(gpu.name or ""):
        return 0
    return ports if any(twin.active_nvlinks for twin in twins) else None


def has_nvswitch(gpu: Gpu) -> bool:
    """Whether the GPU hangs on NVSwitches, as far as it tells."""
    joined = gpu.fabric is not None and gpu.fabric.state != "not supported"
    return joined or any(link.remote == "switch" for link in gpu.nvlinks)


def links_missing(gpu: Gpu, twins: Sequence[Gpu]) -> int | None:
    if not gpu.nvlink_states_readable or not any(twin.nvlinks for twin in twins):
        return None
    return max(twin.active_nvlinks for twin in twins) - gpu.active_nvlinks


def expects_fabric(gpu: Gpu, gpus: Sequence[Gpu]) -> bool:
    """Whether the GPU has a fabric to join: it says so, or others of this node do and it hangs on switches too."""
    if gpu.fabric is None:
        return False
    if gpu.fabric.state != "not supported":
        return True
    others_are = any(other.fabric and other.fabric.state != "not supported" for other in gpus)
    return others_are and any(link.remote == "switch" for link in gpu.nvlinks)


def fabric_ready(gpu: Gpu) -> bool:
    fabric = gpu.fabric
    return fabric is not None and fabric.state == "completed" and fabric.status == 0 and not fabric.problems


def link_types(facts: GpuFacts, indices: Sequence[int | None]) -> frozenset[str]:
    """What joins any two of the GPUs that NVML has by these ``indices``: NVLink, else as nvidia-smi topo -m names it.

    NVLink alone where there are switches: they join all alike, and a GPU that has lost its links is no other kind.
    Without them good pairs may be joined by unlike numbers of links: one V100 has one to some others, two to the rest.
    """
    at = {one.index: number for number, one in enumerate(facts.gpus)}
    places = [at[index] for index in indices if index in at]
    if len(places) < len(indices):
        return frozenset({UNKNOWN_LINK})
    if any(has_nvswitch(facts.gpus[number]) for number in places):
        return frozenset({NVLINK})
    names = {facts.topology[a][b] for a, b in permutations(places, 2)}
    linked = {name for name in names if name.startswith("NV")}  # NV1, NV2: by how many links
    alike = {NVLINK} if len(linked) == 1 else linked
    return frozenset(alike | {UNKNOWN_LINK if name == "?" else name for name in names - linked})
