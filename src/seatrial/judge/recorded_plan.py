"""The plan in a record: its jobs, compared with the configuration and with the measured nodes and GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from seatrial.checks.check import Check, SkipIf
from seatrial.config.schema import Config
from seatrial.model import CLUSTER, GPUS_USED, Job, Measurement
from seatrial.util.text import and_more

_MAX_NAMED = 8  # subjects listed in one message


class RecordedPlan:
    """The jobs of a record, with the nodes and the ranks (GPUs) on which they were measured.

    ``nodes`` are the nodes of the check ``nodes_check``, ``ranks`` the ranks of the check ``ranks_check``. Each of the
    two checks is the first one without errors that every process of its job measured. If there is none: the first one
    without errors.
    """

    def __init__(self, config: Config, jobs: Sequence[Job], measurements: Mapping[str, Sequence[Measurement]]) -> None:
        self._config, self._jobs = config, jobs
        self.job_by_check = {name: job for job in reversed(jobs) for name in job.checks}
        self.nodes_check, subjects = self._first_measured(measurements, "nodes", "ranks")
        self.nodes = node_names(subjects)
        self.ranks_check, self.ranks = self._first_measured(measurements, "ranks")
        self.nodes_of_ranks = node_names(self.ranks)
        # without GPUs, subjects are named after ranks, counted over all nodes: a job on fewer nodes has other subjects
        self._on_fewer_nodes = self._checks_on_fewer_nodes()
        self._all_ranks = set(self.ranks)
        for name in self._on_fewer_nodes:
            self._all_ranks |= {subject for subject in subject_names(measurements.get(name, ())) if "/" in subject}
        self._subjects = {CLUSTER} | self.nodes | self._all_ranks
        self._problems = {job.name: [*self._job_problems(job, measurements)] for job in jobs}

    def problems(self, job: Job) -> list[str]:
        """Differences between the job and the configuration, the other jobs, and the measured devices."""
        return self._problems[job.name]

    def ran_on_fewer_nodes(self, check: str) -> bool:
        """Whether ``check`` ran on fewer nodes than the largest job, after the loss of a node."""
        return check in self._on_fewer_nodes

    def _checks_on_fewer_nodes(self) -> set[str]:
        jobs = {name: job for name, job in self.job_by_check.items() if job.placement != "control"}
        most = max((job.nodes for job in jobs.values()), default=0)
        return {name for name, job in jobs.items() if job.nodes < most} if self._config.cluster.min_nodes else set()

    def has_subject(self, subject: str) -> bool:
        """Whether ``subject`` is the cluster, or a measured node, rank, rail, or pair of nodes or of ranks."""
        if subject not in self._subjects:
            if not (self._is_pair(subject) or self._is_rail(subject)):
                return False
            self._subjects.add(subject)
        return True

    def allows_skip(self, check: Check) -> bool:
        """Whether ``check`` may be skipped on this plan, by its ``needs`` or its ``skip_if``."""
        ranks, nodes = self._ranks_per_node, self._config.cluster.nodes
        if self._config.cluster.min_nodes:
            nodes = min((job.expected_nodes for job in self._jobs), default=nodes)
        options = self._config.checks[check.name].options
        no_gpu = all(job.device == "cpu" for job in self._jobs)
        is_met: Mapping[SkipIf, bool] = {
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

    def _is_pair(self, subject: str) -> bool:
        """Whether ``subject`` is a pair of nodes, ``n0->n1``, or of ranks of one node, ``n0/gpu0->gpu1``."""
        source, arrow, target = subject.partition("->")
        node, slash, _ = source.rpartition("/")
        pair = {source, f"{node}{slash}{target}"}
        return bool(arrow) and len(pair) == 2 and pair <= (self._all_ranks if slash else self.nodes)

    def _is_rail(self, subject: str) -> bool:
        index = subject.removeprefix("rail")
        return index != subject and index.isdecimal() and int(index) < (self._ranks_per_node or 0)

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
                if measured and not any(measurement.error for measurement in measured):
                    if len(measured) == job.process_count:
                        return name, subject_names(measured)
                    incomplete = incomplete if incomplete[0] else (name, subject_names(measured))
        return incomplete

    def _job_problems(self, job: Job, measurements: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
        cluster, expected_gpus = self._config.cluster, job.expected_gpus
        if not (cluster.min_nodes or cluster.nodes) <= job.expected_nodes <= cluster.nodes:
            at_least = f" and cluster.min_nodes {cluster.min_nodes}" if cluster.min_nodes else ""
            yield f"planned for {job.expected_nodes} nodes, but cluster.nodes is {cluster.nodes}{at_least}"
        if cluster.gpus_per_node is not None and expected_gpus != cluster.gpus_per_node:
            yield f"planned for {expected_gpus} GPUs per node, but cluster.gpus_per_node is {cluster.gpus_per_node}"
        nodes = 1 if job.placement == "control" else job.expected_nodes
        if job.nodes != nodes:
            yield f"job {job.name} has {job.nodes} nodes, expected {nodes}"
        if len({other.device for other in self._jobs}) > 1:
            yield f"jobs on different devices: {', '.join(f'{other.name} on {other.device}' for other in self._jobs)}"
        if job.placement == "ranks":
            yield from self._rank_problems(job, measurements)
        elif job.ranks_per_node != 1:
            yield f"job {job.name} has {job.ranks_per_node} processes per node, expected 1"

    def _rank_problems(self, job: Job, measurements: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
        """Differences between the ranks of a job and the GPUs that are expected or present."""
        on_gpus, expected_gpus = job.device == "cuda", job.expected_gpus
        if on_gpus != bool(expected_gpus) and expected_gpus is not None:
            yield f"job {job.name} ran on {job.device}, but {expected_gpus} GPUs per node are expected"
        elif on_gpus and job.ranks_per_node != (expected_gpus or job.ranks_per_node):
            yield f"job {job.name} has {job.ranks_per_node} ranks per node, but {expected_gpus} GPUs are expected"
        if wrong := sorted(subject for subject in self.ranks if ("/gpu" in subject) != on_gpus):
            yield f"job {job.name} ran on {job.device}, but measured {and_more(wrong, _MAX_NAMED)}"
        for measurement in chain.from_iterable(measurements.values()) if expected_gpus is None else ():
            used = measurement.facts.get(GPUS_USED)
            if isinstance(used, list) and len(used) != (job.ranks_per_node if on_gpus else 0):
                yield (
                    f"job {job.name} has {job.ranks_per_node} ranks per node on {job.device}, but {measurement.check} "
                    f"lists {len(used)} usable GPUs on {measurement.subject}"
                )


def subject_names(measurements: Iterable[Measurement]) -> set[str]:
    return {measurement.subject for measurement in measurements}


def node_names(subjects: Iterable[str]) -> set[str]:
    return {subject.partition("/")[0] for subject in subjects}
