"""What is left of the bandwidth as nodes are added: the same all-reduce on one node, on two, on four … on all of them.

A figure of two nodes says little of many: NCCL's trees carry less over the network there than its rings do, so both one
and two nodes stand beside each efficiency as what it is measured by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Needs, Options, Place
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
    Scope,
    Series,
    format_bytes,
    parse_bytes,
)

if TYPE_CHECKING:
    from seatrial.bench.subgroups import GroupResult

# At 1 GiB the links are saturated. On a CPU: a rehearsal.
GPU_SIZE, CPU_SIZE = parse_bytes("1GiB"), parse_bytes("1MiB")


class ScalingOptions(Options):
    """``size``: bytes of the buffer on each rank; by default what suits the device. ``seconds`` cap each step."""

    size: ByteSize | None = Field(default=None, ge=4)
    seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)


def measure(place: Place, options: ScalingOptions) -> Iterator[Observation]:
    """Yield busbw by number of nodes on rank 0. Raises NotApplicable on a single node."""
    from seatrial.bench import collectives, subgroups

    nodes = subgroups.ranks_by_node(place.node)
    if len(nodes) < 2:
        raise NotApplicable("one node does not scale: it is what more nodes are compared with")
    path = collectives.describe_group()
    size = options.size or (GPU_SIZE if place.device.startswith("cuda") else CPU_SIZE)
    results: dict[int, GroupResult] = {}
    for count, ranks in steps(list(nodes.values())).items():
        place.note(_nodes(count))
        (results[count],) = subgroups.all_reduce([ranks], size, place.device, options.seconds)
    path["transports"] = _transports.transports(place.device)
    if place.rank == 0:
        facts = {**path, "nodes": len(nodes), "size": size, "order": list(nodes)}
        yield from (Fact(name=name, value=value) for name, value in facts.items())
        yield from _figures(results, size)
        yield Fact(name="how", value=_how(path, size, results))


def steps(members: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Number of nodes → the ranks of the first so many: the powers of two, and all. A single rank reduces nothing."""
    counts = {2**power for power in range(len(members).bit_length()) if 2**power < len(members)} | {len(members)}
    found = {count: sorted(chain.from_iterable(members[:count])) for count in sorted(counts)}
    return {count: ranks for count, ranks in found.items() if len(ranks) > 1}


def _figures(results: Mapping[int, GroupResult], size: int) -> Iterator[Observation]:
    rates = {count: result.busbw(size) for count, result in results.items()}
    middle = {count: median(own) for count, own in rates.items()}
    for count, own in rates.items():
        yield Metric(name=f"busbw.{_nodes(count)}", value=middle[count], unit="GB/s", subject=CLUSTER, samples=own)
    most = max(rates)
    for base in (1, 2):
        if base in rates and base < most:
            value = middle[most] / middle[base]
            yield Metric(name=f"efficiency.{_nodes(base)}", value=value, unit="of the base", subject=CLUSTER)
    x, y = tuple(map(float, middle)), tuple(middle.values())
    yield Series(name="busbw", subject=CLUSTER, x=x, y=y, x_unit="nodes", y_unit="GB/s")
    yield Fact(name="efficiency", value=_efficiency(middle))
    yield from group_data_check({_nodes(count): result for count, result in results.items()})


def _efficiency(busbw: Mapping[int, float]) -> dict[str, dict[str, float]]:
    """Of every step, as a share of what one node and two nodes reach, where those were measured."""
    found: dict[str, dict[str, float]] = {}
    for count, own in busbw.items():
        bases = [base for base in (1, 2) if base in busbw and base <= count]
        found[_nodes(count)] = {f"of {_nodes(base)}": round(own / busbw[base], 4) for base in bases}
    return found


def _how(path: Mapping[str, object], size: int, results: Mapping[int, GroupResult]) -> str:
    ranks = ", ".join(f"{len(result.ranks)} on {_nodes(count)}" for count, result in results.items())
    return (
        f"{carrier(path)}: all-reduce of {format_bytes(size)} over the first nodes in the order of ranks ({ranks}), "
        "the others looking on; efficiency.BASE is the busbw of all nodes over that of BASE"
    )


def _nodes(count: int) -> str:
    return "1node" if count == 1 else f"{count}nodes"


CHECK = Check(
    name="collectives.scaling",
    title="All-reduce from one node to all",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={"busbw.*": "GB/s", "efficiency.*": "of the base", "wrong_elements": "count"},
    rules=(
        intact(
            "The fact wrong_data says with how many nodes, and names rank, offset and flipped bits; collectives.pairs "
            "names sender and receiver"
        ),
    ),
    measure=measure,
    performance=("busbw.*", "efficiency.*"),
    bounds=BANDWIDTHS,
    limit_s=600.0,
    needs=Needs(ranks=2),
    options=ScalingOptions,
)
