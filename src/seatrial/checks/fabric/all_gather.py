"""How fast does every rank get every other's block, as FSDP does with parameters before each layer?"""

from __future__ import annotations

from seatrial.checks.fabric._collective import collective_check, saturated

CHECK = collective_check(
    "all_gather",
    "All-gather: every rank gets every block",
    rules=(saturated("all_gather", "1GiB"),),
)
