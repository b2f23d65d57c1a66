"""The all-reduce that the drills disturb while it runs on two nodes."""

from __future__ import annotations

from typing import Any

from seatrial.drill.cluster._nodes import NODE
from seatrial.drill.injection import Injection
from seatrial.worker import Heartbeat

CHECK = "collectives.all_reduce"
RANKS = 4  # two per node
# 120 s: longer than the drill needs to disturb the operation
ALL_REDUCE: dict[str, dict[str, Any]] = {CHECK: {"sizes": ["1MiB"], "min_seconds_per_size": 120}}


def rank_on_node(injection: Injection) -> Heartbeat:
    """Wait until all ranks are in the all-reduce; return the heartbeat of the last rank on NODE."""
    beats = injection.wait_for_ranks(CHECK, RANKS)
    return next(beat for _, beat in sorted(beats.items(), reverse=True) if beat.node == NODE)
