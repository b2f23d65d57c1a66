"""What a check is: declared, not programmed.

A check is one file in this folder that ends in ``CHECK = Check(...)``. Its ``measure`` is a generator that yields
metrics, facts, series and artifacts as it goes, so that what was measured before a crash is kept. It observes: it
never judges, kills, installs or writes outside ``place.out``. It does not know which launcher started it.
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

SubjectKind = Literal["place", "pair", "ordered pair", "node", "rail", "gpu"]
NEW_ERRORS_PREFIX = "new_errors."  # metrics: by how much an error counter grew meanwhile


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where a check finds itself: one process of ``world_size``, on one device of one node."""

    node: str
    rank: int
    world_size: int
    local_rank: int
    device: str  # "cuda:3" or "cpu"
    expected_gpus: int | None  # GPUs a node is said to have; None where nobody said
    artifacts_dir: Path  # this check's own folder for artifacts, the same on all ranks; exists
    run_dir: Path  # artifacts are named relative to it
    root: Path = Path("/")  # of /proc, /sys and /etc: tests point it elsewhere
    progress: Callable[[str], None] = lambda _text: None  # a word on progress, shown live
    expected_nodes: int = 1
    options_by_check: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # every check of this job, with its options
    nvml_index: int | None = None  # NVML's index of our GPU, which CUDA_VISIBLE_DEVICES may have renumbered

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def subject(self) -> str:
        """This process as a subject: ``node3/gpu5``, or ``node3/rank1`` without a GPU."""
        if not self.on_gpu:
            return f"{self.node}/rank{self.rank}"
        index = self.device.partition(":")[2] if self.nvml_index is None else self.nvml_index
        return f"{self.node}/gpu{index}"


def metric(name: str, value: float | Sequence[float], unit: str, subject: str = CLUSTER) -> Metric:
    """A metric of one value, or of several samples: then the median is its value."""
    if isinstance(value, Sequence):
        return Metric(name=name, value=median(value), unit=unit, subject=subject, samples=tuple(value))
    return Metric(name=name, value=value, unit=unit, subject=subject)


def metrics(units: Mapping[str, str], values: Mapping[str, float], subject: str = CLUSTER) -> Iterator[Metric]:
    """A metric for each value, in the unit that is declared for its name."""
    return (metric(name, value, units[name], subject) for name, value in values.items())


def facts(values: Mapping[str, Any]) -> Iterator[Fact]:
    """A fact for each name."""
    return (Fact(name=name, value=value) for name, value in values.items())


class Options(Frozen):
    """Options of a check that a trial file may set. A check without options uses this empty one."""


def _nothing(_options: Any) -> dict[str, JsonValue]:
    return {}


@dataclass(frozen=True, kw_only=True)
class FindingTemplate:
    """What it means that a metric of a place, or of a pair of places, falls short: a finding of the diagnosis.

    ``first_command`` may name ``{node}``, that of the place, and ``{pair}``, both ends. ``whole_node``: the places of a
    node make one finding, called so where all of them fall short. ``distinguishable`` names the fact that says how many
    bad places (of such a check: nodes) are found exactly.
    """

    title: str
    first_command: str
    whole_node_title: str = ""
    max_distinguishable_fact: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a metric compares: a ``part`` with the other parts like it, by the share of their speed that it reaches.

    ``network``: the part is a way between nodes. ``gain``: the part is compared with doing without it, so that its
    threshold sees that it is missing, and not that it is slow.
    """

    part: str
    inter_node: bool = False
    is_speedup: bool = False


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What must be there for a check to apply. What is missing gives SKIP, or ERROR where it was promised."""

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
    limit_s: float  # after so long the check is given up; generous: a limit is for hangs, not for slowness
    needs: Needs = field(default_factory=Needs)
    options: type[Options] = Options
    # Metrics, or families such as "busbw.*", that differ from run to run: a shortfall of these fails only when a second
    # measurement shows it too, as one of a rule with a baseline does. Of all others, corruption say, once is enough.
    performance_metrics: tuple[str, ...] = ()
    # Metrics, or families, that are given of every one: of every place that took part in a CLUSTER check, of every two
    # places of a node, once or in either order, of every node or rail; of every GPU of a NODE check that its fact
    # GPUS_USED lists. One that is missing is an ERROR, but for a place that the fact EXCUSED names.
    required_per: Mapping[str, SubjectKind] = field(default_factory=dict)
    # Of a CLUSTER check: each node is judged by itself. Its ranks work among themselves, the first of them tells for
    # all of it, and the facts gpu, world_size and nodes are those of that node: what ONE node reaches is the reference.
    per_node: bool = False
    # Facts that the options alone decide, as far as anybody can tell before anything is measured, such as what a
    # training has to compute for a token: a trial's thresholds are weighed by them when it is loaded
    facts_from_options: Callable[[Any], Mapping[str, JsonValue]] = _nothing

    # Which of its facts tell what joins the GPUs and what NCCL chose: role → name of the fact
    fact_roles: Mapping[FactRole, str] = field(default_factory=dict)
    # The operation, by nccl-tests' name, whose bus bandwidth its metrics ``busbw.*`` are; empty: none, or several
    operation: str = ""
    # What a metric, or a family of them, cannot exceed: a line of a SKU's spec, or one of hardware.bounds
    bounds: Mapping[str, str] = field(default_factory=dict)
    # Metrics that compare parts of the machine with each other
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    # Metrics that tell which place is at fault: a FAIL or a WARN on one of them becomes a finding there
    finding_templates: Mapping[str, FindingTemplate] = field(default_factory=dict)

    @property
    def reads_error_counters(self) -> bool:
        """Whether error counters are read around it: it puts GPUs to work, and gives no finer account itself."""
        return self.phase is not Phase.ENVIRONMENT and not any(
            name.startswith(NEW_ERRORS_PREFIX) for name in self.metrics
        )
