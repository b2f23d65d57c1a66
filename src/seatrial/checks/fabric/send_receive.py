"""Send and receive around a ring: every rank sends to the next and receives from the previous, as pipelines do."""

from __future__ import annotations

from seatrial.checks.fabric._busbw_rules import busbw_rules
from seatrial.checks.fabric._collective import collective_check

CHECK = collective_check(
    "send_receive",
    "Send and receive bandwidth around a ring",
    rules=busbw_rules("send_receive", reference_optional=True),
)
