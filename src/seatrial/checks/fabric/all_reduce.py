"""How fast do all processes sum a buffer together, and is the sum right, bit by bit?"""

from __future__ import annotations

from seatrial.checks.fabric._collective import busbw_rule, collective_check

CHECK = collective_check(
    "all_reduce",
    "All-reduce bandwidth, latency and correctness",
    rules=(busbw_rule("all_reduce", "8GiB"),),
)
