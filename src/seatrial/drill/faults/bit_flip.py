"""One bit of one all-reduce result is wrong on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MODULE = "seatrial.bench.collectives"
BIT = 1 << 12  # a bit of the fp32 mantissa: the value stays plausible


def change(collectives: Any) -> None:
    """Flip one bit of the first result whose data is checked."""
    check_result = collectives._check_result

    def check_flipped(prepared: Any, run: Callable[[], object]) -> Any:
        collectives._check_result = check_result  # change one result only

        def run_and_flip() -> None:
            run()
            received = prepared.received.view(-1).view(collectives.torch.int32)
            received[received.numel() // 2] ^= BIT

        return check_result(prepared, run_and_flip)

    collectives._check_result = check_flipped
