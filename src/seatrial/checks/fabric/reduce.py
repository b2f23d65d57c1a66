"""How fast do all ranks sum into one?"""

from __future__ import annotations

from seatrial.checks.fabric._collective import busbw_rule, collective_check

CHECK = collective_check(
    "reduce",
    "Reduce: all ranks to one",
    rules=(busbw_rule("reduce", "1GiB", reference_optional=True),),
)
