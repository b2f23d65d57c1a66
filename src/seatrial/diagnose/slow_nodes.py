"""The reasons to search for slow nodes, and the result of the search: pair rates → findings and notes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median

from pydantic import JsonValue, ValidationError

from seatrial.checks.check import Check
from seatrial.diagnose.causes import SPEED_CHECKS, Run, node_command, node_differences, overlap
from seatrial.hardware import networks
from seatrial.hardware.pair_rates import (
    CPU_LIMITS,
    GPU_LIMITS,
    PAIR_RATES,
    RANKS_BY_NODE,
    Conclusion,
    Direction,
    PairRate,
    SlowPath,
    SlowRank,
)
from seatrial.hardware.pair_search import conclude
from seatrial.model import CLUSTER, Finding, Insight, Measurement, Metric, Outcome, Phase, Scope, Verdict, node_of
from seatrial.model.trial import Confidence
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more

SLOW_CAUSES = ("slow_node", "slow_gpu", "slow_path", "slow_rail")
# A node or rank whose speed has no verdict is a reason to search below this share of its peers. Over gloo on four nodes
# that share two loaded CPU cores, healthy ranks reached at least 0.37, ranks behind a link of 200 Mbit/s at most 0.11.
UNJUDGED_SHARE = 0.25
_MAX_NAMED = 6
_NARROW = 0.2  # a larger relative spread is shown as a range of rates
_JUDGED = (Outcome.PASS, Outcome.WARN, Outcome.FAIL)
_DIRECTION_TEXTS: dict[Direction | None, str] = {
    "sends": ", only when it sends",
    "receives": ", only when it receives",
    "both": ", in both directions",
    None: "",
}


def reasons_to_search(run: Run, nodes: int | None = None) -> dict[str, str]:
    """Check that moves data between nodes → why a search for slow nodes is needed; empty if none is needed.

    There are three reasons. First: a performance metric of the check has a WARN or FAIL. Second: a share that compares
    nodes or ranks has no verdict and is below UNJUDGED_SHARE. Third, if neither applies: no metric of the check has a
    verdict, and no check compares nodes. The third reason does not count on two ``nodes``, which are only one pair.
    ``nodes`` is None if the search has run already; the third reason then counts.
    """
    inter_node = {name: check for name, check in run.checks.items() if _is_inter_node(check)}
    with_value = (verdict for verdict in run.verdicts if verdict.outcome in _JUDGED and verdict.check in inter_node)
    judged = list(filter(run.is_speed, with_value))
    bad = {each.check: each.summary for each in reversed(judged) if each.outcome is not Outcome.PASS}
    with_verdict = {(verdict.check, verdict.metric) for verdict in judged}
    shares = list(_inter_node_shares(run.measurements, inter_node))
    unjudged = {}  # of several low shares of a check, the lowest is named
    for check, metric in sorted(shares, key=lambda share: share[1].value, reverse=True):
        if metric.value < UNJUDGED_SHARE and (check, metric.name) not in with_verdict:
            value = f"{metric.value:.3g} {metric.unit}"
            unjudged[check] = f"{metric.name} is {value} on {metric.subject}, without a threshold"
    if reasons := {**unjudged, **bad}:
        return reasons
    if nodes == 2:
        return {}
    judged_checks = {check for check, _ in with_verdict}
    measured = {each.check for each in run.measurements if each.metrics and each.check in inter_node}
    uncompared = [] if shares else [name for name in measured - judged_checks if inter_node[name].operation]
    return dict.fromkeys(sorted(uncompared), "no reference value, and no check compares nodes")


def _inter_node_shares(
    measurements: Sequence[Measurement], inter_node: Mapping[str, Check]
) -> Iterator[tuple[str, Metric]]:
    """(check, metric) of all shares that compare nodes or ranks by their paths to other nodes.

    Shares of single pairs do not count: over gloo, healthy pairs reach only a fifth of the best pair by chance.
    """
    for measurement in measurements:
        declared = inter_node[measurement.check].declared if measurement.check in inter_node else ()
        comparisons = {each.name: each.comparison for each in declared if each.comparison}
        for metric in measurement.metrics:
            comparison = comparisons.get(metric.name)
            if comparison and comparison.inter_node and not comparison.is_speedup and "->" not in metric.subject:
                yield measurement.check, metric


def _is_inter_node(check: Check) -> bool:
    """Whether the check moves data between nodes and can show slow nodes.

    Not if it has a communicator per node, compares only GPUs, or is the search for slow nodes itself.
    """
    comparisons = [each.comparison for each in check.declared if each.comparison]
    compares_gpus = comparisons and not any(each.inter_node for each in comparisons)
    between_ranks = check.scope is Scope.CLUSTER and check.phase in (Phase.INTERCONNECT, Phase.DISTRIBUTED)
    return between_ranks and not check.per_node and not compares_gpus and not check.localizes


def search_notes(run: Run, findings: Sequence[Finding]) -> tuple[Insight, ...]:
    """A note on the first check that is a reason to search: why the search has no result, or that no node is slow.

    No note without a search, without a reason, and if ``findings`` name what is slow.
    """
    reasons = reasons_to_search(run) if run.searches else {}
    if not reasons:
        return ()
    errors = [each.error or each.skipped for each in run.searches]
    last = next((conclusion for conclusion, _ in reversed([*_conclusions(run.searches)])), None)
    if last is None:
        text = f"not completed, so that no node is named: {next(filter(None, errors), 'no rank has measured')}"
    elif any(finding.cause in SLOW_CAUSES for finding in findings):
        return ()
    elif last.nodes == 2:
        text = (
            f"all rails and both directions between the two nodes are equally fast ({last.healthy_gb_s:.3g} GB/s per "
            "rail). Two nodes are one pair: a node that is slow on all rails is not visible. Search with a third node."
        )
    else:
        text = (
            f"no slow node, GPU, rail or path was found among {last.nodes} nodes; {_healthy_text(last)}. "
            "The cause is common to all nodes, inside the nodes, or not in the network."
        )
    return (Insight(check=next(iter(reasons)), title="search for slow nodes", text=text),)


def search_findings(run: Run, causes: Sequence[Finding] = ()) -> list[Finding]:
    """One finding for each slow rail, node, GPU and path of the searches, with the bad verdicts that it explains.

    The evidence names the likely cause of a slow node: findings in ``causes`` on this node, and settings of the node
    that differ from other nodes.
    """
    searches = [*run.measurements, *run.searches]
    search_checks = {search.check for search in searches}
    inter_node = {name for name, check in run.checks.items() if _is_inter_node(check)}
    bad = [
        verdict
        for verdict in run.bad
        if verdict.check in search_checks or (verdict.check in inter_node and run.is_speed(verdict))
    ]
    findings = {}
    for conclusion, search in _conclusions(searches):
        differences = node_differences(run.measurements, run.checks)
        writer = _FindingWriter(conclusion, search, differences, causes, run.node_prefix)
        for finding in writer.findings():
            places = finding.subject.split(", ")
            finding = finding.explaining(verdict for verdict in bad if _can_follow(verdict, places))
            findings[finding.cause, finding.subject] = finding
    return list(findings.values())


def _can_follow(verdict: Verdict, places: Iterable[str]) -> bool:
    """Whether the verdict can be a consequence of a slow network at one of ``places``."""
    is_speed = any(fnmatchcase(verdict.check, pattern) for pattern in SPEED_CHECKS)
    return is_speed and any(overlap(place, verdict.subject) for place in places)


def _conclusions(searches: Sequence[Measurement]) -> Iterator[tuple[Conclusion, Measurement]]:
    for measurement in searches:
        if not measurement.error and (rates := _pair_rates(measurement)):
            limits = GPU_LIMITS if measurement.facts.get("backend") == "nccl" else CPU_LIMITS
            conclusion = conclude(rates, limits)
            if conclusion.rails:
                yield conclusion, measurement


def _pair_rates(search: Measurement) -> list[PairRate]:
    """The recorded rates of a search; none if the record is damaged."""
    rows = search.facts.get(PAIR_RATES)
    try:
        return [PairRate.model_validate(row) for row in rows] if isinstance(rows, list) else []
    except ValidationError:
        return []


# First command and fix for a slow node on one kind of network
_RDMA = (
    "ibstat | grep -E \"CA '|State|Rate\"; lspci -vv | grep -E 'Mellanox|LnkSta:'; nvidia-smi topo -m",
    "Check rate, width and errors of the NIC, then its cable and its switch port (perfquery, mlxlink -d DEVICE). "
    "Exchange cable or port with a good node: if the fault follows, replace the part.",
)
_TCP = (
    "ip -s link; tc qdisc show; grep -H . /sys/class/net/*/speed /sys/class/net/*/mtu 2>/dev/null",
    "Check speed and errors of the interface (ethtool DEV, ethtool -S DEV), a traffic shaper (tc qdisc show), then its "
    "cable and its switch port.",
)


@dataclass(frozen=True)
class _FindingWriter:
    """The findings of one search. ``differences``: see node_differences; ``causes``: those of the trial's verdicts."""

    conclusion: Conclusion
    search: Measurement
    differences: Mapping[str, Mapping[str, str]]
    causes: Sequence[Finding]
    node_prefix: str

    def findings(self) -> Iterator[Finding]:
        """The findings of slow rails, then of slow nodes and GPUs, then of slow paths."""
        for rail, deficit in self.conclusion.slow_rails.items():
            evidence = (
                f"rank {rail} of every node is {deficit:.0%} slower with its partners than other ranks of the nodes"
            )
            yield self._finding("slow_rail", f"network rail {rail} is slow on all nodes", CLUSTER, evidence, "high")
        yield from map(self._node_finding, grouped((rank.node, rank) for rank in self.conclusion.ranks).values())
        yield from map(self._path_finding, grouped((path.pair, path) for path in self.conclusion.paths).values())

    def _node_finding(self, ranks: Sequence[SlowRank]) -> Finding:
        node, deficits = ranks[0].node, [deficit for rank in ranks for deficit in rank.deficits]
        whole_node = len(ranks) == self.conclusion.rails
        subject = node if whole_node else ", ".join(self._rank_subject(node, rank.rail) for rank in ranks)
        evidence = (
            f"{subject} is {_range_text(deficits)} slower in every pair{_direction_text(ranks)} "
            f"({self._node_rates(node)}); {_healthy_text(self.conclusion)}."
        )
        likely = self._likely_cause(node)
        title = f"{node} is slow to every other node" if whole_node else f"GPUs of {node} are slow to every other node"
        confidence = self._confidence(deficits)
        return self._finding("slow_node" if whole_node else "slow_gpu", title, subject, evidence + likely, confidence)

    def _path_finding(self, paths: Sequence[SlowPath]) -> Finding:
        first, second = paths[0].pair
        deficits = [deficit for path in paths for deficit in path.deficits]
        direction = {"sends": f", only from {first} to {second}", "receives": f", only from {second} to {first}"}
        directions = {path.direction or "" for path in paths}
        where = direction.get(directions.pop(), "") if len(directions) == 1 else ""
        slower = f"{_range_text(deficits)} slower with each other{where}"
        healthy = _healthy_text(self.conclusion)
        evidence = f"{first} and {second} are {slower}, but not with other nodes; {healthy}."
        title = f"the path between {first} and {second} is slow"
        if self.conclusion.nodes == 2:
            evidence = self._two_node_evidence(paths, slower)
        return self._finding("slow_path", title, f"{first}->{second}", evidence, self._confidence(deficits))

    def _two_node_evidence(self, paths: Sequence[SlowPath], slower: str) -> str:
        """The evidence without a third node: the slow ranks of both nodes, and the likely causes on each node."""
        pair = paths[0].pair
        slow_ranks = " and ".join(
            and_more([self._rank_subject(node, path.rail) for path in paths], _MAX_NAMED) for node in pair
        )
        rails = (
            f"; the other rails reach {self.conclusion.healthy_gb_s:.3g} GB/s" if self.conclusion.healthy_pairs else ""
        )
        unknown = " Two nodes are one pair, which does not show which node is at fault. Search with a third node."
        likely_causes = {node: self._likely_cause(node) for node in pair}
        likely = "".join(f" On {node}:{text}" for node, text in likely_causes.items() if text)
        return f"{slow_ranks} are {slower}{rails}.{unknown}{likely}"

    def _finding(self, cause: str, title: str, subject: str, evidence: str, confidence: Confidence) -> Finding:
        command, fix = self._command_and_fix()
        node = node_of(subject).partition("->")[0]
        commands = {
            "slow_path": f"tracepath {subject.partition('->')[2]}; {command}",
            "slow_rail": "ibstat; ibqueryerrors",
        }
        return Finding(
            cause=cause,
            title=title,
            subject=subject,
            confidence=confidence,
            evidence=evidence,
            first_command=node_command(commands.get(cause, command), node, self.node_prefix),
            fix=_PATH_FIX if cause == "slow_path" else fix,
            action="check-cable",
            source=f"{PAIR_RATES} of {self.search.check}",
        )

    def _command_and_fix(self) -> tuple[str, str]:
        facts = self.search.facts
        transports = facts.get("transports")
        names = transports if isinstance(transports, dict) else {}
        kind, unknown = networks.slowest(names)
        if facts.get("backend") != "nccl" or kind in ("tcp", "tcpx", "tcpxo"):
            return _TCP
        if not unknown:
            return _RDMA
        fix = f"NCCL uses {unknown}, which is not in the table of networks. RDMA: {_RDMA[1]} TCP: {_TCP[1]}"
        return f"{_RDMA[0]}; {_TCP[0]}", fix

    def _confidence(self, deficits: Sequence[float]) -> Confidence:
        """High if all of several repetitions are slower than healthy pairs."""
        return "high" if min(deficits) > 0 and len(deficits) > 1 else "medium"

    def _rank_subject(self, node: str, rail: int) -> str:
        """The subject of the rank of ``node`` on ``rail``, as recorded; else such as node1/rank0."""
        by_node: JsonValue = self.search.facts.get(RANKS_BY_NODE)
        subjects = by_node.get(node) if isinstance(by_node, dict) else None
        if isinstance(subjects, list) and rail < len(subjects):
            return str(subjects[rail])
        return f"{node}/rank{rail}"

    def _node_rates(self, node: str) -> str:
        """The pairs of the node, at most _MAX_NAMED, with their GB/s in bidirectional steps, and its lost packets."""
        rates = _pair_rates(self.search)
        of_node = [rate for rate in rates if node in rate.pair and not rate.unidirectional]
        bidirectional = {rate.pair: median(rate.gb_s) for rate in of_node}
        pairs = [f"{a}-{b} {gb_s:.3g} GB/s" for (a, b), gb_s in bidirectional.items()]
        lost = median(rate.retransmitted for rate in of_node)
        return and_more(pairs, _MAX_NAMED) + (f"; {lost:.0%} of TCP segments sent again" if lost >= 0.01 else "")

    def _likely_cause(self, node: str) -> str:
        """The likely cause: other bad verdicts on the node, and its settings that differ from most nodes."""
        texts = [
            f"{cause.title} on {cause.subject}"
            for cause in self.causes
            if cause.cause not in (*SLOW_CAUSES, "node_differs") and node_of(cause.subject) == node
        ]
        texts += [f"{name} is {value}" for name, value in self.differences.get(node, {}).items()]
        return f" Likely cause: {and_more(texts, _MAX_NAMED)}." if texts else ""


_PATH_FIX = (
    "Compare the route with that of a good pair (ibtracert or traceroute). Check the switch ports on it for errors and "
    "links that are down (ibqueryerrors, or the counters of the switch)."
)


def _range_text(deficits: Sequence[float]) -> str:
    low, high = min(deficits), max(deficits)
    return f"{high:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"


def _healthy_text(conclusion: Conclusion) -> str:
    """The rates of the healthy pairs as text."""
    low, high = conclusion.healthy_range_gb_s
    middle = conclusion.healthy_gb_s
    spread = max(middle - low, high - middle) / middle if middle else 0.0
    if spread < _NARROW:
        return f"healthy pairs ({conclusion.healthy_pairs}): within {spread:.1%} of {middle:.3g} GB/s"
    return f"healthy pairs ({conclusion.healthy_pairs}): {low:.3g} to {high:.3g} GB/s"


def _direction_text(ranks: Sequence[SlowRank]) -> str:
    directions = {rank.direction for rank in ranks}
    return _DIRECTION_TEXTS[directions.pop()] if len(directions) == 1 else ""
