"""A training job in which one rank fails ON PURPOSE: by an exception, SIGKILL or SIGSTOP.

Only ``train.failure`` uses it, in a separate run, since the job always ends in ERROR.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Literal

from pydantic import Field

from seatrial.checks.check import Check, Context, Needs, Options
from seatrial.checks.declare import Answers
from seatrial.model import Frozen, Phase, Scope, SeatrialError

Fault = Literal["error", "kill", "stop"]

RECORD_FILE = "fault.json"  # in the artifacts directory; the failing rank writes it immediately before the fault
ERROR_MESSAGE = "intentional error of train.failing_job"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_TRAINING_S = 3.0  # time from the first step to the fault; by then every rank has sent heartbeats (one per second)


class FaultRecord(Frozen):
    """The fault and the rank that executed it; ``time`` in Unix seconds by the clock of the rank's node."""

    fault: Fault
    rank: int
    node: str
    subject: str
    pid: int
    time: float


class FailingJobOptions(Options):
    """``fault``: how the rank fails. ``rank``: the rank that fails."""

    fault: Fault
    rank: int | None = Field(default=None, ge=0, description="default: the last rank, on the last node")


def measure(context: Context, options: FailingJobOptions) -> Answers:
    """Train until the failing rank fails; the other ranks wait until the launcher terminates them. Does not return.

    Raises SeatrialError if the option rank is not a rank of the job.
    """
    from seatrial.train import ddp
    from seatrial.util import files

    failing_rank = context.world_size - 1 if options.rank is None else options.rank
    if failing_rank >= context.world_size:
        raise SeatrialError(f"option rank is {failing_rank}, expected less than the world size {context.world_size}")
    first_step_end = None  # the first step may take seconds, and does not count
    for step, loss in enumerate(ddp.endless_training(context.device), 1):
        first_step_end = first_step_end or time.monotonic()
        context.progress(f"step {step}: loss {loss:.3f}")
        if context.rank == failing_rank and time.monotonic() - first_step_end > _TRAINING_S:
            fault = FaultRecord(
                fault=options.fault,
                rank=context.rank,
                node=context.node,
                subject=context.subject,
                pid=os.getpid(),
                time=time.time(),
            )
            files.write_json(context.artifacts_dir / RECORD_FILE, fault.model_dump(mode="json"))
            _execute(options.fault)
    yield from ()  # not reached; makes this function a generator


def _execute(fault: Fault) -> None:
    """Make this process fail. Raises RuntimeError for ``error``, and if the signal did not take effect."""
    if fault == "error":
        raise RuntimeError(ERROR_MESSAGE)
    os.kill(os.getpid(), _SIGNALS[fault])
    raise RuntimeError(f"this rank is still running after {_SIGNALS[fault].name}")


CHECK = Check(
    name="train.failing_job",
    title="Training job with an intentional fault, for train.failure only",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    needs=Needs(min_ranks=2),
    declared=(),
    measure=measure,
    limit_s=180,
    options=FailingJobOptions,
)
