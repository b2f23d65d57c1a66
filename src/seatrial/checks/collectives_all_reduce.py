"""How fast do all processes sum a buffer together, and is the sum right, bit by bit?"""

from __future__ import annotations

from seatrial.checks.collective import Sizes, collective_check, saturated
from seatrial.model import parse_bytes

# 8 GiB is what published acceptance figures use. On a CPU: kept to about ten seconds on two cores.
SIZES = Sizes(
    gpu=tuple(map(parse_bytes, ("1MiB", "10MiB", "100MiB", "1GiB", "8GiB"))),
    cpu=tuple(map(parse_bytes, ("64KiB", "1MiB", "10MiB", "100MiB"))),
)

CHECK = collective_check(
    "all_reduce",
    "All-reduce bandwidth, latency and correctness",
    defaults=SIZES,
    rules=(saturated("all_reduce", "8GiB"),),
)
