from __future__ import annotations

import pytest

from seatrial.discover.gpu import GpuFacts
from seatrial.discover.nvlinks import NVLINK, UNKNOWN_LINK, link_types
from seatrial.discover.nvml import Gpu, NvLink

SWITCH_LINKS = tuple(NvLink(link=number, active=True, remote="switch") for number in range(18))


def machine(*rows: str, switched: int = 0) -> GpuFacts:
    """GPUs with this topology, one row per GPU; the first ``switched`` GPUs have links to NVSwitches."""
    gpus = tuple(Gpu(index=number, nvlinks=SWITCH_LINKS if number < switched else ()) for number in range(len(rows)))
    return GpuFacts(gpus=gpus, topology=tuple(tuple(row.split()) for row in rows))


FOUR = machine("X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X")


@pytest.mark.parametrize(
    ("facts", "indices", "types"),
    [
        (machine("X NV18", "NV18 X", switched=2), (0, 1), {NVLINK}),
        (machine("X NV4 NV4", "NV4 X NV4", "NV4 NV4 X"), (0, 1, 2), {NVLINK}),
        (FOUR, (0, 1, 2, 3), {"PIX", "SYS", NVLINK}),
        (FOUR, (2, 3), {NVLINK}),
        (FOUR, (3, 0), {"SYS"}),
        (machine("X ?", "? X"), (0, 1), {UNKNOWN_LINK}),
        (machine("X NODE", "NODE X"), (0, 5), {UNKNOWN_LINK}),
        (machine("X NODE", "NODE X"), (0, None), {UNKNOWN_LINK}),
    ],
)
def test_link_types(facts: GpuFacts, indices: tuple[int | None, ...], types: set[str]) -> None:
    assert link_types(facts, indices) == types


def test_a_gpu_without_active_links_has_the_link_type_of_its_switches() -> None:
    one_without_links = machine("X NV18 NODE", "NV18 X NODE", "NODE NODE X", switched=2)
    assert link_types(one_without_links, (0, 1, 2)) == {NVLINK}
