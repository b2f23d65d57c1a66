"""Reduce: one rank receives the sum over all ranks."""

from __future__ import annotations

from seatrial.checks.fabric._busbw_rules import busbw_rules
from seatrial.checks.fabric._collective import collective_check

CHECK = collective_check(
    "reduce",
    "Reduce bandwidth and correctness",
    rules=busbw_rules("reduce", reference_optional=True),
)
