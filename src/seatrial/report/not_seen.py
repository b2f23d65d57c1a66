"""The slowdowns that a trial does not see: speeds that could be far lower than measured before a limit rejects them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

from seatrial.checks import catalog
from seatrial.model import Basis, BasisKind, Outcome, Trial
from seatrial.util.text import and_more, plural

MAX_UNSEEN = 0.12  # a limit that rejects from this slowdown on sees enough: healthy GPUs differ by some percent
_MAX_NAMED = 5
_TIME_UNITS = ("s", "ms", "us")
# All parts may be equally slow: what others of the run reach is no limit then
_RELATIVE = (BasisKind.PEERS, BasisKind.OWN_MEDIAN)


def unseen_slowdowns(trial: Trial) -> dict[str, dict[str, float]]:
    """Check → rate or time → the share by which it may be slower on all parts than measured until a limit rejects it.

    Only shares above MAX_UNSEEN; 1 if all limits only warn. By the limits of this record, without the noise.
    """
    shares: dict[tuple[str, str], float] = {}
    for verdict in trial.verdicts:
        name = verdict.check, verdict.metric
        if verdict.value and verdict.basis and _is_speed(*name, verdict.unit):
            for basis in (verdict.basis, *verdict.other_limits):
                share = 1.0  # by which the value may be slower until it is at the limit; below 0 beyond the limit
                if _rejects(*name, basis):
                    limit = (basis.expected or 0.0) * (1.0 if basis.op else basis.fail_below or 0.0)
                    share -= verdict.value / limit if basis.op.startswith("<") else limit / verdict.value
                shares[name] = min(shares.get(name, 1.0), share)
    unseen: dict[str, dict[str, float]] = {}
    for (check, metric), share in shares.items():
        if share > MAX_UNSEEN:
            unseen.setdefault(check, {})[metric] = share
    return unseen


def not_seen(trial: Trial) -> str:
    """One line on the speeds that may be slow without a rejection, the least limited first; empty if none may."""
    worst = {check: max(shares.values()) for check, shares in unseen_slowdowns(trial).items()}
    texts = [f"{100 * worst[check]:.0f} % in {check}" for check in sorted(worst, key=worst.__getitem__, reverse=True)]
    gpus = max(
        (job.process_count for job in trial.jobs if job.placement == "ranks" and job.device == "cuda"), default=0
    )
    parts = [f"a slowdown of all parts by up to {and_more(texts, _MAX_NAMED)}"] if texts else []
    if texts and gpus == 1:
        parts.append("differences between GPUs, since there is one")
    if without := trial.decision.metrics_without_threshold:
        parts.append(f"any slowdown in metrics of {plural(len(without), 'check')} that have no limit")
    return "; ".join(parts)


@cache
def _is_speed(check: str, metric: str, unit: str) -> bool:
    """Whether a metric is a rate or a time; shares and efficiencies of equally slow parts do not change."""
    speeds = catalog()[check].speeds if check in catalog() else ()
    return ("/s" in unit or unit in _TIME_UNITS) and any(fnmatchcase(metric, each) for each in speeds)


def _rejects(check: str, metric: str, basis: Basis) -> bool:
    """Whether a value beyond the limit of ``basis`` is a FAIL, also if all parts are equally slow."""
    if basis.kind in _RELATIVE or not basis.expected:
        return False
    if basis.kind is not BasisKind.RULE:
        return bool(basis.op or basis.fail_below)
    limits = [limit for rule in catalog()[check].rules if rule.metric == metric for limit in rule.limits]
    return all(limit.outcome is Outcome.FAIL for limit in limits if limit.value == basis.expected)
