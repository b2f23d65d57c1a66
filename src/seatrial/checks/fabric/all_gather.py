"""All-gather: every rank receives the blocks of all ranks, as FSDP does with parameters before each layer."""

from __future__ import annotations

from seatrial.checks.fabric._busbw_rules import busbw_rules
from seatrial.checks.fabric._collective import collective_check

CHECK = collective_check(
    "all_gather",
    "All-gather bandwidth and correctness",
    rules=busbw_rules("all_gather"),
)
