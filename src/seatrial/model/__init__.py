"""The frozen records that the other packages exchange.

A subject is a string: ``node3``, ``node3/gpu5``, ``node3/rank1`` (a process without a GPU), ``node3->node7`` or
``cluster``. Times are Unix seconds, durations seconds, sizes bytes (1 KiB = 1024 B), bandwidths GB/s with
1 GB = 1e9 B as in nccl-tests.
"""

from __future__ import annotations

from seatrial.model.base import Frozen
from seatrial.model.errors import DiskFullError, NotApplicable, SeatrialError, UsageError, first_validation_error
from seatrial.model.job import Job, JobFailure, JobResult, JobState, Machine, MissingNode, NodeShortage, Preflight
from seatrial.model.measurement import (
    CLUSTER,
    ERROR_COUNTERS,
    FAILED_RANK,
    GPUS_USED,
    JOB_FAILURES,
    PORTS_USED,
    Absent,
    Artifact,
    Fact,
    Measurement,
    Metric,
    Observation,
    Phase,
    Scope,
    Series,
    Why,
    ends,
    node_of,
)
from seatrial.model.outcome import WORST_FIRST, BasisKind, Outcome, Reason, worst
from seatrial.model.rule import Baseline, LearnedRun, ParsedThreshold, ReferenceValue, Rule, Threshold
from seatrial.model.topology import Topology
from seatrial.model.trial import (
    TIME_LIMIT,
    Decision,
    DecisionValue,
    Finding,
    Insight,
    ReasonCode,
    Session,
    Timing,
    Trial,
)
from seatrial.model.units import (
    ByteSize,
    PlausibleRange,
    format_bytes,
    format_value,
    has_scale,
    parse_bytes,
    plausible_range,
    size_label,
    value_parts,
)
from seatrial.model.verdict import Basis, Retry, Verdict, VerdictKey

__all__ = [
    "CLUSTER",
    "ERROR_COUNTERS",
    "FAILED_RANK",
    "GPUS_USED",
    "JOB_FAILURES",
    "PORTS_USED",
    "TIME_LIMIT",
    "WORST_FIRST",
    "Absent",
    "Artifact",
    "Baseline",
    "Basis",
    "BasisKind",
    "ByteSize",
    "Decision",
    "DecisionValue",
    "DiskFullError",
    "Fact",
    "Finding",
    "Frozen",
    "Insight",
    "Job",
    "JobFailure",
    "JobResult",
    "JobState",
    "LearnedRun",
    "Machine",
    "Measurement",
    "Metric",
    "MissingNode",
    "NodeShortage",
    "NotApplicable",
    "Observation",
    "Outcome",
    "ParsedThreshold",
    "Phase",
    "PlausibleRange",
    "Preflight",
    "Reason",
    "ReasonCode",
    "ReferenceValue",
    "Retry",
    "Rule",
    "Scope",
    "SeatrialError",
    "Series",
    "Session",
    "Threshold",
    "Timing",
    "Topology",
    "Trial",
    "UsageError",
    "Verdict",
    "VerdictKey",
    "Why",
    "ends",
    "first_validation_error",
    "format_bytes",
    "format_value",
    "has_scale",
    "node_of",
    "parse_bytes",
    "plausible_range",
    "size_label",
    "value_parts",
    "worst",
]
