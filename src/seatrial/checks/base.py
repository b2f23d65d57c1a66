"""The declaration of a check and the context in which it runs.

A check is one file in a folder of this package. The file ends in ``CHECK = Check(...)``. The check's ``measure`` is a
generator of metrics, facts, series and artifacts; observations yielded before a crash are kept. A check does not
evaluate its results, does not install software, and ends only processes that it started. It writes only to
``context.artifacts_dir`` and to directories that its options name.

`seatrial render`, the planner and the judge import the files of all checks of a trial, but need only the declarations.
Modules that are slow to import and that only a measurement needs (torch, psutil, most of discover/, telemetry) are
therefore imported in the functions that use them: for the trial acceptance this saves about 50 ms.

Terms: a trial is a named set of checks with options and thresholds; its record contains all measurements. A rank is one
process of a job, with one GPU. A subject is what a value describes: ``cluster``, ``node3``, ``node3/gpu5``, or a pair
such as ``node3->node7``. A family is a pattern of metric names, such as ``busbw.*``. Rail i is GPU i of each node, with
its network port. A SKU is a GPU model; its file in data/skus has the rates of the hardware and reference values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import JsonValue

from seatrial.checks import declare
from seatrial.checks.declare import (
    Comparison,
    FindingTemplate,
    answers,
    possible_values,
)
from seatrial.checks.declare import (
    SubjectKind as SubjectKind,
)
from seatrial.hardware.links import FactRole
from seatrial.hardware.network_time import TcpNetwork
from seatrial.model import (
    CLUSTER,
    Fact,
    Frozen,
    Metric,
    Observation,
    Outcome,
    Phase,
    Rule,
    Scope,
    SeatrialError,
    Topology,
)


class SkipIf(Enum):
    """A condition under which a check may raise NotApplicable; the judge verifies it with the plan in the record."""

    NO_GPU = auto()
    NO_SLURM = auto()
    NO_KUBERNETES = auto()
    ONE_NODE = auto()
    ONE_RANK_PER_NODE = auto()
    NO_COMMAND = auto()
    ONLY_CUDA_GRAPHS = auto()  # the only mode, and no GPU
    UNVERIFIED = auto()  # depends on hardware or settings that the plan does not contain


# Name of the fact that a check yields if it is skipped because this machine has no Slurm. Its value is the reason. If
# Slurm starts the jobs of the trial, the judge does not accept this SKIP.
SLURM_ABSENT = "slurm_absent"
NEW_ERRORS_PREFIX = "new_errors."  # prefix of metrics: increase of an error counter during the check
# Values that any fact in Check.rule_facts may have: the machine lacks the property, or the user may not read it
NOT_SUPPORTED, PERMISSION_DENIED = "not_supported", "permission_denied"


@dataclass(frozen=True, kw_only=True)
class Context:
    """The process in which a check runs: one rank of ``world_size``, on one device of one node."""

    node: str
    rank: int
    world_size: int
    local_rank: int
    device: str  # "cuda:3" or "cpu"
    expected_gpus: int | None  # per node; None if not configured
    artifacts_dir: Path  # existing folder for the check's artifacts, the same path on all ranks of a node
    run_dir: Path  # artifact paths are relative to it
    root: Path = Path("/")  # prefix of /proc, /sys and /etc; tests replace it
    progress: Callable[[str], None] = lambda _text: None  # shows a line of progress
    expected_nodes: int = 1
    options_by_check: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # check → its options, for all checks of the job
    topology: Topology | None = None  # None: unknown
    # The TCP network between the nodes. None on one node, in a CPU job, without TCP, or if the rate is unknown
    tcp_network: TcpNetwork | None = None
    # NVML's index of the device; differs from its CUDA index if CUDA_VISIBLE_DEVICES selects GPUs. None on a CPU
    nvml_index: int | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def subject(self) -> str:
        """The subject of this process: ``node3/gpu5``, or ``node3/rank1`` without a GPU."""
        if not self.on_gpu:
            return f"{self.node}/rank{self.rank}"
        index = self.device.partition(":")[2] if self.nvml_index is None else self.nvml_index
        return f"{self.node}/gpu{index}"


def metric(name: str, value: float | Sequence[float], unit: str, subject: str = CLUSTER) -> Metric:
    """A metric with one value, or with the median of several samples as its value."""
    if isinstance(value, Sequence):
        return Metric(name=name, value=median(value), unit=unit, subject=subject, samples=tuple(value))
    return Metric(name=name, value=value, unit=unit, subject=subject)


def metrics(units: Mapping[str, str], values: Mapping[str, float], subject: str = CLUSTER) -> Iterator[Metric]:
    """One metric for each entry of ``values``, with its unit from ``units``."""
    return (metric(name, value, units[name], subject) for name, value in values.items())


def ratios(samples: Sequence[float], base: Sequence[float], scale: float = 1.0) -> tuple[float, ...]:
    """Each sample divided by the sample of ``base`` at the same index, times ``scale``.

    Samples without a counterpart are omitted. If the two series are independent, the ratios have the noise of both.
    """
    return tuple(scale * sample / reference for sample, reference in zip(samples, base, strict=False))


def facts(values: Mapping[str, Any]) -> Iterator[Fact]:
    """One fact for each entry of ``values``."""
    return (Fact(name=name, value=value) for name, value in values.items())


class Options(Frozen):
    """The options of a check that a trial file may set; the base class has none."""


def _no_facts(_options: Any) -> dict[str, JsonValue]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Implementations:
    """Several implementations of the same work.

    ``speeds``: implementation → metric of its speed. ``machine_command``: first command if all are slow.
    ``software_command``: first command if one is slow.
    """

    speeds: Mapping[str, str]
    machine_command: str
    software_command: str


@dataclass(frozen=True, kw_only=True)
class ScalingMetrics:
    """Names of the metrics of one quantity on a GPU, a node, two nodes and all nodes, for reports; "": not measured.

    ``{nodes}`` in a name stands for the fact ``nodes``. ``efficiencies``: metrics that compare the metrics above with
    each other; they have rules.
    """

    gpu: str = ""
    node: str
    two_nodes: str = ""
    cluster: str
    efficiencies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a check needs; without it the outcome is SKIP, or ERROR if the trial expects that hardware.

    ``shared_folder``: the option ``paths``, the claim of Kubernetes, or a run directory that the nodes may share.
    """

    gpus: bool = False
    min_ranks: int = 1
    shared_folder: bool = False


