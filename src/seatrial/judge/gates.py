"""The smallest fault that rules see which hold parts of a cluster against each other, or one way against another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from seatrial.checks.base import Check
from seatrial.judge.links import Links
from seatrial.model import Insight, Limit, Measurement, Rule

_BETWEEN_NODES = {
    "best_share": "a GPU's way out of its node",
    "pair_share": "the path between two nodes",
    "rail_share": "a rail",
}
_PARTS = {
    **_BETWEEN_NODES,
    "gpu_share": "a GPU's way to all others of its node",
    "path_share": "the path between two GPUs of a node",
}
_GAIN = "p2p_gain"


def relative(measurements: Sequence[Measurement], checks: Mapping[str, Check], links: Links) -> Iterator[Insight]:
    """One for each such rule that applied, however many nodes it applied to: what may be missing while it is passed."""
    watched = {
        name: rules
        for name, check in checks.items()
        if (rules := [rule for rule in check.rules if rule.metric in (*_PARTS, _GAIN)])
    }
    told: dict[tuple[str, str], Insight] = {}
    for one in (one for one in measurements if one.check in watched and one.metrics):
        names = {metric.name for metric in one.metrics}
        for rule in watched[one.check]:
            applies = all(one.facts.get(fact) == value for fact, value in rule.where.items())
            if rule.expect and rule.metric in names and applies:
                gain = rule.metric == _GAIN
                insight = _gain(one, rule.expect, links) if gain else _part(one.check, rule, rule.expect, links)
                told.setdefault((one.check, insight.text), insight)
    yield from told.values()


def _part(check: str, rule: Rule, limit: Limit, links: Links) -> Insight:
    missing = 1 - limit.value
    port = ""
    if rule.metric in _BETWEEN_NODES and links.network == "rdma" and links.ports:
        port = (
            f", one at {limit.value * links.ports.gbps:.0f} of {links.ports.gbps:g} Gb/s where the others fill theirs"
        )
    text = (
        f"{rule.metric} {limit}: the least that it sees is {_PARTS[rule.metric]} {missing:.0%} slower than the others"
        f"{port}; it does not see what slows all of them alike"
    )
    return Insight(check=check, title="gate", text=text, values={"missing_unseen": missing})


def _gain(measurement: Measurement, limit: Limit, links: Links) -> Insight:
    """Peer-to-peer may lose all but what the rule asks for of the slowest node's gain."""
    gain = min(metric.value for metric in measurement.metrics if metric.name == _GAIN)
    share = min(1.0, limit.value / gain) if gain > 0 else 1.0
    text = f"{_GAIN} {limit}: {share:.0%} of the {gain:.3g} x measured here: it sees peer-to-peer missing, not slow"
    missing = int(links.nvlinks * (1 - share) + 1e-9)
    if missing:
        text += f"; it is passed with {missing} of a GPU's {links.nvlinks} NVLinks down"
    return Insight(check=measurement.check, title="gate", text=text, values={"share_of_measured": share})
