"""The nouns of seatrial: frozen records that every other module reads and none mutates.

A subject is a place, written as text: ``node3``, ``node3/gpu5``, ``node3/rank1`` (a process without a GPU),
``node3->node7``, ``cluster``. Times are Unix seconds, durations seconds, sizes bytes (1 KiB = 1024 B),
bandwidths GB/s with 1 GB = 1e9 B, as nccl-tests prints them.
"""

from __future__ import annotations

from seatrial.model.base import Frozen
from seatrial.model.errors import NoRoom, NotApplicable, SeatrialError, UsageError, first_fault
from seatrial.model.job import Job, JobResult, JobState, Machine
from seatrial.model.measurement import (
    CLUSTER,
    ERROR_COUNTERS,
    EXCUSED,
    GPUS_USED,
    LEFT_OUT,
    WITHHELD,
    Artifact,
    Fact,
    Measurement,
    Metric,
    Observation,
    Phase,
    Scope,
    Series,
)
from seatrial.model.outcome import WORST_FIRST, BasisKind, Outcome, Reason, worst
from seatrial.model.rule import Baseline, Expected, Limit, ParsedLimit, Rule
from seatrial.model.trial import Decision, Finding, Insight, Session, Timing, Trial, Verb
from seatrial.model.units import ByteSize, format_bytes, format_value, parse_bytes
from seatrial.model.verdict import Basis, Retry, Verdict

__all__ = [
    "CLUSTER",
    "ERROR_COUNTERS",
    "EXCUSED",
    "GPUS_USED",
    "LEFT_OUT",
    "WITHHELD",
    "WORST_FIRST",
    "Artifact",
    "Baseline",
    "Basis",
    "BasisKind",
    "ByteSize",
    "Decision",
    "Expected",
    "Fact",
    "Finding",
    "Frozen",
    "Insight",
    "Job",
    "JobResult",
    "JobState",
    "Limit",
    "Machine",
    "Measurement",
    "Metric",
    "NoRoom",
    "NotApplicable",
    "Observation",
    "Outcome",
    "ParsedLimit",
    "Phase",
    "Reason",
    "Retry",
    "Rule",
    "Scope",
    "SeatrialError",
    "Series",
    "Session",
    "Timing",
    "Trial",
    "UsageError",
    "Verb",
    "Verdict",
    "first_fault",
    "format_bytes",
    "format_value",
    "parse_bytes",
    "worst",
]
