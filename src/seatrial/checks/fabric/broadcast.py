"""Broadcast: one rank sends its buffer to all others, as at the start of training."""

from __future__ import annotations

from seatrial.checks.fabric._collective import busbw_rule, collective_check

CHECK = collective_check(
    "broadcast",
    "Broadcast bandwidth and correctness",
    rules=(busbw_rule("broadcast", "1GiB", reference_optional=True),),
)
