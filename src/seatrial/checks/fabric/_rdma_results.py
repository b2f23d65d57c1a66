"""Metrics of fabric.rdma from the output of perftest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING

from seatrial.checks.base import metric
from seatrial.checks.fabric._compute_ports import Kind
from seatrial.model import Fact, Observation

if TYPE_CHECKING:
    from seatrial.bench.perftest import ProgramResult, TransferResult
    from seatrial.discover.rdma_ports import PortDetails

MIN_COMPARABLE_PORTS = 3  # with two ports, a difference does not show which one is slow
MIN_SHARE = 0.90  # threshold of bw_vs_peers and path_share, as in collectives.pairs


@dataclass(frozen=True)
class RailPath:
    """One run of a tool from a port of ``source``, the client, to a port of ``target`` on the same rail.

    ``value`` is in Gb/s or us. ``failure``: RDMA between the ports failed. ``not_measured``: the tool failed.
    """

    tool: str
    source: str
    target: str
    rail: int
    source_port: PortDetails
    target_port: PortDetails
    value: float | None = None
    failure: str = ""
    not_measured: str = ""

    @property
    def key(self) -> str:
        return f"{self.source}/{self.source_port.name}->{self.target}/{self.target_port.name}"

    @property
    def ends(self) -> tuple[str, str]:
        """The subjects of both ports."""
        return f"{self.source}/{self.source_port.name}", f"{self.target}/{self.target_port.name}"

    @property
    def pair(self) -> str:
        return "->".join(sorted((self.source, self.target)))

    @property
    def rate_gbps(self) -> float:
        """The rate of the slower port."""
        return min(self.source_port.rate_gbps or 0.0, self.target_port.rate_gbps or 0.0)

    def with_result(self, result: TransferResult) -> RailPath:
        """This path with the value in the client's output, or with the error of the client or the server."""
        from seatrial.discover import perftest

        sides = {self.source: result.client, self.target: result.server}
        for node, side in sides.items():
            if error := perftest.transport_error(side.out + side.err):
                return replace(self, failure=f"{node}: {error}")
        try:
            text = result.client.out
            is_bandwidth = self.tool == perftest.BANDWIDTH_TOOL
            value = perftest.parse_bandwidth(text) if is_bandwidth else perftest.parse_latency(text).typical
        except ValueError as error:
            reasons = [f"{node}: {reason}" for node, side in sides.items() if (reason := _reason(side))]
            return replace(self, not_measured="; ".join(reasons) or f"{self.source}: {error}")
        return replace(self, value=value)


def _reason(side: ProgramResult) -> str:
    """Why one side did not succeed; empty if it ended without an error."""
    from seatrial.discover import perftest

    if side.code == 0 and not side.error:
        return ""
    exit_code = "" if side.code is None else f"exit code {side.code}"
    return "; ".join(filter(None, [side.error or exit_code, perftest.first_error(side.err)]))


def results_of_paths(paths: Sequence[RailPath]) -> Iterator[Observation]:
    """Yield the best values of each port over its partners, their shares, and the failures of each pair of nodes."""
    from seatrial.discover import perftest

    bandwidths = [path for path in paths if path.tool == perftest.BANDWIDTH_TOOL]
    best = _best_bandwidths(bandwidths)
    latency = _best_latencies([path for path in paths if path.tool == perftest.LATENCY_TOOL])
    measured = min(len(best), len(latency))
    too_few = f"no: a comparison needs {MIN_COMPARABLE_PORTS} ports, {measured} were measured"
    yield Fact(name="comparable", value="yes" if measured >= MIN_COMPARABLE_PORTS else too_few)
    peers: dict[Kind, list[float]] = {}
    for port in best.values():
        if port.is_at_port_rate:
            peers.setdefault(port.kind, []).append(port.gbps)
    medians = {kind: median(values) for kind, values in peers.items()}
    for subject, port in best.items():
        yield metric("write_bw", port.gbps, "Gb/s", subject)
        yield metric("rate_share", 100 * port.share, "%", subject)
        if port.is_at_port_rate and medians[port.kind]:
            yield metric("bw_vs_peers", port.gbps / medians[port.kind], "of the median", subject)
    median_latency = median(latency.values()) if latency else 0.0
    for subject, value in latency.items():
        yield metric("write_latency", value, "us", subject)
        yield metric("latency_vs_peers", value / median_latency, "x", subject)
    yield from _path_shares(bandwidths, best)
    yield from _pair_results(paths)
    yield Fact(name="paths", value=_values_by_tool(paths))