@dataclass(frozen=True)
class RuleFact:
    """A fact that rules depend on: its possible values, and the outcome of a rule that requires another value.

    ``values``: regular expression of the possible values; NOT_SUPPORTED and PERMISSION_DENIED are always possible.
    ``no``, NOT_SUPPORTED and PERMISSION_DENIED may have the suffix ``: REASON``. ``reason``: why a rule does not apply,
    used for values without REASON; ``{}`` in it stands for the value. ``not_supported``, ``permission_denied``: outcome
    of rules on this fact if the fact has this value. Any other value that a rule does not require makes it SKIP.
    ``varies_by_device``: whether the fact may differ between GPUs of one model, as the presence of NVLink bridges does.
    """

    values: str = "yes|no"
    reason: str = ""
    not_supported: Literal[Outcome.SKIP, Outcome.UNJUDGED, Outcome.ERROR] = Outcome.SKIP
    permission_denied: Literal[Outcome.SKIP, Outcome.UNJUDGED, Outcome.ERROR] = Outcome.UNJUDGED
    varies_by_device: bool = False

    def accepts(self, value: JsonValue) -> bool:
        """Whether the fact may have this value."""
        if not isinstance(value, str):
            return False
        without_reason = value.partition(": ")[0]
        if without_reason in (NOT_SUPPORTED, PERMISSION_DENIED):
            return True
        return bool(re.fullmatch(self.values, "no" if without_reason == "no" else value))


