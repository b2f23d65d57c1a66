"""How fast does every rank send to the next while it receives from the one before, as pipeline stages do?"""

from __future__ import annotations

from seatrial.checks.fabric._collective import busbw_rule, collective_check

CHECK = collective_check(
    "send_receive",
    "Send and receive around a ring",
    rules=(busbw_rule("send_receive", "1GiB", reference_optional=True),),
)
