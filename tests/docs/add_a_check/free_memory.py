"""Free memory of each GPU."""

from __future__ import annotations

from pydantic import Field

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options, facts
from seatrial.checks.declare import Answers, absent, metric, value
from seatrial.model import ByteSize, Phase, Scope


class FreeMemoryOptions(Options):
    """``needed``: bytes that a job needs on each GPU."""

    needed: ByteSize | None = Field(default=None, gt=0)


def measure(context: Context, options: FreeMemoryOptions) -> Answers:
    """Yield the free memory in bytes, and whether a job fits into it."""
    from seatrial.bench import memory, rank

    yield from facts(rank.describe_device(context.device))  # backend, gpu and other facts that rules need
    free = memory.free_bytes(context.device)
    yield value("free_memory", free)
    if options.needed is None:
        yield absent("fits", "the option needed is not set")
    else:
        yield value("fits", free >= options.needed, evidence={"free": free, "needed": options.needed})


CHECK = Check(
    name="device.free_memory",
    title="Free memory of the GPU",
    phase=Phase.DEVICE,
    scope=Scope.GPU,
    declared=(
        metric(
            "free_memory",
            ">= 0.90 peers",
            "less memory is free than on the other GPUs: another program uses this one",
            "end the program, or its job (scancel)",
            unit="B",
            when="backend == cuda",
            cause=Cause(
                id="less_free_memory",
                place="gpu",
                explains=("train.*",),
                first_command="nvidia-smi --id={gpu} --query-compute-apps=pid,process_name,used_memory --format=csv",
                action="fix-environment",
            ),
        ),
        metric("fits", "yes", "the job does not fit into the free memory", "use a smaller batch, or more GPUs"),
    ),
    measure=measure,
    options=FreeMemoryOptions,
    limit_s=30,
)
