"""All-reduce: bandwidth, latency and bit-exact sums."""

from __future__ import annotations

from seatrial.checks.fabric._collective import busbw_rule, collective_check

CHECK = collective_check(
    "all_reduce",
    "All-reduce bandwidth, latency and correctness",
    rules=(busbw_rule("all_reduce", "8GiB"),),
)
