"""Reduce-scatter: every rank receives its block of the sum, as FSDP does with gradients after each layer."""

from __future__ import annotations

from seatrial.checks.fabric._busbw_rules import busbw_rules
from seatrial.checks.fabric._collective import collective_check

CHECK = collective_check(
    "reduce_scatter",
    "Reduce-scatter bandwidth and correctness",
    rules=busbw_rules("reduce_scatter"),
)
