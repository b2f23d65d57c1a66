"""Rules × measurements → verdicts. Pure: the same record judged again, with the same rules, gives the same verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.hardware.references import NOTHING, Known
from seatrial.judge.groups import SHAPE, Alike, Group, fleets_of, groups_of, outside
from seatrial.judge.plausibility import gives_up, key_of
from seatrial.judge.thresholds import NO_TROUBLE, Standards, evidence_of
from seatrial.judge.wording import inapplicable, opposite
from seatrial.model import CLUSTER, LEFT_OUT, WITHHELD, Limit, Measurement, Metric, Outcome, Rule, Verdict, format_value


def judge_check(
    check: Check, measurements: Sequence[Measurement], expect: Mapping[str, Limit], trial: str, known: Known = NOTHING
) -> list[Verdict]:
    """Every verdict on one check. A threshold of the trial outranks the check's own rules on the same metric, but for
    one that passes what the check calls broken: on load it is refused, and in a record both judge.

    Fails closed: a rule whose metric a place did not measure is an ERROR there, a check that no rule judged UNJUDGED.
    """
    if not measurements:
        return [Verdict(check=check.name, subject=CLUSTER, outcome=Outcome.ERROR, reason="not measured")]
    verdicts = list(_unmeasured(check.name, measurements))
    measured = [measurement for measurement in measurements if not measurement.skipped]
    rules = _effective(check.rules, expect, trial)
    groups = groups_of(check, measured, {rule.metric for rule in rules})
    of_fleets = fleets_of([rule.metric for rule in rules if rule.baseline or not rule.expect], measured)
    rulings = [
        _Ruling(
            check.name,
            rule,
            Alike(groups, rule.where),
            Standards(check, rule, "" if rule in check.rules else trial, known, of_fleets.get(rule.metric)),
            _instead(rule, expect),
        )
        for rule in rules
    ]
    for group in groups:  # in this order, since of thousands of places one is at hand and the others are not
        for ruling in rulings:
            ruling.on(group)
    verdicts += (verdict for ruling in rulings for verdict in ruling.verdicts)
    if not verdicts:
        reason = "measured, and no rule judges it"
        verdicts = [Verdict(check=check.name, subject=CLUSTER, outcome=Outcome.UNJUDGED, reason=reason)]
    return verdicts


def _unmeasured(check: str, measurements: Sequence[Measurement]) -> Iterator[Verdict]:
    for measurement in measurements:
        subject = measurement.subject
        if measurement.error:
            yield Verdict(check, subject, Outcome.ERROR, measurement.error)
        elif measurement.skipped:
            yield Verdict(check, subject, Outcome.SKIP, measurement.skipped)


def _effective(rules: Sequence[Rule], expect: Mapping[str, Limit], trial: str) -> list[Rule]:
    own = {rule.metric: rule for rule in rules}
    why, fix = f"the trial {trial} asks for it", ""
    trial_rules = [
        Rule(
            metric=metric,
            expect=limit,
            baseline=key_of(metric, tuple(rules)) or None,
            like=own[metric].where if metric in own else {},
            shows=own[metric].shows if metric in own else (),
            mirrored=own[metric].mirrored if metric in own else 0.0,
            own=own[metric].expect if metric in own else None,
            signed=metric not in own or own[metric].signed,
            why=own[metric].why if metric in own else why,
            fix=own[metric].fix if metric in own else fix,
        )
        for metric, limit in expect.items()
    ]
    kept = [one for one in rules if one.metric not in expect or gives_up(expect[one.metric], "", one.metric, rules)]
    return kept + trial_rules


class _Ruling:
    """What one rule says of all groups: ``verdicts``."""

    def __init__(self, check: str, rule: Rule, alike: Alike, standards: Standards, instead: str) -> None:
        self._check, self._rule, self._alike, self._standards, self._instead = check, rule, alike, standards, instead
        self._asked = (*rule.where, *SHAPE) if rule.baseline else tuple(rule.where)
        self.verdicts: list[Verdict] = []

    def on(self, group: Group) -> None:
        """Judge one more group."""
        name = self._rule.metric
        if (self._rule.where or group.many) and (trouble := self._inapplicable(group)):
            self._valueless(group, *trouble)
            return
        metrics = group.metrics.get(name, ())
        if not metrics and not group.failed:  # an error has been told already
            self.verdicts.append(_missing(self._check, group, self._rule, self._instead))
        elif metrics and group.given[name]:
            if absent := group.absent(name):
                self._valueless(group, Outcome.ERROR, f"{name} was not measured everywhere; not of {absent}")
            for place, why in group.excused(name).items():
                self.verdicts.append(Verdict(self._check, place, Outcome.SKIP, f"does not apply: {why}", name))
        found = [self._standards.verdict(group, metric) for metric in metrics]
        self.verdicts += _mirrored(self._rule, metrics, found) if self._rule.mirrored else found

    def _inapplicable(self, group: Group) -> tuple[Outcome, str] | None:
        """Why the rule does not apply to a group, and whether it should."""
        name, where, facts = self._rule.metric, self._rule.where, group.facts
        if group.many and (unlike := group.contradiction(self._asked)):
            return Outcome.ERROR, f"the ranks are not of one mind, so that {name} is not to be judged: {unlike}"
        if where.items() <= facts.items() or not (otherwise := outside(where, facts)):
            return None
        reason = inapplicable(where, otherwise, facts)
        if like := self._alike.to(group, otherwise):  # what applies to one device applies to its like
            reason = f"{name} is not judged here: {reason}; it applies to {like}, and nothing says why not here"
        return (Outcome.ERROR if like else Outcome.SKIP), reason

    def _valueless(self, group: Group, outcome: Outcome, reason: str) -> None:
        self.verdicts.append(Verdict(self._check, group.subject, outcome, reason, self._rule.metric))


def _mirrored(rule: Rule, metrics: Sequence[Metric], verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
    """The verdicts on ``metrics``, each of one order of a pair, and what the other order says of it."""
    orders = {metric.subject: metric.value for metric in metrics}
    for metric, verdict in zip(metrics, verdicts, strict=True):
        reverse = opposite(metric.subject)
        other = orders.get(reverse, 0.0)
        yield verdict if metric.value >= rule.mirrored * other else _one_way(verdict, rule, metric, other, reverse)


def _one_way(verdict: Verdict, rule: Rule, metric: Metric, other: float, reverse: str) -> Verdict:
    """On an order of a pair that is far under the ``other``."""
    figure, colon, meaning = verdict.reason.partition(": ")
    words = f"{figure}, and {metric.value / other:.1%} of the {format_value(other, metric.unit)} of {reverse}"
    outcome = Outcome.WARN if verdict.outcome in NO_TROUBLE else verdict.outcome
    reason = f"{words}{colon}{meaning}" if colon else f"{words}: {rule.why}"
    judged_by = f"{verdict.judged_by}; warns under {rule.mirrored:.0%} of the other order"
    evidence = verdict.evidence if outcome is verdict.outcome else evidence_of(metric)
    return replace(verdict, outcome=outcome, reason=reason, evidence=evidence, fix=rule.fix, judged_by=judged_by)


def _instead(rule: Rule, expect: Mapping[str, Limit]) -> str:
    """The trial's threshold on the same figure at another size, such as ``busbw.1GiB`` for ``busbw.8GiB``."""
    family = rule.metric.rpartition(".")[0]
    others = (metric for metric in expect if metric != rule.metric)
    return next((metric for metric in others if family and metric.rpartition(".")[0] == family), "")


def _missing(check: str, group: Group, rule: Rule, instead: str) -> Verdict:
    """Not measured: an ERROR, but for a size that the trial does not ask for and has a threshold in place of.

    Whoever accepts is told of that one: it names its judge.
    """
    left_out, withheld = (_reason(group.facts.get(fact), rule.metric) for fact in (LEFT_OUT, WITHHELD))
    if left_out and instead:
        reason = f"{check} {rule.metric} is not judged: {left_out}, and it has a threshold on {instead}"
        judged_by = "rule: where the trial measures this size"
        return Verdict(check, group.subject, Outcome.SKIP, reason, rule.metric, judged_by=judged_by)
    why = f"{left_out}, with a threshold on none of them" if left_out else withheld
    said = f" ({why})" if why else ""
    reason = f"{rule.metric} was not measured{said}, so that nothing is known of this: {rule.why}"
    return Verdict(check, group.subject, Outcome.ERROR, reason, rule.metric)


def _reason(reasons: JsonValue, metric: str) -> str:
    return str(reasons.get(metric, "")) if isinstance(reasons, Mapping) else ""
