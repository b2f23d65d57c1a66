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

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from seatrial.checks.declare import Answers, answers, fact, find, metric
from seatrial.hardware.links import FactRole
from seatrial.hardware.network_time import TcpNetwork
from seatrial.model import (
    CLUSTER,
    Artifact,
    Fact,
    Frozen,
    Observation,
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


NEW_ERRORS_PREFIX = "new_errors."  # prefix of metrics: increase of an error counter during the check
HOURS_UNDER_LOAD = "hours_under_load"  # fact: hours of load that each GPU had in the check
SLOWED_BY_PREFIX = "slowed_by."  # prefix of metrics: whether an environment variable makes every job slower


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
    gpu_uuid: str = ""  # of the device; empty on a CPU

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

    def artifact(self, path: Path, title: str) -> Artifact:
        """The answer that links a file below the run directory."""
        return Artifact(path=str(path.relative_to(self.run_dir)), title=title)


def ratios(samples: Sequence[float], base: Sequence[float], scale: float = 1.0) -> tuple[float, ...]:
    """Each sample divided by the sample of ``base`` at the same index, times ``scale``.

    Samples without a counterpart are omitted. If the two series are independent, the ratios have the noise of both.
    """
    return tuple(scale * sample / reference for sample, reference in zip(samples, base, strict=False))


def facts(values: Mapping[str, Any]) -> Iterator[Fact]:
    """One fact for each entry of ``values``."""
    return itertools.starmap(fact, values.items())


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Options(Frozen):
    """The options of a check that a trial file may set; the base class has none."""


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
class Needs:
    """What a check needs; without it the outcome is SKIP, or ERROR if the trial expects that hardware.

    ``shared_folder``: the option ``paths``, the claim of Kubernetes, or a run directory that the nodes may share.
    """

    gpus: bool = False
    min_ranks: int = 1
    shared_folder: bool = False


@dataclass(frozen=True, kw_only=True)
class Check:
    """The declaration of one check."""

    name: str
    title: str
    phase: Phase
    scope: Scope
    declared: tuple[metric, ...]
    measure: Callable[[Context, Any], Answers]
    limit_s: float  # time limit; generous, since it is meant for hangs and not for slow hardware
    # Returns how many seconds earlier sessions measured, from the artifacts directory: --resume measures only the rest
    measured_s: Callable[[Path], float] = lambda _artifacts_dir: 0.0
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
    # True for a CLUSTER check in which each node has its own communicator and is evaluated separately against the
    # reference value of one node. The first rank of a node reports its metrics and its facts gpu, world_size and nodes.
    per_node: bool = False
    # The fact that names the model of the measured device: only values of one model are compared with each other
    model_fact: str = "gpu"
    # Facts known from the options before the measurement, such as FLOP per token; used to validate the thresholds of a
    # trial when it is loaded
    facts_from_options: Callable[[Any], Mapping[str, JsonValue]] = lambda _options: {}
    # Facts about the links between GPUs and about NCCL's choices: role → name of the fact
    fact_roles: Mapping[FactRole, str] = field(default_factory=dict)
    # nccl-tests' name of the operation that ``busbw.*`` refers to; empty if there is none, or several
    operation: str = ""
    # Returns mode → the sizes in bytes of ``operation`` that GPUs time over TCP, for these options and this network
    timed_sizes: Callable[[Any, TcpNetwork], Mapping[str, Sequence[int]]] | None = None
    # Returns the default sizes in bytes that are not timed because the TCP network is too slow for them
    omitted_sizes: Callable[[Any, TcpNetwork], Sequence[int]] | None = None
    # Several implementations of the same work: if one is slow, its software is at fault; if all are slow, the machine
    # is at fault
    implementations: Implementations | None = None
    # Whether this check is the search for slow nodes. A run starts that check automatically when a metric that was
    # measured over several nodes violates a threshold. The facts PAIR_RATES and RANKS_BY_NODE of the check become
    # findings; see hardware/pair_search.py.
    localizes: bool = False

    def __post_init__(self) -> None:
        """Raises SeatrialError if a metric is declared twice, or if a rule requires an option that does not exist."""
        names = [each.name for each in self.declared]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise SeatrialError(f"check {self.name} declares twice: {', '.join(twice)}")
        needed = {option for rule in self.rules for option in rule.when.default_options}
        if unknown := sorted(needed - self.options.model_fields.keys()):
            raise SeatrialError(f"check {self.name} has no option {', '.join(unknown)}, which a rule requires")

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules on all metrics."""
        return tuple(rule for each in self.declared for rule in each.rules)

    @cached_property
    def units(self) -> Mapping[str, str]:
        """Metric, or family → its unit."""
        return {each.name: each.unit for each in self.declared}

    @cached_property
    def speeds(self) -> tuple[str, ...]:
        """The metrics, or families, that vary between runs (see metric.speed), in order of importance."""
        return tuple(each.name for each in self.declared if each.speed)

    def declaration(self, name: str) -> metric | None:
        """The declaration of a metric: of exactly this name, else of its family; None without one."""
        return find(self.declared, name)

    def observe(self, context: Context, options: Options) -> Iterator[Observation]:
        """Measure, and yield the observations for the record. Raises what ``measure`` raises, and see ``answers``."""
        of_scope = {Scope.NODE: context.node, Scope.GPU: context.subject}.get(self.scope, CLUSTER)
        return answers(
            self.measure(context, options), self.declared, self.name, {None: of_scope, "rank": context.subject}
        )

    @property
    def reads_error_counters(self) -> bool:
        """Whether the worker reads error counters before and after the check.

        False for checks without load (phase environment), and for checks that read the counters themselves.
        """
        return self.phase is not Phase.ENVIRONMENT and not any(
            each.name.startswith(NEW_ERRORS_PREFIX) for each in self.declared
        )


Checks = Mapping[str, Check]  # by name
