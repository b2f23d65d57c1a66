"""How fast does one rank hand its buffer to all, as a checkpoint is handed out at the start?"""

from __future__ import annotations

from seatrial.checks.fabric._collective import collective_check, saturated

CHECK = collective_check(
    "broadcast",
    "Broadcast: one rank to all",
    rules=(saturated("broadcast", "1GiB", if_known=True),),
)
