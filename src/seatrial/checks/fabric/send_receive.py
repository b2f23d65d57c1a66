"""Send and receive around a ring: every rank sends to the next and receives from the previous, as pipelines do."""

from __future__ import annotations

from seatrial.checks.fabric._collective import busbw_rule, collective_check

CHECK = collective_check(
    "send_receive",
    "Send and receive bandwidth around a ring",
    rules=(busbw_rule("send_receive", "1GiB", reference_optional=True),),
)
