"""Verdicts → the decision. It fails closed: only what was measured, judged and found good is accepted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from operator import attrgetter

from seatrial.judge.thresholds import RECORDED
from seatrial.model import CLUSTER, Decision, Outcome, Verb, Verdict, worst
from seatrial.util.text import and_more

Said = Mapping[str, Set[Outcome]]  # which outcomes each check was given
_NAMED = 3  # how many places the decision names of a check
_UNHELD = (Outcome.SKIP, Outcome.ERROR)
_GOOD = (Outcome.PASS, Outcome.WARN, Outcome.SKIP)


def decide(
    required: Mapping[str, bool],
    verdicts: Sequence[Verdict],
    left_out: Mapping[str, str],
    scope: str,
    obstacles: Sequence[str] = (),
    unjudged: tuple[str, ...] = (),
) -> Decision:
    """The one answer for a trial whose checks are ``required`` (name → whether the decision needs it).

    A SKIP or an ERROR that names its judge says what nothing was held to. Whoever accepts is told of both; a SKIP is
    one that the trial permits, and no reason why anything is missing. Of what was only recorded ``unjudged`` tells.
    ``obstacles`` stand against acceptance whatever the verdicts are: the trial ended before its time, say.
    ``unjudged`` are figures that nothing judged: nothing is accepted or refused by them, and whoever accepts is told.
    """
    said = _said(verdicts)
    failed = sorted(name for name, outcomes in said.items() if Outcome.FAIL in outcomes)
    if failed:
        reason = f"{_count(failed)} failed: {', '.join(_failed(failed, verdicts))}"
        return Decision(value=Verb.REJECTED, reason=reason, scope=scope, unjudged=unjudged)
    rest = [one for one in verdicts if one.outcome in _UNHELD and one.judged_by not in ("", RECORDED)]
    unheld = {kind: [one.reason for one in rest if one.outcome is kind] for kind in _UNHELD}
    missing = [*filter(None, obstacles), *_missing(required, said, left_out)]
    if missing:
        reason = "; ".join([*missing, *unheld[Outcome.ERROR]])
        return Decision(value=Verb.INCOMPLETE, reason=reason, scope=scope, unjudged=unjudged)
    told = [_praise(required, said), *unheld[Outcome.SKIP], *unheld[Outcome.ERROR]]
    told += [_unspoken(unjudged)] if unjudged else []
    return Decision(value=Verb.ACCEPTED, reason="; ".join(told), scope=scope, unjudged=unjudged)


def _failed(names: Sequence[str], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Each with the places at fault, where it knows of any but the cluster."""
    bad = [one for one in verdicts if one.outcome is Outcome.FAIL]
    for name in names:
        places = dict.fromkeys(one.subject for one in bad if one.check == name and one.subject != CLUSTER)
        yield f"{name} on {and_more(list(places), _NAMED)}" if places else name


def _unspoken(unjudged: Sequence[str]) -> str:
    """Of how many checks there are figures that nothing judged; the report has the list."""
    names = [name for line in unjudged for name in line.partition(": ")[0].split(", ")]
    return f"of {_count(names)} the report lists figures that were recorded and judged by nothing"


def _praise(required: Mapping[str, bool], outcomes: Said) -> str:
    """What was found good, what did not apply, and where somebody should look."""
    said = {name: worst(outcomes.get(name, ())) for name in required}
    skipped = sorted(name for name, outcome in said.items() if outcome is Outcome.SKIP)
    warned = sorted(name for name, outcome in said.items() if outcome is Outcome.WARN)
    unknown = [f"{name} is {outcome}" for name, outcome in said.items() if outcome not in _GOOD]
    passed = [name for name, is_required in required.items() if is_required and name not in skipped]
    reason = f"{_count(passed)} passed"
    reason += f", {len(skipped)} did not apply ({', '.join(skipped)})" if skipped else ""
    reason += f", with warnings in {', '.join(warned)}" if warned else ""
    return reason + (f"; not required, and not known: {', '.join(unknown)}" if unknown else "")


def _missing(required: Mapping[str, bool], every: Said, left_out: Mapping[str, str]) -> list[str]:
    """Every reason why nothing can be accepted yet, in words."""
    needed = [name for name, is_required in required.items() if is_required]
    said = {name: every.get(name, set()) for name in needed}
    reasons = [f"{name} was left out by {flag}" for name, flag in left_out.items() if name in needed]
    for name, outcomes in said.items():
        if name not in left_out and worst(outcomes) not in _GOOD:
            reasons.append(f"{name} is {worst(outcomes)}")
    if not any(outcome in (Outcome.PASS, Outcome.WARN) for outcomes in said.values() for outcome in outcomes):
        reasons.append("nothing that the decision needs was measured")
    return reasons


def _said(verdicts: Sequence[Verdict]) -> Said:
    said: dict[str, set[Outcome]] = {}
    for check, outcome in set(map(attrgetter("check", "outcome"), verdicts)):  # few of very many
        said.setdefault(check, set()).add(outcome)
    return said


def _count(names: Sequence[str]) -> str:
    return "1 check" if len(names) == 1 else f"{len(names)} checks"
