"""The rules and reference values that verdicts rest on, as a document that two versions of seatrial can compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from seatrial.checks import catalog
from seatrial.model import Basis, BasisKind, Frozen, Outcome, Rule, Trial, Verdict
from seatrial.util.grouping import grouped

# Other kinds are in the rules, in the config of the record, or computed from its measurements
_REFERENCE_KINDS = (BasisKind.SITE, BasisKind.SKU, BasisKind.FABRIC_MODEL, BasisKind.PHYSICAL_LIMIT)
VerdictKey = tuple[str, str, str]  # check, subject, metric


class Rulebook(Frozen):
    """What a trial is judged by; the keys of ``rules`` and ``references`` are a check and a metric, or a pattern.

    ``thresholds``: SHA-256 of the checks and thresholds in the trial's config.
    """

    rules: dict[str, list[str]]
    references: dict[str, list[Basis]]
    thresholds: str


def digest(document: object) -> str:
    """The SHA-256 of a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def rulebook(judged: Trial) -> Rulebook:
    """The rules of the checks of a trial judged by this version, and the reference values of its verdicts."""
    of_trial = (
        (name, rule) for name, check in catalog().items() if name in judged.config["checks"] for rule in check.rules
    )
    rules = grouped((f"{name} {rule.metric}", text) for name, rule in of_trial for text in _rule_texts(rule))
    references = grouped(
        (f"{verdict.check} {verdict.metric}", basis)
        for verdict in judged.verdicts
        for basis in ((verdict.basis, *verdict.other_limits) if verdict.basis else ())
        if basis.kind in _REFERENCE_KINDS
    )
    return Rulebook(
        rules=dict(sorted(rules.items())),
        references={key: list(dict.fromkeys(bases)) for key, bases in sorted(references.items())},
        thresholds=digest(judged.config["checks"]),
    )


def _rule_texts(rule: Rule) -> Iterable[str]:
    """``>= 0.9 reference, else FAIL (when nodes >= 2; reference value all_reduce/bf16)`` of each limit."""
    notes = [f"when {rule.when}"] if str(rule.when) else []
    notes += [f"reference value {rule.reference}"] if rule.reference else []
    for limit in rule.limits:
        yield f"{limit} {limit.base}".strip() + f", else {limit.outcome}" + (f" ({'; '.join(notes)})" if notes else "")


def different_verdicts(recorded: Iterable[Verdict], judged: Iterable[Verdict]) -> dict[VerdictKey, tuple[str, str]]:
    """The outcomes in the record and by this version, where they differ; a record does not contain PASS."""
    before, now = _outcomes(recorded), _outcomes(judged)
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return {key: (before.get(key, str(Outcome.PASS)), now.get(key, str(Outcome.PASS))) for key in keys}


def _outcomes(verdicts: Iterable[Verdict]) -> dict[VerdictKey, str]:
    """The outcomes other than PASS of each check, subject and metric."""
    outcomes = grouped(
        ((verdict.check, verdict.subject, verdict.metric), verdict.outcome)
        for verdict in verdicts
        if verdict.outcome is not Outcome.PASS
    )
    return {key: " and ".join(sorted(found)) for key, found in outcomes.items()}


def changes(book: Rulebook, other: Rulebook) -> dict[str, str]:
    """What differs between the rulebook of a bundle and that of this version: key (check and metric) → text."""
    found: dict[str, list[str]] = {}
    for kind, name in (("rule", "rules"), ("reference value", "references")):
        sides: list[dict[str, list[object]]] = [getattr(each, name) for each in (book, other)]
        for key in sorted({*sides[0], *sides[1]}):
            old, new = ({str(each) for each in side.get(key, ())} for side in sides)
            if old != new:
                texts = [" and ".join(sorted(only)) or "none" for only in (old - new, new - old)]
                found.setdefault(key, []).append(f"{kind}: {texts[0]} in the bundle, {texts[1]} in this version")
    if book.thresholds != other.thresholds:
        found["thresholds"] = ["the thresholds of the bundle are not those of its record"]
    return {key: "; ".join(texts) for key, texts in found.items()}
