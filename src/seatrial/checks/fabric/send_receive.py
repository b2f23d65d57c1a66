"""How fast does every rank send to the next while it receives from the one before, as pipeline stages do?"""

from __future__ import annotations

from seatrial.checks.fabric._collective import collective_check, saturated

CHECK = collective_check(
    "send_receive",
    "Send and receive around a ring",
    rules=(saturated("send_receive", "1GiB", if_known=True),),
)
