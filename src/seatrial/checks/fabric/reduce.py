"""Reduce: one rank receives the sum over all ranks."""

from __future__ import annotations

from seatrial.checks.fabric._collective import busbw_rule, collective_check

CHECK = collective_check(
    "reduce",
    "Reduce bandwidth and correctness",
    rules=(busbw_rule("reduce", "1GiB", reference_optional=True),),
)
