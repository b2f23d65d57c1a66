"""Causes and environment variables as data, from data/causes and data/environment_variables.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

from seatrial.discover.kubernetes_messages import Message
from seatrial.model import Frozen, Verdict
from seatrial.model.trial import Action
from seatrial.util import data_files


class Cause(Frozen):
    """A cause whose sign is a FAIL or WARN on a metric in ``evidence``.

    ``evidence``: check, or a pattern, → metrics, or patterns. ``explains``: patterns of checks whose bad verdicts at
    the same place follow from it. ``wrong_results``: it explains any bad verdict, such as damaged data, and not only
    low speed. ``consequence_of``: causes, or environment variables, that explain its evidence at the same place; it is
    reported without them only.
    ``with_fact``, ``without_fact``: a verdict is evidence only if its check has, or has not, this fact on the node; an
    ERROR that quotes the text of ``with_fact`` follows from the cause, whatever its check.
    ``report_warning``: it is reported for a WARN that explains no other bad verdict, too.
    ``place`` rank: the rank of the verdict; its node, or the cluster, if all ranks there are bad.

    ``first_command`` may have {gpu}, {port}, {node}, {paths} of the fact ``paths_fact``, and {names}: the names in
    the fact ``fault_places`` of a check for the place, else the host's name. ``rank_command`` replaces it for a rank
    without a GPU. ``processes_fact``: processes to name; ``process_command`` with {pids} is then added.
    ``signatures``: patterns of signatures of logs that show the same cause.
    ``message``: of a scheduler about a job that does not start; such a cause has no metrics as evidence.
    ``explained_by_job_failure``: a cause with a message explains its evidence at the same place.
    """

    id: str
    title: str
    evidence: Mapping[str, tuple[str, ...]] = {}
    message: Message | None = None
    explained_by_job_failure: bool = False
    place: Literal["gpu", "port", "node", "rank", "cluster"]
    explains: tuple[str, ...]
    wrong_results: bool = False
    report_warning: bool = False
    with_fact: str = ""
    without_fact: str = ""
    consequence_of: tuple[str, ...] = ()
    first_command: str
    rank_command: str = ""
    paths_fact: str = ""
    processes_fact: str = ""
    process_command: str = ""
    signatures: tuple[str, ...] = ()
    fix: str
    action: Action

    def is_evidence(self, verdict: Verdict) -> bool:
        """Whether ``verdict``, a FAIL or WARN, shows this cause."""
        return any(
            fnmatchcase(verdict.check, check) and any(fnmatchcase(verdict.metric, metric) for metric in metrics)
            for check, metrics in self.evidence.items()
        )


class Variable(Frozen):
    """An environment variable: its default, and the effect of other values than those that ``harmless`` matches.

    ``large``: the effect alone can make collectives several times slower.
    """

    default: str
    harmless: str = r"(?!)"
    effect: str
    explains: tuple[str, ...]
    large: bool = False
    source: str


@cache
def causes() -> tuple[Cause, ...]:
    """All causes that ship with seatrial."""
    return tuple(Cause.model_validate(row) for rows in data_files.read_all("causes") for row in rows)


@cache
def variables() -> Mapping[str, Variable]:
    """All environment variables with a known effect."""
    rows = data_files.read("environment_variables.yaml")
    return {name: Variable.model_validate(row) for name, row in rows.items()}
