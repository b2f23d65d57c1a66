"""The verdicts on the output of another benchmark, such as nccl-tests."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from seatrial.model.base import Frozen
from seatrial.model.outcome import Outcome
from seatrial.model.verdict import Verdict


class BenchmarkHardware(Frozen):
    """The hardware that a benchmark measured. A field that neither an option nor the output states is empty or None.

    ``sources``: field → the option, or the part of the output, that the value is from.
    """

    gpu: str = Field(default="", description="NVML name of the GPU; several models are joined by +")
    gpus_per_node: int | None = None
    nodes: int | None = None
    ranks: int | None = None
    fabric: str = Field(default="", description="kind of the network; rdma if only the rate of the ports is known")
    ports: int | None = Field(default=None, description="network ports of a node")
    port_gbps: float | None = Field(default=None, description="Gbit/s of each port")
    sources: dict[str, str] = {}


class MeasuredSize(Frozen):
    """The bus bandwidths in GB/s at one size; None if not measured. ``wrong``: wrong elements, None if not checked."""

    size: int = Field(description="bytes")
    label: str
    out_of_place: float | None = None
    in_place: float | None = None
    wrong: float | None = None


@dataclass(frozen=True)
class Bound:
    """The largest value that a metric can have, and its derivation as text."""

    value: float
    unit: str
    derivation: str


class BenchmarkResult(Frozen):
    """One operation of nccl-tests, or one testcase of nvbandwidth.

    ``verdicts``: the verdicts that decide ``outcome``. ``other_sizes``: verdicts on other sizes of the same operation.
    ``problems``: why the operation is UNJUDGED.
    """

    name: str = Field(description="operation or testcase")
    outcome: Outcome
    variant: str = Field(default="", description="data type, reduction and root")
    check: str = Field(default="", description="check of seatrial that measures the same; empty if there is none")
    path: str = Field(default="", description="the links that the data took")
    measured: tuple[MeasuredSize, ...] = ()
    bound: Bound | None = None
    verdicts: tuple[Verdict, ...] = ()
    other_sizes: tuple[Verdict, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class BenchmarkJudgement(Frozen):
    """The verdicts on one file. ``contradictions``: options that contradict the output."""

    tool: str = Field(description="nccl-tests or nvbandwidth")
    file: str
    outcome: Outcome
    hardware: BenchmarkHardware
    contradictions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    results: tuple[BenchmarkResult, ...] = ()
