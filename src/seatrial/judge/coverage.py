"""Whether a record is complete and consistent: each check was measured once on every subject of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, filterfalse, islice
from operator import attrgetter

from seatrial.checks.check import Check
from seatrial.config.schema import CheckSettings, Config
from seatrial.judge.groups import common_fact
from seatrial.judge.recorded_plan import RecordedPlan, node_names, subject_names
from seatrial.model import (
    CLUSTER,
    GPUS_USED,
    PORTS_USED,
    Basis,
    BasisKind,
    Job,
    Measurement,
    Outcome,
    Reason,
    Scope,
    Verdict,
)
from seatrial.util.text import and_more

_MAX_NAMED = 8  # subjects listed in one message
_PLACEMENTS = {Scope.CONTROL: "control", Scope.NODE: "nodes", Scope.GPU: "ranks", Scope.CLUSTER: "ranks"}


def coverage_errors(check: Check, plan: RecordedPlan, measured: Sequence[Measurement]) -> Iterator[Verdict]:
    """An ERROR for each difference between the plan and the measurements of ``check``.

    A check without measurements, or with an error, gets no further ERROR.
    """
    if not measured or any(measurement.error for measurement in measured):
        return
    job, is_skipped = plan.job_by_check.get(check.name), all(measurement.skipped for measurement in measured)
    incomplete = [*_misplaced_metrics(check, plan, measured)]
    mismatches = [*_metrics_beside_skip(measured), *_contradicting_facts(measured)]
    if job:
        incomplete += [*_rank_errors(job, measured), *_partly_skipped(measured)]
        incomplete += [*_subject_errors(job, plan, measured), *_world_size_errors(check, job, measured)]
        mismatches += plan.problems(job)
        if job.placement != _PLACEMENTS[check.scope]:
            mismatches.append(f"in job {job.name} with placement {job.placement}, expected {_PLACEMENTS[check.scope]}")
    elif not is_skipped:
        incomplete.append("measured, but no job of the plan contains the check")
    if is_skipped and not plan.allows_skip(check):
        mismatches.append(f"skipped, although the plan can run it: {measured[0].skipped}")
    for reason, problems in ((Reason.INCOMPLETE_COVERAGE, incomplete), (Reason.PLAN_MISMATCH, mismatches)):
        for problem in problems:
            yield _error(check.name, reason, problem)


def retry_errors(check: str, first: Sequence[Measurement], retries: Sequence[Measurement]) -> Iterator[Verdict]:
    """An ERROR if a retry measured subjects that the first measurement did not measure."""
    subjects = subject_names(first)
    new_subjects = {item.subject for item in retries if not item.error and item.subject not in subjects}
    if new_subjects:
        names = and_more(sorted(new_subjects), _MAX_NAMED)
        detail = f"retried on {names}, which the first measurement did not measure"
        yield _error(check, Reason.PLAN_MISMATCH, detail)


def identity_errors(measurements: Iterable[Measurement]) -> Iterator[Verdict]:
    """An ERROR if two subjects are one GPU, or if one subject is another GPU in a later check.

    Then the record mixes measurements of several machines, or a GPU was exchanged between two parts of the run.
    """
    subjects: dict[str, str] = {}  # UUID → subject
    uuids: dict[str, tuple[str, str]] = {}  # subject → its UUID, and the first check that recorded it
    for measurement in measurements:
        uuid, subject, check = measurement.gpu_uuid, measurement.subject, measurement.check
        gpus = measurement.facts.get("gpus")
        listed = Counter(gpu.get("uuid") for gpu in gpus if isinstance(gpu, dict)) if isinstance(gpus, list) else {}
        for twice, count in listed.items():
            if twice and count > 1:
                yield _error(check, Reason.PLAN_MISMATCH, f"{count} GPUs of {subject} have the UUID {twice}")
        if not uuid or "/gpu" not in subject:
            continue
        first_uuid, first_check = uuids.setdefault(subject, (uuid, check))
        if first_uuid != uuid:
            detail = f"{subject} is GPU {uuid}, but in {first_check} it was {first_uuid}: measure both checks again"
            yield _error(check, Reason.PLAN_MISMATCH, detail)
        if (other := subjects.setdefault(uuid, subject)) != subject:
            yield _error(check, Reason.PLAN_MISMATCH, f"{subject} and {other} are one GPU, {uuid}")


def unplanned_checks(
    config: Config,
    excluded_checks: Mapping[str, str],
    jobs: Iterable[Job],
    measured_checks: Iterable[str],
    retried_checks: Iterable[str],
) -> Iterator[Verdict]:
    """An ERROR for each check that was planned or measured, although it is not in the configuration or was excluded."""
    recorded: dict[str, list[str]] = {}
    for part, names in (
        ("jobs", chain.from_iterable(job.checks for job in jobs)),
        ("measurements", measured_checks),
        ("retries", retried_checks),
    ):
        for name in dict.fromkeys(names):
            recorded.setdefault(name, []).append(part)
    for name, parts in recorded.items():
        if name not in config.checks:
            detail = f"in the {' and '.join(parts)} of the record, but not in config.checks"
            yield _error(name, Reason.PLAN_MISMATCH, f"{detail}; add it there, or measure again: seatrial run")
        elif name in excluded_checks:
            detail = f"excluded by {excluded_checks[name]}, but in the {' and '.join(parts)} of the record"
            yield _error(name, Reason.PLAN_MISMATCH, detail)


def unevaluated_thresholds(
    check: str, settings: CheckSettings, measured: Sequence[Measurement], trial: str
) -> Iterator[Verdict]:
    """A verdict on each threshold of the trial for a skipped check: ERROR, or SKIP with ``may_skip``."""
    if not measured or not all(measurement.skipped for measurement in measured):
        return
    for metric, threshold in settings.expect.items():
        yield Verdict(
            check=check,
            subject=CLUSTER,
            metric=metric,
            outcome=Outcome.SKIP if settings.may_skip else Outcome.ERROR,
            reasons=(Reason.THRESHOLD_NOT_EVALUATED,),
            detail=measured[0].skipped or "",
            fix="" if settings.may_skip else f"To allow skipping this check: --set checks.{check}.may_skip=true",
            basis=Basis(BasisKind.TRIAL, trial, threshold.value, threshold.unit, threshold.op),
        )


def _error(check: str, reason: Reason, detail: str) -> Verdict:
    return Verdict(check, CLUSTER, Outcome.ERROR, reasons=(reason,), detail=detail)


def _rank_errors(job: Job, measured: Sequence[Measurement]) -> Iterator[str]:
    """At most one error, if a planned rank was not measured exactly once on a subject of its own."""
    subject_by_rank = {measurement.rank: measurement.subject for measurement in measured}
    planned = range(job.process_count)
    if missing := job.process_count - sum(rank in planned for rank in subject_by_rank):
        # not a set of all ranks, since a damaged record may plan any number of them
        ranks = [str(rank) for rank in islice(filterfalse(subject_by_rank.__contains__, planned), _MAX_NAMED)]
        others = f" and {missing - len(ranks)} more" if missing > len(ranks) else ""
        yield f"no measurement of {missing} of {job.process_count} ranks: {', '.join(ranks)}{others}"
        return
    if len(measured) > job.process_count:
        yield f"{len(measured)} measurements of {job.process_count} ranks: expected one of each rank"
        return
    subjects = list(subject_by_rank.values())
    ranks_by_node = Counter(subject.partition("/")[0] for subject in subjects)
    if len(ranks_by_node) != job.nodes:
        yield f"expected {job.nodes} nodes, measured {len(ranks_by_node)}: {', '.join(sorted(ranks_by_node))}"
        return
    if len(set(subjects)) < len(subjects):
        duplicates = [subject for subject, count in Counter(subjects).items() if count > 1]
        names = and_more(duplicates, _MAX_NAMED)
        yield f"expected {job.process_count} different subjects, but several ranks used {names}"
    elif uneven := [node for node, count in ranks_by_node.items() if count != job.ranks_per_node]:
        yield f"expected {job.ranks_per_node} processes on each node, but not on {and_more(uneven, _MAX_NAMED)}"


def _partly_skipped(measured: Sequence[Measurement]) -> Iterator[str]:
    """An error if only some subjects skipped the check: the nodes and GPUs of a job should be identical."""
    skipped = [measurement for measurement in measured if measurement.skipped]
    if skipped and len(skipped) < len(measured):
        subjects = and_more([measurement.subject for measurement in skipped], _MAX_NAMED)
        count = len(measured) - len(skipped)
        yield f"measured on {count} of {len(measured)} subjects; skipped on {subjects}: {skipped[0].skipped}"


def _metrics_beside_skip(measured: Sequence[Measurement]) -> Iterator[str]:
    """An error if a skipped measurement has metrics: they would not be evaluated."""
    if with_metrics := next((item for item in measured if item.skipped and item.metrics), None):
        yield f"{with_metrics.subject} has {len(with_metrics.metrics)} metrics, but was skipped: {with_metrics.skipped}"


def _contradicting_facts(measured: Sequence[Measurement]) -> Iterator[str]:
    """An error if facts say that rules do not apply, but others that they do: on a GPU, or after a good training."""
    for measurement in measured:
        facts = measurement.facts
        for name in ("device", "backend") if (gpu := facts.get("gpu")) else ():
            if facts.get(name) in ("cpu", "gloo"):
                yield f"{measurement.subject} has the fact {name} {facts[name]}, but was measured on {gpu}"
        if facts.get("trained") == "no" and any(
            each.name == "exit_code" and not each.value for each in measurement.metrics
        ):
            yield f"{measurement.subject} has the fact trained no, but exit_code 0: its training ended without metrics"


def _subject_errors(job: Job, plan: RecordedPlan, measured: Sequence[Measurement]) -> Iterator[str]:
    """An error if the check ran on other nodes or ranks than the first check of the plan."""
    if job.placement == "control":
        return
    subjects = subject_names(measured)
    nodes = plan.nodes_of_ranks if subjects == plan.ranks else node_names(subjects)
    if plan.ran_on_fewer_nodes(measured[0].check):
        if others := nodes - plan.nodes:
            yield f"measured on {', '.join(sorted(others))}, but {plan.nodes_check} on other nodes"
    elif nodes != plan.nodes:
        names = ", ".join(sorted(plan.nodes))
        yield f"measured on {', '.join(sorted(nodes))}, but {plan.nodes_check} on other nodes: {names}"
    elif job.placement == "ranks" and (others := subjects ^ plan.ranks):
        names = and_more(sorted(others), _MAX_NAMED)
        yield f"not measured on the same ranks as {plan.ranks_check}; only one of both checks has {names}"


def _world_size_errors(check: Check, job: Job, measured: Sequence[Measurement]) -> Iterator[str]:
    """An error if a rank reports another world size than the job has.

    Checks with ``per_node`` are exempt, since they report the world size of their node.
    """
    if job.placement != "ranks" or check.per_node:
        return
    planned = job.process_count
    for measurement in measured:
        world_size = measurement.facts.get("world_size", planned)
        if world_size not in (planned, 1) and isinstance(world_size, int):  # 1: measured on one device
            yield f"{measurement.subject} reports world_size {world_size}, but the job {job.name} has {planned} ranks"
            return


def _misplaced_metrics(check: Check, plan: RecordedPlan, measured: Sequence[Measurement]) -> Iterator[str]:
    """An error if metrics have subjects that are not in the plan; a CONTROL check may use any subject."""
    if check.scope is Scope.CONTROL:
        return
    misplaced: set[str] = set()
    for measurement in measured:
        if measurement.metrics:
            subjects: set[str] = set(map(attrgetter("subject"), measurement.metrics))  # fast for a million metrics
            subjects.discard(measurement.subject)
            if subjects:
                subjects.difference_update(_ports(plan, measurement))
                misplaced.update(
                    subject for subject in subjects if not _may_have_metrics(check, plan, measurement, subject)
                )
    if misplaced:
        yield f"metrics of {and_more(sorted(misplaced), _MAX_NAMED)}, which the plan did not measure"


def _ports(plan: RecordedPlan, measurement: Measurement) -> Iterator[str]:
    """The subjects of the RDMA ports in the fact PORTS_USED, for the nodes of the plan."""
    ports_by_node = common_fact(measurement.facts, PORTS_USED) or {}
    for node in ports_by_node.keys() & plan.nodes:
        yield from (f"{node}/{port}" for port in ports_by_node[node])


def _may_have_metrics(check: Check, plan: RecordedPlan, measurement: Measurement, subject: str) -> bool:
    """Whether ``measurement`` may have metrics of ``subject``, which is not its own subject."""
    if check.scope is Scope.CLUSTER:
        return plan.has_subject(subject)
    node, _, index = subject.rpartition("/gpu")
    if check.scope is Scope.NODE:
        used = measurement.facts.get(GPUS_USED)
        return node == measurement.subject and (
            index in map(str, used) if isinstance(used, list) else index.isdecimal()
        )
    return subject == measurement.subject.partition("/")[0]  # a check of a GPU may also measure ports of the GPU's node
