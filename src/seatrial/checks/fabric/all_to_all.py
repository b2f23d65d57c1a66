"""All-to-all: every rank sends a block to every other, as a mixture of experts does with tokens."""

from __future__ import annotations

from seatrial.checks.fabric._busbw_rules import busbw_rules
from seatrial.checks.fabric._collective import collective_check

CHECK = collective_check(
    "all_to_all",
    "All-to-all bandwidth and correctness",
    rules=busbw_rules("all_to_all"),
)
