"""Measurements, rules and reference values → verdicts. Pure: no clock, no GPU, no files except seatrial's own data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from seatrial.checks.check import Check, Checks
from seatrial.config.schema import CheckSettings, Config
from seatrial.hardware import links
from seatrial.hardware.bounds import bounds_by_model
from seatrial.hardware.references import References, skus
from seatrial.judge import error_counters, retry
from seatrial.judge.coverage import (
    RecordedPlan,
    coverage_errors,
    identity_errors,
    retry_errors,
    unevaluated_thresholds,
    unplanned_checks,
)
from seatrial.judge.limits import values_above_peak
from seatrial.judge.remedies import with_remedies
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Baseline, Basis, BasisKind, Job, Measurement, Outcome, Reason, Verdict
from seatrial.util.gc_pause import gc_paused
from seatrial.util.grouping import grouped

_UNKNOWN_CHECK = "this version of seatrial does not have this check; not evaluated"


@gc_paused()
def judge(
    config: Config,
    jobs: Sequence[Job],
    measurements: Sequence[Measurement],
    checks: Checks,
    excluded_checks: Mapping[str, str],
    site: Baseline | None = None,
    retries: Sequence[Measurement] | None = (),
    *,
    site_includes_run: bool = False,
) -> tuple[Verdict, ...]:
    """Verdicts on all checks of a trial, in the trial's order, including checks without a measurement.

    ``jobs`` define on how many subjects each check must be measured. ``site`` is the site's baseline;
    ``site_includes_run``: the baseline was learned from this run, alone or among others. ``retries`` are the second and
    third measurements of checks that failed; they confirm or lift a FAIL. None: the retries have not run yet, so that
    a FAIL does not get the reason NOT_RETRIED.
    """
    by_check, retries_by_check = map(_by_check, (measurements, retries or ()))
    trial_links = links.read(measurements, checks)
    references = _references(config, trial_links, measurements, checks, site, site_includes_run=site_includes_run)
    plan = RecordedPlan(config, jobs, by_check, trial_links.nvlinks)
    verdicts: list[Verdict] = []
    for name, settings in config.checks.items():
        if name in excluded_checks:  # the decision is INCOMPLETE then, in spite of the SKIP (decision.py)
            reasons, detail = (Reason.EXCLUDED,), excluded_checks[name]
            verdicts.append(Verdict(name, CLUSTER, Outcome.SKIP, reasons=reasons, detail=detail))
        elif name not in checks:
            verdicts.append(Verdict(name, CLUSTER, Outcome.UNJUDGED, reasons=(Reason.NO_RULE,), detail=_UNKNOWN_CHECK))
        else:
            check, measured = checks[name], by_check.get(name, ())
            judge_measurements = _judge_of(check, settings, config.name, references)
            check_retries = retries_by_check.get(name, ())
            verdicts += coverage_errors(check, plan, measured)
            verdicts += unevaluated_thresholds(name, settings, measured, config.name)
            for each in (measured, check_retries):
                verdicts += error_counters.verdicts(check, each)
                verdicts += values_above_peak(check, each, references)
            verdicts += unexpected_rdma(check, config, trial_links)
            verdicts += retry_errors(name, measured, check_retries)
            if retries is None:
                verdicts += judge_measurements(measured)
            else:
                verdicts += retry.combined_verdicts(check, measured, check_retries, judge_measurements)
    verdicts += dict.fromkeys(identity_errors([*measurements, *(retries or ())]))
    recorded_checks = chain(*(job.checks for job in jobs), by_check, retries_by_check)
    verdicts += unplanned_checks(config, excluded_checks, recorded_checks)
    return tuple(with_remedies(verdicts))


def checks_to_retry(
    config: Config,
    measurements: Sequence[Measurement],
    retries: Sequence[Measurement],
    checks: Checks,
    retry_number: int,
    site: Baseline | None = None,
) -> dict[str, str]:
    """The checks that need the first or second retry (``retry_number``), each with a summary of its bad metrics.

    Checks with an error in an earlier measurement are not retried.
    """
    references = _references(config, links.read(measurements, checks), measurements, checks, site)
    by_check, retries_by_check = map(_by_check, (measurements, retries))
    summary_by_check = {}
    for name, settings in config.checks.items():
        first = by_check.get(name, ())
        if name not in checks or not first or any(each.error for each in first):
            continue
        rounds = [first, *retry.complete_retries(first, retries_by_check.get(name, ()))]
        if len(rounds) != retry_number:  # the first retry needs one complete measurement, the second retry needs two
            continue
        judge_measurements = _judge_of(checks[name], settings, config.name, references)
        bad_verdicts = retry.verdicts_to_retry(checks[name], rounds, judge_measurements)
        if bad_verdicts:
            others = f", and {len(bad_verdicts) - 1} more" if len(bad_verdicts) > 1 else ""
            summary_by_check[name] = bad_verdicts[0].summary + others
    return summary_by_check


def _by_check(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    return grouped((each.check, each) for each in measurements)


def search_verdicts(searches: Sequence[Measurement], checks: Checks) -> tuple[Verdict, ...]:
    """A FAIL for each slow node that a search confirms by repeated measurements; this needs no reference value.

    A search that finds nothing gives no verdict, since it is not a check of the trial.
    """
    judged = (
        judge_check(checks[name], measured, expect={}, trial="")
        for name, measured in _by_check(searches).items()
        if name in checks
    )
    return tuple(verdict for verdict in chain.from_iterable(judged) if verdict.outcome is Outcome.FAIL)


def unexpected_rdma(check: Check, config: Config, trial_links: links.Links) -> Iterator[Verdict]:
    """A FAIL of the check that reads NCCL's transports, if NCCL uses RDMA although the trial is configured for TCP."""
    network = trial_links.network
    if "transports" not in check.fact_roles or not config.cluster.fabric or network not in ("rdma", "efa"):
        return
    yield Verdict(
        check.name,
        CLUSTER,
        Outcome.FAIL,
        reasons=(Reason.FABRIC_MISMATCH,),
        detail=f"the trial has cluster.fabric.kind tcp, and NCCL uses {trial_links.fabric or network} between nodes",
        basis=Basis(BasisKind.TRIAL, config.name),
        meaning="The limits of TCP are far below those of RDMA: a slow RDMA network would pass.",
        fix="Remove cluster.fabric from the trial. If TCP is intended, set env.NCCL_NET=Socket and "
        f"checks.{check.name}.options.sockets_expected=true.",
    )


