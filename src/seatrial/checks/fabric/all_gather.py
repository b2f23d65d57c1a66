"""All-gather: every rank receives the blocks of all ranks, as FSDP does with parameters before each layer."""

from __future__ import annotations

from seatrial.checks.fabric._collective import busbw_rule, collective_check

CHECK = collective_check(
    "all_gather",
    "All-gather bandwidth and correctness",
    rules=(busbw_rule("all_gather", "1GiB"),),
)
