"""All-reduce of every GPU with itself: a communicator of one rank, as in a training run on one GPU.

The check shows that NCCL loads, creates a communicator and launches its operations on each GPU. No link is used, so the
cause of a failure is the GPU, the driver or the library. The check has no metric of bandwidth: nothing is sent, and
busbw = algbw · 2(n−1)/n is 0 for one rank. nccl-tests with one GPU measures a copy in the GPU's memory, as
device.memory does.
"""

from __future__ import annotations

from seatrial.checks.check import Check, Context, Options, facts
from seatrial.checks.declare import Answers, fact, metric, value
from seatrial.checks.fabric._results import transport_text
from seatrial.checks.fabric._wrong_data import in_groups, wrong_data
from seatrial.model import Phase, Scope

SIZE = 1024  # bytes; the time of this small size is a latency
SECONDS = 0.2  # timed duration: tens of thousands of operations on a GPU


def measure(context: Context, _options: Options) -> Answers:
    """Yield latency (us) and wrong elements of this rank; all ranks run concurrently."""
    from seatrial.bench import collectives, rank, subgroups

    group_facts = collectives.describe_group()
    rank.release_memory(context.device)
    single_rank_groups = [[number] for number in range(context.world_size)]
    result = subgroups.measure_all_reduce(single_rank_groups, SIZE, context.device, SECONDS)[context.rank]
    times_us = [1e6 * seconds for seconds in result.timings.window_means]
    yield from facts({**group_facts, **rank.describe_device(context.device)})
    yield fact(
        "method",
        f"{transport_text(group_facts)}: in-place all-reduce of 1 KiB in a communicator of one rank, "
        f"{context.world_size} ranks concurrently; median of {len(times_us)} windows",
    )
    yield value("latency.1KiB", times_us)
    yield wrong_data(in_groups({context.subject: result}))


CHECK = Check(
    name="collectives.one_gpu",
    title="All-reduce of each GPU with itself (one rank)",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    declared=(
        metric(
            "latency.1KiB",
            unit="us",
            meaning="time of one operation of the rank with itself, median of windows",
            per="rank",
            speed=True,
        ),
        metric(
            "wrong_elements",
            "== 0",
            "The sum over one rank differs from its input, although no data left the GPU.",
            "Run device.digests and device.burn on this GPU; compare the versions of driver and NCCL with another node "
            "(host.inventory)",
            unit="count",
            per="rank",
        ),
    ),
    measure=measure,
    limit_s=120.0,
)
