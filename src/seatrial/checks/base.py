"""The declaration of a check and the context in which it runs.

A check is one file in a folder of this package that ends in ``CHECK = Check(...)``. Its ``measure`` is a generator of
metrics, facts, series and artifacts; observations yielded before a crash are kept. A check never evaluates its results,
kills processes, installs software or writes outside ``context.artifacts_dir``, and does not depend on the launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import JsonValue

from seatrial.hardware.links import FactRole
from seatrial.model import CLUSTER, Fact, Frozen, Metric, Observation, Phase, Rule, Scope

# What the plan must show if a check skips itself; "not in the record": this depends on the hardware or Slurm's settings
SkipCondition = Literal[
    "no GPU",
    "no Slurm",
    "one node",
    "one rank per node",
    "no command",
    "only CUDA graphs on a CPU",
    "not in the record",
]
SubjectKind = Literal["rank", "pair", "ordered pair", "node", "rail", "gpu"]
NEW_ERRORS_PREFIX = "new_errors."  # prefix of metrics: increase of an error counter during the check


@dataclass(frozen=True, kw_only=True)
class Context:
    """The process in which a check runs: one rank of ``world_size``, on one device of one node."""

    node: str
    rank: int
    world_size: int
    local_rank: int
    device: str  # "cuda:3" or "cpu"
    expected_gpus: int | None  # per node; None if not configured
    artifacts_dir: Path  # existing folder for the check's artifacts, the same on all ranks
    run_dir: Path  # artifact paths are relative to it
    root: Path = Path("/")  # prefix of /proc, /sys and /etc; tests replace it
    progress: Callable[[str], None] = lambda _text: None  # shows a line of progress
    expected_nodes: int = 1
    # Options of all checks of the job
    options_by_check: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    nvml_index: int | None = None  # NVML's index of the GPU; CUDA_VISIBLE_DEVICES may renumber the CUDA device

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


def facts(values: Mapping[str, Any]) -> Iterator[Fact]:
    """One fact for each entry of ``values``."""
    return (Fact(name=name, value=value) for name, value in values.items())


class Options(Frozen):
    """The options of a check that a trial file may set; the base class has none."""


def _no_facts(_options: Any) -> dict[str, JsonValue]:
    return {}


@dataclass(frozen=True, kw_only=True)
class FindingTemplate:
    """The finding for a FAIL or WARN on a metric of one subject, which may be a pair.

    ``first_command`` may contain ``{node}``, the node of the subject, and ``{pair}``, both ends of a pair.
    ``whole_node_title``: title if all subjects of a node fail; the subjects of a node then make one finding.
    ``max_distinguishable_fact``: name of the fact with the number of faulty subjects (or nodes) that can be identified.
    """

    title: str
    first_command: str
    whole_node_title: str = ""
    max_distinguishable_fact: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The part of the cluster that a metric compares with parts of the same kind, as a share of their speed.

    ``inter_node``: the part is a path between nodes. ``is_speedup``: the metric compares runs with and without the
    part, so its threshold detects a missing part but not a slow one.
    """

    part: str
    inter_node: bool = False
    is_speedup: bool = False


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The hardware that a check needs; without it the outcome is SKIP, or ERROR if the trial expects that hardware."""

    gpus: bool = False
    min_ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Check:
    """The declaration of one check."""

    name: str
    title: str
    phase: Phase
    scope: Scope
    metrics: Mapping[str, str]  # name (or a pattern such as "busbw.*") → unit
    rules: tuple[Rule, ...]
    measure: Callable[[Context, Any], Iterator[Observation]]
    limit_s: float  # time limit; generous, since it is meant for hangs and not for slow hardware
    needs: Needs = field(default_factory=Needs)
    options: type[Options] = Options
    # The conditions under one of which ``measure`` may raise NotApplicable; a skip under no such condition is an ERROR
    skipped_if: tuple[SkipCondition, ...] = ()
    # Metrics, or families such as "busbw.*", that vary between runs: like metrics with a reference value, they FAIL
    # only if the retry fails too. Other metrics, such as data corruption, FAIL after one measurement.
    performance_metrics: tuple[str, ...] = ()
    # Metrics, or families, required for each subject of a kind: for each rank of a CLUSTER check, each pair of ranks on
    # a node (one or both directions), each node, each rail, or each GPU in the fact gpus_used of a NODE check. A
    # missing value is an ERROR, except for subjects in the fact EXEMPT.
    required_per: Mapping[str, SubjectKind] = field(default_factory=dict)
    # For a CLUSTER check: each node has its own communicator and is evaluated separately against the reference value of
    # one node. Its first rank reports the metrics and the facts gpu, world_size and nodes of that node.
    per_node: bool = False
    # Facts known from the options before the measurement, such as FLOP per token; used to validate the thresholds of a
    # trial when it is loaded
    facts_from_options: Callable[[Any], Mapping[str, JsonValue]] = _no_facts
    # Facts about the links between GPUs and about NCCL's choices: role → name of the fact
    fact_roles: Mapping[FactRole, str] = field(default_factory=dict)
    # nccl-tests' name of the operation that ``busbw.*`` refers to; empty if there is none, or several
    operation: str = ""
    # Upper bound of a metric or family: key of a SKU's spec, or BIDIRECTIONAL or COLLECTIVE of hardware.bounds
    bounds: Mapping[str, str] = field(default_factory=dict)
    # Metrics that compare parts of the cluster with each other
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    # Metrics that locate a fault: a FAIL or WARN on one of them becomes a finding
    finding_templates: Mapping[str, FindingTemplate] = field(default_factory=dict)

    @property
    def reads_error_counters(self) -> bool:
        """Whether error counters are read before and after the check: it loads GPUs and does not read them itself."""
        return self.phase is not Phase.ENVIRONMENT and not any(
            name.startswith(NEW_ERRORS_PREFIX) for name in self.metrics
        )
