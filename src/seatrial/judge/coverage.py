"""Whether each check was measured on all subjects of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from seatrial.config.schema import CheckSettings, Cluster
from seatrial.model import CLUSTER, Basis, BasisKind, Job, Measurement, Outcome, Reason, Verdict
from seatrial.util.text import and_more

_MAX_NAMED = 8  # subjects listed in one message


def coverage_errors(
    check: str, cluster: Cluster, jobs: Sequence[Job], measurements: Mapping[str, Sequence[Measurement]]
) -> Iterator[Verdict]:
    """An ERROR for each difference between the planned and the measured subjects of ``check``.

    ``measurements`` are those of all checks. A check without measurements, or with an error, gets no further ERROR.
    """
    measured = measurements.get(check, ())
    if not measured or any(measurement.error for measurement in measured):
        return
    job = next((job for job in jobs if check in job.checks), None)
    nodes = _nodes(measured)
    problems: list[str] = []
    if job:
        problems += [*_rank_errors(job, measured, nodes), *_partly_skipped(measured), *_plan_mismatches(job, cluster)]
    elif not all(measurement.skipped for measurement in measured):
        problems.append("measured, but no job of the plan contains the check")
    problems += _node_mismatches(check, nodes, jobs, measurements)
    for problem in problems:
        yield Verdict(check, CLUSTER, Outcome.ERROR, reasons=(Reason.INCOMPLETE_COVERAGE,), detail=problem)


def unevaluated_thresholds(
    check: str, setting: CheckSettings, measured: Sequence[Measurement], trial: str
) -> Iterator[Verdict]:
    """A verdict on each threshold of the trial for a skipped check: ERROR, or SKIP with ``may_skip``."""
    if not measured or not all(measurement.skipped for measurement in measured):
        return
    for metric, threshold in setting.expect.items():
        yield Verdict(
            check=check,
            subject=CLUSTER,
            metric=metric,
            outcome=Outcome.SKIP if setting.may_skip else Outcome.ERROR,
            reasons=(Reason.THRESHOLD_NOT_EVALUATED,),
            detail=measured[0].skipped or "",
            fix="" if setting.may_skip else f"To allow skipping this check: --set checks.{check}.may_skip=true",
            basis=Basis(BasisKind.TRIAL, trial, threshold.value, threshold.unit, threshold.op),
        )


def _rank_errors(job: Job, measured: Sequence[Measurement], nodes: Sequence[str]) -> Iterator[str]:
    subjects = {measurement.rank: measurement.subject for measurement in measured}
    missing = sorted(set(range(job.process_count)) - subjects.keys())
    if missing:
        ranks = and_more([str(rank) for rank in missing], _MAX_NAMED)
        yield f"no measurement of {len(missing)} of {job.process_count} ranks: {ranks}"
        return
    if len(nodes) != job.nodes:
        yield f"expected {job.nodes} nodes, measured {len(nodes)}: {', '.join(nodes)}"
        return
    if len(set(subjects.values())) < len(subjects):
        duplicates = [subject for subject, count in Counter(subjects.values()).items() if count > 1]
        names = and_more(duplicates, _MAX_NAMED)
        yield f"expected {job.process_count} different subjects, but several ranks used {names}"


def _partly_skipped(measured: Sequence[Measurement]) -> Iterator[str]:
    """An error if only some ranks skipped the check, since the subjects of a job should be identical."""
    skipped = [measurement for measurement in measured if measurement.skipped]
    if skipped and len(skipped) < len(measured):
        subjects = and_more([measurement.subject for measurement in skipped], _MAX_NAMED)
        count = len(measured) - len(skipped)
        yield f"measured on {count} of {len(measured)} subjects; skipped on {subjects}: {skipped[0].skipped}"


def _plan_mismatches(job: Job, cluster: Cluster) -> Iterator[str]:
    """Differences between the plan and the configuration of a record, one of which may have been edited."""
    if job.expected_nodes != cluster.nodes:
        yield f"planned for {job.expected_nodes} nodes, but cluster.nodes is {cluster.nodes}"
    if cluster.gpus_per_node is not None and job.expected_gpus != cluster.gpus_per_node:
        yield f"planned for {job.expected_gpus} GPUs per node, but cluster.gpus_per_node is {cluster.gpus_per_node}"


def _node_mismatches(
    check: str, nodes: Sequence[str], jobs: Sequence[Job], measurements: Mapping[str, Sequence[Measurement]]
) -> Iterator[str]:
    """An error if the check ran on other nodes than the first check of the plan that ran on nodes."""
    node_checks = [name for job in jobs if job.placement != "control" for name in job.checks]
    if check not in node_checks:
        return
    nodes_by_check = (
        (name, _nodes(measurement for measurement in measurements.get(name, ()) if not measurement.error))
        for name in node_checks
    )
    first_check, first_nodes = next((name, nodes) for name, nodes in nodes_by_check if nodes)
    if nodes != first_nodes:
        yield f"measured on {', '.join(nodes)}, but {first_check} on other nodes: {', '.join(first_nodes)}"


def _nodes(measurements: Iterable[Measurement]) -> list[str]:
    return sorted({measurement.subject.partition("/")[0] for measurement in measurements})
