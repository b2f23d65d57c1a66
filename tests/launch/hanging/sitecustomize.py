"""Makes the check nodes.reachable of a real worker hang, as SEATRIAL_TEST_HANG says.

Python imports this module at its start.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

if "seatrial.worker" in sys.orig_argv[:4]:
    from seatrial.checks.host import nodes_reachable

    def hold_lock(seconds: int) -> None:
        """C code that keeps Python's lock, such as a call of a driver."""
        import ctypes

        ctypes.PyDLL(None).sleep(seconds)

    def reduce_gradients() -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1000))

    def measure(context: Any, options: Any) -> Iterator[Any]:
        case = os.environ["SEATRIAL_TEST_HANG"]
        if context.rank == 1 and case == "sleep":
            time.sleep(600)
        if context.rank == 1 and case == "lock":
            hold_lock(600)
        reduce_gradients()
        yield from ()

    object.__setattr__(nodes_reachable.CHECK, "measure", measure)