@dataclass(frozen=True)
class _PortBandwidth:
    """The bandwidth of a port on one path. ``share``: bandwidth divided by the rate of the path's slower port.

    ``is_at_port_rate``: whether this port has the rate of the slower port, so that the partner does not limit it.
    """

    gbps: float
    share: float
    is_at_port_rate: bool
    kind: Kind


def _best_bandwidths(paths: Sequence[RailPath]) -> dict[str, _PortBandwidth]:
    """Port → its bandwidth with the best partner, in the slower direction (sending or receiving).

    A path to a port with a lower rate counts only if there is no other path. RDMA that fails counts as 0. A port that
    was not measured in both directions is omitted.
    """
    by_port: dict[str, tuple[list[_PortBandwidth], list[_PortBandwidth]]] = {}
    for path in paths:
        for end, (subject, port) in enumerate(zip(path.ends, (path.source_port, path.target_port), strict=True)):
            directions = by_port.setdefault(subject, ([], []))
            gbps = 0.0 if path.failure else path.value
            if gbps is not None:
                share, at_port_rate = gbps / path.rate_gbps, path.rate_gbps == port.rate_gbps
                directions[end].append(_PortBandwidth(gbps, share, at_port_rate, port.kind))
    best_partner = attrgetter("is_at_port_rate", "share")
    return {
        subject: min((max(values, key=best_partner) for values in directions), key=attrgetter("share"))
        for subject, directions in by_port.items()
        if all(directions)
    }


def _best_latencies(paths: Sequence[RailPath]) -> dict[str, float]:
    """Port → its lowest latency in us over all partners; without ports that have no value."""
    best: dict[str, float] = {}
    for path in paths:
        if path.value is not None:
            for subject in path.ends:
                best[subject] = min(best.get(subject, path.value), path.value)
    return best


def _pair_results(paths: Sequence[RailPath]) -> Iterator[Observation]:
    """Yield for each pair of nodes the number of its failed and of its unmeasured paths, and the reasons as facts."""
    counts: dict[str, Counter[str]] = {path.pair: Counter() for path in paths}
    reasons: dict[str, dict[str, str]] = {"failed_paths": {}, "paths_not_measured": {}}
    for path in paths:
        for name, reason in (("failed_paths", path.failure), ("paths_not_measured", path.not_measured)):
            if reason:
                counts[path.pair][name] += 1
                reasons[name][f"{path.tool} {path.key}"] = reason
    for name, by_path in reasons.items():
        yield Fact(name=name, value=dict(by_path))
        for pair, count in counts.items():
            yield metric(name, count[name], "paths", pair)


def _path_shares(bandwidths: Sequence[RailPath], best: Mapping[str, _PortBandwidth]) -> Iterator[Observation]:
    """Yield for each pair of nodes the lowest share of its paths: bandwidth / best bandwidth of the slower port.

    The fact ``slow_paths`` lists the paths below MIN_SHARE.
    """
    lowest: dict[str, float] = {}
    slow_paths: dict[str, str] = {}
    for path in bandwidths:
        lower_best = min(best[end].gbps if end in best else 0.0 for end in path.ends)
        if path.value is not None and lower_best:
            share = path.value / lower_best
            lowest[path.pair] = min(lowest.get(path.pair, share), share)
            if share < MIN_SHARE:
                slow_paths[path.key] = f"{path.value:g} of {lower_best:g} Gb/s"
    for pair, share in lowest.items():
        yield metric("path_share", share, "of the best", pair)
    yield Fact(name="slow_paths", value=slow_paths)


def _values_by_tool(paths: Sequence[RailPath]) -> dict[str, dict[str, float | None]]:
    """Tool → path → Gb/s or us."""
    table: dict[str, dict[str, float | None]] = {}
    for path in paths:
        table.setdefault(path.tool, {})[path.key] = path.value
    return table
