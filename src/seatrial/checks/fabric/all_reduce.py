"""All-reduce: bandwidth, latency and bit-exact sums; on several nodes also the bandwidth with NCCL_ALGO=Ring."""

from __future__ import annotations

from seatrial.checks.fabric import _forced_ring
from seatrial.checks.fabric._busbw_rules import busbw_rule
from seatrial.checks.fabric._collective import collective_check

CHECK = collective_check(
    "all_reduce",
    "All-reduce bandwidth, latency and correctness",
    rules=(busbw_rule("all_reduce", "8GiB"), *_forced_ring.RULES),
    more_metrics=_forced_ring.METRICS,
    measure_more=_forced_ring.measure,
)
