"""A training in which one rank fails ON PURPOSE: by an error, by SIGKILL or by SIGSTOP, upon itself.

No trial has a use for it by itself: it always ends in ERROR. ``train.failure`` starts it in a run of its own, to see
whether that run ends, and what it says.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from seatrial.checks.base import Check, Context, Needs, Options
from seatrial.model import Frozen, Observation, Phase, Scope, SeatrialError

Fault = Literal["error", "kill", "stop"]

RECORD = "fault.json"  # in the folder of artifacts: the last thing that the victim does before its fault
ERROR_MESSAGE = "an error on purpose, to see whether it is told of"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_LOOP_S = 3.0  # so long all ranks train first: a pulse comes each second, and each rank is to be seen at work


class InjectedFault(Frozen):
    """Who committed which fault. ``time`` is by the clock of its node."""

    fault: Fault
    rank: int
    node: str
    subject: str
    pid: int
    time: float


class VictimOptions(Options):
    fault: Fault
    rank: int | None = Field(default=None, ge=0, description="by default the last one, on the last node")


def measure(context: Context, options: VictimOptions) -> Iterator[Observation]:
    """Never returns where all goes as asked for: the victim fails, and its peers wait until they are ended."""
    from seatrial.train import ddp
    from seatrial.util import files

    failing = context.world_size - 1 if options.rank is None else options.rank
    if failing >= context.world_size:
        raise SeatrialError(f"rank {failing} is to fail, and there are only {context.world_size} ranks")
    begun = None  # with the first step, which alone may take seconds
    for step, loss in enumerate(ddp.endless_training(context.device), 1):
        begun = begun or time.monotonic()
        context.progress(f"step {step}: loss {loss:.3f}")
        if context.rank == failing and time.monotonic() - begun > _LOOP_S:
            victim = InjectedFault(
                fault=options.fault,
                rank=context.rank,
                node=context.node,
                subject=context.subject,
                pid=os.getpid(),
                time=time.time(),
            )
            files.write_json(context.artifacts_dir / RECORD, victim.model_dump(mode="json"))
            _commit(options.fault)
    yield from ()  # never reached: what makes this a generator, as every check is


def _commit(fault: Fault) -> None:
    if fault == "error":
        raise RuntimeError(ERROR_MESSAGE)
    os.kill(os.getpid(), _SIGNALS[fault])
    raise RuntimeError(f"this rank sent itself {_SIGNALS[fault].name}, and goes on")


CHECK = Check(
    name="train.failing_job",
    title="Fails on purpose: train.failure's victim, of no use in a trial",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CLUSTER,
    needs=Needs(min_ranks=2),
    metrics={},
    rules=(),
    measure=measure,
    limit_s=180,
    options=VictimOptions,
)
