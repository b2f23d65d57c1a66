"""The training run that the drills on ranks disturb."""

from __future__ import annotations

from typing import Any

from seatrial.drill.faults import FAULTY_RANK
from seatrial.drill.injection import Injection
from seatrial.worker import Heartbeat

RANKS = 2  # ranks of a check on one node without GPUs
# A tiny training that lasts long enough (10 s) that a signal arrives while both ranks train
TRAINING: dict[str, dict[str, Any]] = {"train.ddp": {"parity_steps": 2, "steps": 12, "min_seconds": 10}}


def rank_in_training(injection: Injection) -> Heartbeat:
    """Wait until both ranks measure their training speed; return the heartbeat of FAULTY_RANK."""
    return injection.wait_for_ranks("train.ddp", RANKS, "speed")[FAULTY_RANK]
