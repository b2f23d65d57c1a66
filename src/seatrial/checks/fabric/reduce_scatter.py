"""How fast does every rank get its block of the sum, as FSDP does with gradients after each layer?"""

from __future__ import annotations

from seatrial.checks.fabric._collective import busbw_rule, collective_check

CHECK = collective_check(
    "reduce_scatter",
    "Reduce-scatter: every rank gets a block of the sum",
    rules=(busbw_rule("reduce_scatter", "1GiB"),),
)
