"""Was everything measured everywhere? What the plan promised, counted against what was brought back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from seatrial.config.schema import CheckSettings, Cluster
from seatrial.model import CLUSTER, Basis, BasisKind, Job, Measurement, Outcome, Reason, Verdict
from seatrial.util.text import and_more

_NAMED = 8  # how many places a sentence names


def coverage_errors(
    check: str, cluster: Cluster, jobs: Sequence[Job], measurements: Mapping[str, Sequence[Measurement]]
) -> Iterator[Verdict]:
    """An ERROR for everything that keeps the ``measurements`` (by check) of ``check`` from speaking of all promised.

    A check that has told of an error, or that nobody measured, is not told of a second time.
    """
    own = measurements.get(check, ())
    if not own or any(one.error for one in own):
        return
    job = next((job for job in jobs if check in job.checks), None)
    nodes = _nodes(own)
    faults = [*_absent(job, own, nodes), *_here_and_there(own), *_other_promise(job, cluster)] if job else []
    faults += _elsewhere(check, nodes, jobs, measurements)
    if job is None and not all(one.skipped for one in own):
        faults = ["it was measured, and no job of the plan has it"]
    for fault in faults:
        yield Verdict(check, CLUSTER, Outcome.ERROR, reasons=(Reason.INCOMPLETE_COVERAGE,), detail=fault)


def unevaluated_thresholds(
    check: str, setting: CheckSettings, own: Sequence[Measurement], trial: str
) -> Iterator[Verdict]:
    """A verdict on each threshold of the trial where the check did not apply: nothing was held to it.

    Who wrote it wants to know that it holds: an ERROR, unless the trial says that the check may be skipped.
    """
    if not own or not all(one.skipped for one in own):
        return
    for metric, limit in setting.expect.items():
        yield Verdict(
            check=check,
            subject=CLUSTER,
            metric=metric,
            outcome=Outcome.SKIP if setting.may_skip else Outcome.ERROR,
            reasons=(Reason.THRESHOLD_NOT_EVALUATED,),
            detail=own[0].skipped or "",
            fix="" if setting.may_skip else f"Where it need not apply: --set checks.{check}.may_skip=true",
            basis=Basis(BasisKind.TRIAL, trial, limit.value, limit.unit, limit.op),
        )


def _absent(job: Job, own: Sequence[Measurement], nodes: Sequence[str]) -> Iterator[str]:
    subjects = {one.rank: one.subject for one in own}
    missing = sorted(set(range(job.process_count)) - subjects.keys())
    if missing:
        names = and_more([str(rank) for rank in missing], _NAMED)
        yield f"not measured everywhere: {len(missing)} of {job.process_count} ranks are missing ({names})"
        return
    if len(nodes) != job.nodes:
        yield f"{job.nodes} nodes were to be measured, and the measurements name {len(nodes)}: {', '.join(nodes)}"
        return
    if len(set(subjects.values())) < len(subjects):
        twice = [subject for subject, count in Counter(subjects.values()).items() if count > 1]
        yield f"{job.process_count} ranks were to be at as many places, and several are at {', '.join(twice[:_NAMED])}"


def _here_and_there(own: Sequence[Measurement]) -> Iterator[str]:
    """What applies at one place applies at all: the places of a job are to be alike."""
    without = [one for one in own if one.skipped]
    if without and len(without) < len(own):
        names = and_more([one.subject for one in without], _NAMED)
        yield f"measured at {len(own) - len(without)} of {len(own)} places; not at {names}: {without[0].skipped}"


def _other_promise(job: Job, cluster: Cluster) -> Iterator[str]:
    """The record's config and its plan may have been changed, one without the other."""
    if job.expected_nodes != cluster.nodes:
        yield f"planned for {job.expected_nodes} nodes, and {cluster.nodes} were promised"
    if cluster.gpus_per_node is not None and job.expected_gpus != cluster.gpus_per_node:
        yield f"planned for {job.expected_gpus} GPUs a node, and {cluster.gpus_per_node} were promised"


def _elsewhere(
    check: str, here: Sequence[str], jobs: Sequence[Job], measurements: Mapping[str, Sequence[Measurement]]
) -> Iterator[str]:
    """Two jobs on different nodes tell of none of them everything."""
    on_nodes = [name for job in jobs if job.placement != "control" for name in job.checks]
    if check not in on_nodes:
        return
    places = ((name, _nodes(one for one in measurements.get(name, ()) if not one.error)) for name in on_nodes)
    first, there = next((name, nodes) for name, nodes in places if nodes)
    if here != there:
        yield f"measured on {', '.join(here)}, but {first} on {', '.join(there)}: not on the same nodes"


def _nodes(measurements: Iterable[Measurement]) -> list[str]:
    return sorted({one.subject.partition("/")[0] for one in measurements})
