"""Broadcast: one rank sends its buffer to all others, as at the start of training."""

from __future__ import annotations

from seatrial.checks.fabric._busbw_rules import busbw_rules
from seatrial.checks.fabric._collective import collective_check

CHECK = collective_check(
    "broadcast",
    "Broadcast bandwidth and correctness",
    rules=busbw_rules("broadcast", reference_optional=True),
)
