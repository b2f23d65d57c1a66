"""Metrics of fabric.rdma from the output of perftest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING

from seatrial.checks.declare import Answers, absent, fact, value
from seatrial.checks.fabric._compute_ports import Kind
from seatrial.util.grouping import grouped

if TYPE_CHECKING:
    from seatrial.bench.perftest import ProgramResult, TransferResult
    from seatrial.discover.rdma_ports import PortDetails

MIN_COMPARABLE_PORTS = 3  # with two ports, a difference does not show which one is slow
MIN_SHARE = 0.90  # threshold of bw_vs_peers and path_share, as in collectives.pairs


@dataclass(frozen=True)
class RailPath:
    """One run of a tool from a port of ``source``, the client, to a port of ``target`` on the same rail.

    ``value`` is in Gb/s or us. ``failure``: the error if RDMA between the ports failed. ``not_measured``: the error if
    the tool failed.
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
    def source_subject(self) -> str:
        return f"{self.source}/{self.source_port.name}"

    @property
    def target_subject(self) -> str:
        return f"{self.target}/{self.target_port.name}"

    @property
    def key(self) -> str:
        return f"{self.source_subject}->{self.target_subject}"

    @property
    def pair(self) -> str:
        """The subject of the pair of nodes, the same for both directions."""
        return "->".join(sorted((self.source, self.target)))

    @property
    def rate_gbps(self) -> float:
        """The rate of the slower port."""
        return min(self.source_port.rate_gbps or 0.0, self.target_port.rate_gbps or 0.0)

    def with_result(self, result: TransferResult) -> RailPath:
        """This path with the value in the client's output, or with the error of the client or the server."""
        from seatrial.discover import perftest

        result_by_node = {self.source: result.client, self.target: result.server}
        for node, program in result_by_node.items():
            if error := perftest.transport_error(program.out + program.err):
                return replace(self, failure=f"{node}: {error}")
        try:
            text = result.client.out
            is_bandwidth = self.tool == perftest.BANDWIDTH_TOOL
            value = perftest.parse_bandwidth(text) if is_bandwidth else perftest.parse_latency(text)
        except ValueError as error:
            reasons = {node: _failure_reason(program) for node, program in result_by_node.items()}
            texts = [f"{node}: {reason}" for node, reason in reasons.items() if reason]
            return replace(self, not_measured="; ".join(texts) or f"{self.source}: {error}")
        return replace(self, value=value)


def _failure_reason(program: ProgramResult) -> str:
    """Why the client or the server failed; empty if it ended without an error."""
    from seatrial.discover import perftest

    if program.code == 0 and not program.error:
        return ""
    exit_code = "" if program.code is None else f"exit code {program.code}"
    return "; ".join(filter(None, [program.error or exit_code, perftest.first_error(program.err)]))