@dataclass(frozen=True, kw_only=True)
class Check:
    """The declaration of one check."""

    name: str
    title: str
    phase: Phase
    scope: Scope
    measure: Callable[[Context, Any], Iterator[Any]]
    declared: tuple[declare.metric, ...] = ()
    metrics: Mapping[str, str] = field(default_factory=dict)  # name or family → unit
    rules: tuple[Rule, ...] = ()
    limit_s: float  # time limit; generous, since it is meant for hangs and not for slow hardware
    needs: Needs = field(default_factory=Needs)
    # Rights that the check needs and an ordinary user lacks, such as "root, to read the kernel log"; shown before runs
    rights: str = ""
    options: type[Options] = Options
    # The tasks that the check runs in child processes of the ranks. In a job with GPUs every rank starts one child
    # process per task. The child imports the training code before the first check (bench/spare_children.py):
    #   "gpu"       one task per GPU
    #   "all"       one task on all GPUs
    #   "variants"  the training runs of train/variants.py
    child_tasks: tuple[Literal["gpu", "all", "variants"], ...] = ()
    # Conditions under which ``measure`` may raise NotApplicable; if none of them holds, the outcome is ERROR, not SKIP
    skip_if: tuple[SkipIf, ...] = ()
    # Metrics, or families, that vary between runs: if one violates its threshold, the check is measured again before
    # the outcome is set (judge/retry.py). Other metrics, such as those of data corruption, FAIL after one measurement.
    performance_metrics: tuple[str, ...] = ()
    key_metric: str = ""  # metric shown in summaries; default: a performance metric
    # Metric, or family → the kind of subjects that must each have a value. A missing value is an ERROR, except for
    # subjects in the fact EXEMPT.
    required_per: Mapping[str, SubjectKind] = field(default_factory=dict)
    # True for a CLUSTER check in which each node has its own communicator and is evaluated separately against the
    # reference value of one node. The first rank of a node reports its metrics and its facts gpu, world_size and nodes.
    per_node: bool = False
    # The fact that names the model of the measured device: only values of one model are compared with each other
    model_fact: str = "gpu"
    # The facts that rules name in applies_if and reference_if. If a fact is missing, or has a value that its RuleFact
    # does not allow, the outcome is an ERROR.
    rule_facts: Mapping[str, RuleFact] = field(default_factory=dict)
    # Facts known from the options before the measurement, such as FLOP per token; used to validate the thresholds of a
    # trial when it is loaded
    facts_from_options: Callable[[Any], Mapping[str, JsonValue]] = _no_facts
    # Facts about the links between GPUs and about NCCL's choices: role → name of the fact
    fact_roles: Mapping[FactRole, str] = field(default_factory=dict)
    # nccl-tests' name of the operation that ``busbw.*`` refers to; empty if there is none, or several
    operation: str = ""
    # Returns mode → the sizes in bytes of ``operation`` that GPUs time over TCP, for these options and this network
    timed_sizes: Callable[[Any, TcpNetwork], Mapping[str, Sequence[int]]] | None = None
    # Returns the default sizes in bytes that are not timed because the TCP network is too slow for them
    omitted_sizes: Callable[[Any, TcpNetwork], Sequence[int]] | None = None
    # Metric, or family → its upper bound: a key of a SKU's spec, or BIDIRECTIONAL or COLLECTIVE of hardware.links
    bounds: Mapping[str, str] = field(default_factory=dict)
    # Metrics, or families, in % that may exceed 100 %, such as a gain. For any other metric in %, a value above 100 %
    # is an ERROR
    may_exceed_100: tuple[str, ...] = ()
    # Metrics that compare parts of the cluster with each other
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    # Quantities that should be the same on several nodes as on one: name in reports → their metrics
    scaling: Mapping[str, ScalingMetrics] = field(default_factory=dict)
    # Several implementations of the same work: if one is slow, its software is at fault; if all are slow, the machine
    # is at fault
    implementations: Implementations | None = None
    varying_metrics: frozenset[str] = frozenset()
    # Metrics that locate a fault: a FAIL or WARN on one of them becomes a finding
    finding_templates: Mapping[str, FindingTemplate] = field(default_factory=dict)
    # Whether this check is the search for slow nodes. A run starts that check automatically when a metric that was
    # measured over several nodes violates a threshold. The facts PAIR_RATES and RANKS_BY_NODE of the check become
    # findings; see hardware/pair_search.py.
    localizes: bool = False

    def __post_init__(self) -> None:
        """Raises SeatrialError for a rule that requires an undeclared fact, or a value that the fact cannot have."""
        if self.declared and not self.metrics:  # dataclasses.replace passes what is derived, or a change of it
            self._derive()
        for rule in self.rules:
            for name, required in (*rule.applies_if.items(), *rule.reference_if.items()):
                condition = f"check {self.name}, rule on {rule.metric}: requires the fact {name} = {required!r}"
                if name not in self.rule_facts:
                    raise SeatrialError(f"{condition}, which is not in rule_facts; add {name!r}: RuleFact(...)")
                if not self.rule_facts[name].accepts(required):
                    values = self.rule_facts[name].values
                    raise SeatrialError(f"{condition}; rule_facts allows {values}: correct the rule or the values")

    def _derive(self) -> None:
        """Set what the declared metrics say."""
        declared = self.declared
        names = [each.name for each in declared]
        if twice := {name for name in names if names.count(name) > 1}:
            raise SeatrialError(f"check {self.name} declares twice: {', '.join(sorted(twice))}")
        rules = tuple(rule for each in declared for rule in each.rules)
        facts = {name for rule in rules for name in rule.applies_if}
        for name, derived in {
            "metrics": {each.name: each.unit for each in declared},
            "rules": rules,
            "required_per": {each.name: each.per for each in declared if each.per},
            "performance_metrics": tuple(each.name for each in declared if each.speed),
            "may_exceed_100": tuple(each.name for each in declared if each.may_exceed_100),
            "bounds": {each.name: each.bound for each in declared if each.bound},
            "comparisons": {each.name: each.comparison for each in declared if each.comparison},
            "finding_templates": {each.name: each.finding for each in declared if each.finding},
            "key_metric": next((each.name for each in declared if each.key), ""),
            "rule_facts": {name: RuleFact(possible_values(name).pattern) for name in facts},
            "varying_metrics": frozenset(each.name for each in declared if each.varies_by_device),
        }.items():
            object.__setattr__(self, name, derived)

    def observe(self, context: Context, options: Options) -> Iterator[Observation]:
        """Measure, and yield the observations for the record. Raises what ``measure`` raises, and see ``answers``."""
        given = self.measure(context, options)
        if not self.declared:
            return given
        of_scope = {Scope.NODE: context.node, Scope.GPU: context.subject}.get(self.scope, CLUSTER)
        return answers(given, self.declared, self.name, {None: of_scope, "rank": context.subject})

    @property
    def reads_error_counters(self) -> bool:
        """Whether the worker reads error counters before and after the check.

        False for checks without load (phase environment), and for checks that read the counters themselves.
        """
        return self.phase is not Phase.ENVIRONMENT and not any(
            name.startswith(NEW_ERRORS_PREFIX) for name in self.metrics
        )
