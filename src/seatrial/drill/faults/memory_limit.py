"""The memory of one rank grows until its limit, as with a leak."""

from __future__ import annotations

import resource
from typing import Any

MODULE = "seatrial.train.ddp"
_BLOCK_BYTES = 64 * 2**20
_HEADROOM_BYTES = 4 * _BLOCK_BYTES  # bytes that the rank may still allocate


def change(ddp: Any) -> None:
    """Limit the address space of the rank when it begins to measure its speed, and allocate until it is used up."""

    def leak(*_arguments: object) -> None:
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
        limit = pages * resource.getpagesize() + _HEADROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        blocks = []
        while True:
            blocks.append(ddp.torch.empty(_BLOCK_BYTES, dtype=ddp.torch.uint8))

    ddp.measure_speed = leak
