"""How fast does every rank get every other's block, as FSDP does with parameters before each layer?"""

from __future__ import annotations

from seatrial.checks.fabric._collective import busbw_rule, collective_check

CHECK = collective_check(
    "all_gather",
    "All-gather: every rank gets every block",
    rules=(busbw_rule("all_gather", "1GiB"),),
)
