"""Whether a record is complete and consistent: each check was measured once on every subject of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, filterfalse, islice
from operator import attrgetter

from seatrial.checks.check import Check, SkipIf
from seatrial.config.schema import CheckSettings, Config
from seatrial.judge.groups import common_fact
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
    node_of,
)
from seatrial.util.text import and_more

_MAX_NAMED = 8  # subjects listed in one message
_PLACEMENTS = {Scope.CONTROL: "control", Scope.NODE: "nodes", Scope.GPU: "ranks", Scope.CLUSTER: "ranks"}


def coverage_errors(check: Check, plan: RecordedPlan, measured: Sequence[Measurement]) -> Iterator[Verdict]:
    """An ERROR for each difference between the plan and the measurements of ``check``.

    A check without measurements, or with an error, gets no further ERROR.
    """
    if measured and not any(each.error for each in measured):
        yield from (_error(check.name, problem) for problem in _problems(check, plan, measured))


def _problems(check: Check, plan: RecordedPlan, measured: Sequence[Measurement]) -> Iterator[str]:
    job, skipped = plan.job_by_check.get(check.name), [each for each in measured if each.skipped]
    yield from _misplaced_metrics(check, plan, measured)
    if job:
        yield from _rank_errors(job, measured)
        yield from _subject_errors(job, plan, measured)
        yield from _shape_errors(check, job, measured)
        yield from plan.problems[job.name]
        if job.placement != (expected := _PLACEMENTS[check.scope]):
            yield f"in job {job.name} with placement {job.placement}, expected {expected}"
        if skipped and len(skipped) < len(measured):  # the nodes and GPUs of a job should be identical
            subjects = and_more([each.subject for each in skipped], _MAX_NAMED)
            count = len(measured) - len(skipped)
            yield f"measured on {count} of {len(measured)} subjects; skipped on {subjects}: {skipped[0].skipped}"
    elif len(skipped) < len(measured):
        yield "measured, but no job of the plan contains the check"
    if len(skipped) == len(measured) and not plan.allows_skip(check):
        yield f"skipped, although the plan can run it: {skipped[0].skipped}"
    yield from _contradicting_facts(plan, measured)
    if ignored := next((each for each in skipped if each.metrics), None):
        yield f"{ignored.subject} has {len(ignored.metrics)} metrics, but was skipped: {ignored.skipped}"


def retry_errors(check: str, first: Sequence[Measurement], retries: Sequence[Measurement]) -> Iterator[Verdict]:
    """An ERROR if a retry measured subjects that the first measurement did not measure."""
    subjects = subject_names(first)
    if new_subjects := {item.subject for item in retries if not item.error and item.subject not in subjects}:
        names = and_more(sorted(new_subjects), _MAX_NAMED)
        yield _error(check, f"retried on {names}, which the first measurement did not measure")


def identity_errors(measurements: Iterable[Measurement]) -> Iterator[Verdict]:
    """An ERROR if two subjects are one GPU, or if one subject is another GPU in a later check.

    Then the record mixes measurements of several machines, or a GPU was exchanged between two parts of the run.
    """
    subjects: dict[str, str] = {}  # UUID → subject
    uuids: dict[str, tuple[str, str]] = {}  # subject → its UUID, and the first check that recorded it
    for measurement in measurements:
        uuid, subject, check = measurement.gpu_uuid, measurement.subject, measurement.check
        gpus = measurement.facts.get("gpus")
        listed = [gpu.get("uuid") for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
        for twice, count in Counter(map(str, filter(None, listed))).items():
            if count > 1:
                yield _error(check, f"{count} GPUs of {subject} have the UUID {twice}")
        if not uuid or "/gpu" not in subject:
            continue
        first_uuid, first_check = uuids.setdefault(subject, (uuid, check))
        if first_uuid != uuid:
            detail = f"{subject} is GPU {uuid}, but in {first_check} it was {first_uuid}: measure both checks again"
            yield _error(check, detail)
        if (other := subjects.setdefault(uuid, subject)) != subject:
            yield _error(check, f"{subject} and {other} are one GPU, {uuid}")


def unplanned_checks(
    config: Config, excluded_checks: Mapping[str, str], recorded_checks: Iterable[str]
) -> Iterator[Verdict]:
    """An ERROR for each check that was planned or measured, although it is not in the configuration or was excluded."""
    for name in dict.fromkeys(recorded_checks):
        if name not in config.checks:
            yield _error(name, "in the record, but not in config.checks; add it there, or measure again: seatrial run")
        elif name in excluded_checks:
            yield _error(name, f"excluded by {excluded_checks[name]}, but planned or measured in the record")


def unevaluated_thresholds(
    check: str, settings: CheckSettings, measured: Sequence[Measurement], trial: str
) -> Iterator[Verdict]:
    """A verdict on each threshold of the trial for a skipped check: ERROR, or SKIP with ``may_skip``."""
    if not measured or not all(each.skipped for each in measured):
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


def _error(check: str, detail: str) -> Verdict:
    return Verdict(check, CLUSTER, Outcome.ERROR, reasons=(Reason.PLAN_MISMATCH,), detail=detail)


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
    counts = Counter(each.subject for each in measured)
    nodes = Counter(map(node_of, counts))
    if {*counts.values()} != {1} or len(nodes) != job.nodes or {*nodes.values()} != {job.ranks_per_node}:
        several = [f"{subject} ({count} times)" for subject, count in counts.items() if count > 1]
        text = and_more(several or [f"{count} on {node}" for node, count in sorted(nodes.items())], _MAX_NAMED)
        yield (
            f"expected {job.ranks_per_node} ranks on each of {job.nodes} nodes, each on a subject of its own; "
            f"measured {text}"
        )


def _contradicting_facts(plan: RecordedPlan, measured: Sequence[Measurement]) -> Iterator[str]:
    """An error if facts say that rules do not apply, but others that they do: on a GPU, or after a good training."""
    for measurement in measured:
        facts = measurement.facts
        for name in ("device", "backend") if (gpu := facts.get("gpu") or measurement.gpu_uuid) else ():
            if facts.get(name) in ("cpu", "gloo"):
                yield f"{measurement.subject} has the fact {name} {facts[name]}, but was measured on {gpu}"
        if facts.get("nvlink") == "no" and plan.nvlinks:
            yield f"{measurement.subject} has the fact nvlink no, but each GPU has {plan.nvlinks} active NVLinks"
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
    if measured[0].check in plan.on_fewer_nodes:
        if others := nodes - plan.nodes:
            yield f"measured on {', '.join(sorted(others))}, but {plan.nodes_check} on other nodes"
    elif nodes != plan.nodes:
        names = ", ".join(sorted(plan.nodes))
        yield f"measured on {', '.join(sorted(nodes))}, but {plan.nodes_check} on other nodes: {names}"
    elif job.placement == "ranks" and (others := subjects ^ plan.ranks):
        names = and_more(sorted(others), _MAX_NAMED)
        yield f"not measured on the same ranks as {plan.ranks_check}; only one of both checks has {names}"


def _shape_errors(check: Check, job: Job, measured: Sequence[Measurement]) -> Iterator[str]:
    """An error if a measurement reports another number of ranks or nodes than its job, or than one device, has.

    Checks with ``per_node`` may report the number of ranks of their node.
    """
    if job.placement == "control":
        return
    ranks, nodes, first = 1, 1, measured
    if check.scope is Scope.CLUSTER:  # the rules compare the numbers of nodes of several ranks
        ranks, nodes, first = job.process_count, job.nodes, measured[:1]
    for name, planned, reported in (("world_size", ranks, () if check.per_node else measured), ("nodes", nodes, first)):
        for measurement in reported:
            count = measurement.facts.get(name, planned)
            if count not in (planned, 1) and isinstance(count, int):  # 1: measured on one device
                yield f"{measurement.subject} reports {name} {count}, but the job {job.name} has {planned}"
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
    return subject == node_of(measurement.subject)  # a check of a GPU may also measure ports of the GPU's node


class RecordedPlan:
    """The jobs of a record, with the nodes and the ranks (GPUs) on which they were measured.

    ``nodes`` are the nodes of the check ``nodes_check``, ``ranks`` the ranks of the check ``ranks_check``. Each of the
    two checks is the first one without errors that every process of its job measured. If there is none: the first one
    without errors. ``nvlinks``: active NVLinks of each GPU at least; 0: unknown, or none.
    """

    def __init__(
        self, config: Config, jobs: Sequence[Job], measurements: Mapping[str, Sequence[Measurement]], nvlinks: int = 0
    ) -> None:
        self._config, self._jobs, self.nvlinks = config, jobs, nvlinks
        self.job_by_check = {name: job for job in reversed(jobs) for name in job.checks}
        self.nodes_check, subjects = self._first_measured(measurements, "nodes", "ranks")
        self.nodes = node_names(subjects)
        self.ranks_check, self.ranks = self._first_measured(measurements, "ranks")
        self.nodes_of_ranks = node_names(self.ranks)
        on_nodes = {name: job.nodes for name, job in self.job_by_check.items() if job.placement != "control"}
        fewer = {name for name, count in on_nodes.items() if count < max(on_nodes.values())}
        self.on_fewer_nodes = fewer if config.cluster.min_nodes else set[str]()  # checks after the loss of a node
        # without GPUs, subjects are named after ranks, counted over all nodes: a job on fewer nodes has other subjects
        self._all_ranks = set(self.ranks)
        for name in self.on_fewer_nodes:
            self._all_ranks |= {subject for subject in subject_names(measurements.get(name, ())) if "/" in subject}
        self._subjects = {CLUSTER} | self.nodes | self._all_ranks
        # name of a job → differences from the configuration, the other jobs, and the measured devices
        self.problems = {job.name: [*self._job_problems(job, measurements)] for job in jobs}

    def has_subject(self, subject: str) -> bool:
        """Whether ``subject`` is the cluster, or a measured node, rank, rail, or pair of nodes or of ranks."""
        if subject in self._subjects:
            return True
        source, arrow, target = subject.partition("->")
        if arrow:  # n0->n1, or n0/gpu0->gpu1
            node, slash, _ = source.rpartition("/")
            pair = {source, f"{node}{slash}{target}"}
            is_measured = len(pair) == 2 and pair <= (self._all_ranks if slash else self.nodes)
        else:
            rail = subject.removeprefix("rail")
            is_measured = rail != subject and rail.isdecimal() and int(rail) < (self._ranks_per_node or 0)
        self._subjects |= {subject} if is_measured else set()
        return is_measured

    def allows_skip(self, check: Check) -> bool:
        """Whether ``check`` may be skipped on this plan, by its ``needs`` or its ``skip_if``."""
        ranks, nodes = self._ranks_per_node, self._config.cluster.nodes
        if self._config.cluster.min_nodes:
            nodes = min((job.expected_nodes for job in self._jobs), default=nodes)
        options = self._config.checks[check.name].options
        no_gpu = all(job.device == "cpu" for job in self._jobs)
        is_met = {
            SkipIf.NO_GPU: no_gpu,
            SkipIf.NO_SLURM: not self._config.uses_slurm,
            SkipIf.NO_KUBERNETES: self._config.launcher != "kubernetes",
            SkipIf.ONE_NODE: nodes == 1,
            SkipIf.ONE_RANK_PER_NODE: ranks in (None, 1),
            SkipIf.NO_COMMAND: not options.get("command"),
            SkipIf.ONLY_CUDA_GRAPHS: no_gpu and options.get("modes") == ["cuda_graph"],
            SkipIf.UNVERIFIED: True,
        }
        too_few_ranks = check.needs.min_ranks > 1 and (ranks is None or nodes * ranks < check.needs.min_ranks)
        no_folder = check.needs.shared_folder and not self._config.has_shared_folder(check.name)
        needs_lacking = (check.needs.gpus and no_gpu) or too_few_ranks or no_folder
        return needs_lacking or any(map(is_met.__getitem__, check.skip_if))

    @property
    def _ranks_per_node(self) -> int | None:
        """The ranks per node; None if no job has ranks and the number of GPUs is not configured."""
        planned = next((job.ranks_per_node for job in self._jobs if job.placement == "ranks"), None)
        return planned or next((job.expected_gpus for job in self._jobs), None)

    def _first_measured(
        self, measurements: Mapping[str, Sequence[Measurement]], *placements: str
    ) -> tuple[str, set[str]]:
        """The first complete check in jobs with ``placements``, and its subjects; else the first without errors.

        A check is complete if it has no errors and one measurement of each process.
        """
        incomplete: tuple[str, set[str]] = "", set()
        for job in self._jobs:
            for name in job.checks if job.placement in placements else ():
                measured = measurements.get(name, ())
                if measured and not any(each.error for each in measured):
                    if len(measured) == job.process_count:
                        return name, subject_names(measured)
                    incomplete = incomplete if incomplete[0] else (name, subject_names(measured))
        return incomplete

    def _job_problems(self, job: Job, measurements: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
        cluster, gpus, on_gpus = self._config.cluster, job.expected_gpus, job.device == "cuda"
        planned_nodes = min(max(job.expected_nodes, cluster.min_nodes or cluster.nodes), cluster.nodes)
        configured_gpus = gpus if cluster.gpus_per_node is None else cluster.gpus_per_node
        nodes, ranks, device = job.expected_nodes, 1, job.device
        if job.placement == "control":
            nodes = 1
        elif job.placement == "ranks":
            ranks = (gpus if on_gpus else 0) or job.ranks_per_node
            device = device if gpus is None else "cuda" if gpus else "cpu"
        for name, recorded, expected, source in (
            ("expected_nodes", job.expected_nodes, planned_nodes, " by cluster.nodes and cluster.min_nodes"),
            ("expected_gpus", gpus, configured_gpus, " by cluster.gpus_per_node"),
            ("nodes", job.nodes, nodes, ""),
            ("ranks_per_node", job.ranks_per_node, ranks, ""),
            ("device", job.device, device, ""),
        ):
            if recorded != expected:
                yield f"job {job.name} has {name} {recorded}, expected {expected}{source}"
        if len({other.device for other in self._jobs}) > 1:
            yield f"jobs on different devices: {', '.join(f'{other.name} on {other.device}' for other in self._jobs)}"
        if job.placement != "ranks":
            return
        if wrong := sorted(subject for subject in self.ranks if ("/gpu" in subject) != on_gpus):
            yield f"job {job.name} ran on {job.device}, but measured {and_more(wrong, _MAX_NAMED)}"
        for measurement in chain.from_iterable(measurements.values()) if gpus is None else ():
            used = measurement.facts.get(GPUS_USED)
            if isinstance(used, list) and len(used) != (job.ranks_per_node if on_gpus else 0):
                yield (
                    f"job {job.name} has {job.ranks_per_node} ranks per node on {job.device}, but {measurement.check} "
                    f"lists {len(used)} usable GPUs on {measurement.subject}"
                )


def subject_names(measurements: Iterable[Measurement]) -> set[str]:
    return {each.subject for each in measurements}


def node_names(subjects: Iterable[str]) -> set[str]:
    return set(map(node_of, subjects))
