"""How fast do all ranks sum into one?"""

from __future__ import annotations

from seatrial.checks.fabric._collective import collective_check, saturated

CHECK = collective_check(
    "reduce",
    "Reduce: all ranks to one",
    rules=(saturated("reduce", "1GiB", if_known=True),),
)
