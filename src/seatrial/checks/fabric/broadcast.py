"""How fast does one rank hand its buffer to all, as a checkpoint is handed out at the start?"""

from __future__ import annotations

from seatrial.checks.fabric._collective import busbw_rule, collective_check

CHECK = collective_check(
    "broadcast",
    "Broadcast: one rank to all",
    rules=(busbw_rule("broadcast", "1GiB", reference_optional=True),),
)
