"""Is one rail of the network slower than the others? GPU i of every node sums a buffer with GPU i of all other nodes.

All rails work at once, and NVLink carries nothing: each group has one GPU a node, and so the network card beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Comparison, Needs, Options, Place
from seatrial.checks.fabric import _transports
from seatrial.checks.fabric._results import BANDWIDTHS, carrier, group_data_check, intact
from seatrial.model import (
    CLUSTER,
    ByteSize,
    Fact,
    Metric,
    NotApplicable,
    Observation,
    Phase,
    Rule,
    Scope,
    Series,
    format_bytes,
    parse_bytes,
)

if TYPE_CHECKING:
    from seatrial.bench.subgroups import GroupResult

# Some 10 ms at the 50 GB/s of a 400 Gb/s card. On a CPU: a rehearsal.
GPU_SIZE, CPU_SIZE = parse_bytes("256MiB"), parse_bytes("1MiB")
COMPARABLE = 3  # of two rails that differ nobody knows which is right


class RailOptions(Options):
    """``size``: bytes of the buffer on each rank; by default what suits the device. ``seconds`` cap the timed part."""

    size: ByteSize | None = Field(default=None, ge=4)
    seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)


def measure(place: Place, options: RailOptions) -> Iterator[Observation]:
    """Yield the figure of every rail on rank 0. Raises NotApplicable on a single node."""
    from seatrial.bench import collectives, subgroups

    nodes = subgroups.ranks_by_node(place.node)
    if len(nodes) < 2:
        raise NotApplicable("one node has no rails: they join the GPUs of several")
    path = collectives.describe_group()
    size = options.size or (GPU_SIZE if place.device.startswith("cuda") else CPU_SIZE)
    rails = rails_of(nodes)
    place.note(f"{len(rails)} rails at once, {format_bytes(size)}")
    results = subgroups.all_reduce(rails, size, place.device, options.seconds)
    path["transports"] = _transports.transports(place.device)
    if place.rank == 0:
        facts = {**path, "nodes": len(nodes), "size": size, "comparable": "yes" if len(rails) >= COMPARABLE else "no"}
        yield from (Fact(name=name, value=value) for name, value in facts.items())
        yield from _figures(results, size)
        yield Fact(name="how", value=_how(path, len(nodes), size, results))


def rails_of(nodes: Mapping[str, Sequence[int]]) -> list[list[int]]:
    """The first rank of every node, the second of every node … Raises ValueError for unlike numbers of ranks."""
    return [list(rail) for rail in zip(*nodes.values(), strict=True)]


def _figures(results: Sequence[GroupResult], size: int) -> Iterator[Observation]:
    rates = [result.busbw(size) for result in results]
    usual = median(map(median, rates))
    for number, own in enumerate(rates):
        subject = f"rail{number}"
        yield Metric(name="rail_busbw", value=median(own), unit="GB/s", subject=subject, samples=own)
        shares = tuple(rate / usual for rate in own)
        yield Metric(name="rail_share", value=median(shares), unit="of the median", subject=subject, samples=shares)
    x, y = tuple(map(float, range(len(rates)))), tuple(map(median, rates))
    yield Series(name="rail_busbw", subject=CLUSTER, x=x, y=y, x_unit="rail", y_unit="GB/s")
    yield from group_data_check({f"rail{number}": result for number, result in enumerate(results)})


def _how(path: Mapping[str, object], nodes: int, size: int, results: Sequence[GroupResult]) -> str:
    windows = len(results[0].timings.windows)
    return (
        f"{carrier(path)}: all-reduce of {format_bytes(size)} on {len(results)} rails at once, each of one rank on "
        f"every one of {nodes} nodes; medians of {windows} windows; busbw = algbw · 2(n−1)/n with n = {nodes}"
    )


CHECK = Check(
    name="collectives.rails",
    title="The rails of the network, one GPU a node",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={"rail_busbw": "GB/s", "rail_share": "of the median", "wrong_elements": "count"},
    rules=(
        Rule(
            metric="rail_share",
            expect=">= 0.90 of the median",
            where={"backend": "nccl", "comparable": "yes"},
            why="this rail is slower than the others: a collective of all GPUs goes at the pace of its slowest rail",
            remedy="collectives.pairs says on which node. If on none of them: look at the switches of this rail, at "
            "ports that are down, and at uplinks; ibdiagnet for the whole fabric",
        ),
        intact(
            "The fact wrong_data names rail, rank, offset and flipped bits; collectives.pairs names sender and receiver"
        ),
    ),
    measure=measure,
    performance=("rail_*",),
    bounds=BANDWIDTHS,
    comparisons={"rail_share": Comparison(part="a rail", network=True)},
    per={"rail_*": "rail"},
    limit_s=600.0,
    needs=Needs(ranks=2),
    options=RailOptions,
)