def results_of_paths(paths: Sequence[RailPath], memory: str) -> Answers:
    """Yield for each port its best values over all partners, compared with the port's rate and with other ports.

    Also yield the lowest path share and the failures of each pair of nodes. ``memory``: which memory the data is in.
    """
    from seatrial.discover import perftest

    bandwidth_paths = [path for path in paths if path.tool == perftest.BANDWIDTH_TOOL]
    bandwidth_by_port = _best_bandwidths(bandwidth_paths)
    latencies = grouped(
        (subject, path.value)
        for path in paths
        for subject in (path.source_subject, path.target_subject)
        if path.tool == perftest.LATENCY_TOOL and path.value is not None
    )
    latency_by_port = {subject: min(latencies_of_port) for subject, latencies_of_port in latencies.items()}
    measured_ports = min(len(bandwidth_by_port), len(latency_by_port))
    comparable = measured_ports >= MIN_COMPARABLE_PORTS
    if not comparable:
        too_few = f"a comparison needs {MIN_COMPARABLE_PORTS} ports, {measured_ports} were measured"
        yield absent(("bw_vs_peers", "path_share", "latency_vs_peers"), too_few)
    gbps_by_kind = grouped((each.kind, each.gbps) for each in bandwidth_by_port.values() if each.is_at_port_rate)
    medians = {kind: median(values) for kind, values in gbps_by_kind.items()}
    for subject, bandwidth in bandwidth_by_port.items():
        yield value("write_bw", bandwidth.gbps, subject)
        yield value("rate_share", 100 * bandwidth.share, subject, evidence={"memory": memory})
        if comparable and bandwidth.is_at_port_rate and medians[bandwidth.kind]:
            yield value("bw_vs_peers", bandwidth.gbps / medians[bandwidth.kind], subject)
    median_latency = median(latency_by_port.values()) if latency_by_port else 0.0
    for subject, latency in latency_by_port.items():
        yield value("write_latency", latency, subject)
        if comparable:
            yield value("latency_vs_peers", latency / median_latency, subject)
    if comparable:
        yield from _path_shares(bandwidth_paths, bandwidth_by_port)
    for name, error_of in (("failed_paths", attrgetter("failure")), ("paths_not_measured", attrgetter("not_measured"))):
        for pair, paths_of_pair in grouped((path.pair, path) for path in paths).items():
            errors = {f"{path.tool} {path.key}": error_of(path) for path in paths_of_pair if error_of(path)}
            yield value(name, len(errors), pair, evidence={name: errors})
    values_by_tool = grouped((path.tool, (path.key, path.value)) for path in paths)  # None: the path has no value
    yield fact("paths", {tool: dict(values) for tool, values in values_by_tool.items()})


@dataclass(frozen=True)
class _PortBandwidth:
    """The bandwidth of a port on one path. ``share``: bandwidth divided by the rate of the path's slower port.

    ``is_at_port_rate``: whether the partner's rate is at least this port's rate, so that the partner does not limit it.
    """

    gbps: float
    share: float
    is_at_port_rate: bool
    kind: Kind


def _best_bandwidths(paths: Sequence[RailPath]) -> dict[str, _PortBandwidth]:
    """Port → the lower of two bandwidths: sending to its best partner, and receiving from its best partner.

    A path to a port with a lower rate counts only if there is no other path. RDMA that fails counts as 0. A port that
    was not measured in both directions is omitted.
    """

    def bandwidth(path: RailPath, port: PortDetails) -> _PortBandwidth:
        gbps = 0.0 if path.failure else path.value or 0.0
        return _PortBandwidth(gbps, gbps / path.rate_gbps, path.rate_gbps == port.rate_gbps, port.kind)

    measured = [path for path in paths if path.failure or path.value is not None]
    sending = grouped((path.source_subject, bandwidth(path, path.source_port)) for path in measured)
    receiving = grouped((path.target_subject, bandwidth(path, path.target_port)) for path in measured)
    best_partner = attrgetter("is_at_port_rate", "share")
    return {
        subject: min((max(found[subject], key=best_partner) for found in (sending, receiving)), key=attrgetter("share"))
        for subject in sending
        if subject in receiving
    }


def _path_shares(paths: Sequence[RailPath], best_by_port: Mapping[str, _PortBandwidth]) -> Answers:
    """Yield for each pair of nodes the lowest share of its paths.

    The share of a path is its bandwidth, divided by the lower one of the best bandwidths of its two ports.
    """
    shares_by_pair: dict[str, list[float]] = {}
    slow_paths: dict[str, dict[str, str]] = {}  # pair of nodes → its paths below MIN_SHARE
    for path in paths:
        ends = path.source_subject, path.target_subject
        if path.value is not None and best_by_port.keys() >= {*ends}:
            lower_best = min(best_by_port[end].gbps for end in ends)
            if lower_best:
                shares_by_pair.setdefault(path.pair, []).append(share := path.value / lower_best)
                if share < MIN_SHARE:
                    slow_paths.setdefault(path.pair, {})[path.key] = f"{path.value:g} of {lower_best:g} Gb/s"
    for pair, shares in shares_by_pair.items():
        yield value("path_share", min(shares), pair, evidence={"slow_paths": slow_paths.get(pair, {})})