def _references(
    config: Config,
    trial_links: links.Links,
    measurements: Sequence[Measurement],
    checks: Checks,
    site: Baseline | None,
    *,
    site_includes_run: bool = False,
) -> References:
    """The values that metrics are compared with, among them the GEMM rates and the all-reduce of this run."""
    all_reduces = {name for name, check in checks.items() if check.operation == "all_reduce" and not check.per_node}
    busbw = [
        metric.value
        for measurement in measurements
        for metric in (measurement.metrics if measurement.check in all_reduces else ())
        if metric.name.startswith("busbw.") and metric.subject == CLUSTER
    ]
    rates: dict[str, dict[str, float]] = {}
    data_types = {
        name: {each.name: each.bound for each in check.declared if each.name == f"tflops.{each.bound}"}
        for name, check in checks.items()
    }
    for measurement in measurements:
        for metric in measurement.metrics if data_types.get(measurement.check) else ():
            if (data_type := data_types[measurement.check].get(metric.name)) and metric.value > 0:
                rates.setdefault(data_type, {})[metric.subject] = metric.value
    inventories = links.role_facts("gpus", measurements, checks)
    gpus = [gpu for _, found in inventories if isinstance(found, list) for gpu in found if isinstance(gpu, dict)]
    return References(
        site,
        skus(),
        site_includes_run=site_includes_run,
        cpu_only=config.cluster.gpus_per_node == 0,
        links=trial_links,
        tcp=config.cluster.fabric,
        gemm_rates=rates,
        all_reduce=max(busbw, default=None),
        gpu_bounds=bounds_by_model(gpus),
    )


def _judge_of(check: Check, settings: CheckSettings, trial: str, references: References) -> retry.Judge:
    """The function that judges measurements of ``check`` by its rules and by the thresholds of the trial."""
    return partial(
        judge_check,
        check,
        expect=settings.expect,
        trial=trial,
        references=references,
        override=settings.override,
        options=settings.options,
    )
