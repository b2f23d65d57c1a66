"""The causes of bad verdicts, from the declarations of metrics and data/causes, and the facts that they name. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.checks.cause import Cause
from seatrial.model import Measurement, Verdict, node_of
from seatrial.util import data_files

_MAX_PIDS = 8


@cache
def causes() -> tuple[Cause, ...]:
    """All causes that ship with seatrial: those of one metric from its declaration, the others from data/causes."""
    declared: dict[str, Cause] = {}
    for check in catalog().values():
        for each in check.declared:
            if cause := each.cause:
                # checks with the same engine share a declaration
                evidence = dict(declared[cause.id].evidence if cause.id in declared else {})
                evidence[check.name] = (*evidence.get(check.name, ()), each.name)
                texts = {"title": cause.title or each.meaning, "fix": cause.fix or each.fix}
                declared[cause.id] = cause.model_copy(update={**texts, "evidence": evidence})
    return (*declared.values(), *(Cause.model_validate(row) for rows in data_files.read_all("causes") for row in rows))


class Details:
    """The facts of ``measurements`` on which causes depend; a malformed fact gives no process and no path."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        rows = [(each.with_fact, each.without_fact, each.paths_fact, each.processes_fact) for each in causes()]
        names = {name for row in rows for name in row}
        self._values: dict[str, dict[str, list[tuple[str, JsonValue]]]] = {}  # fact → node → (check, value)
        for each in measurements:
            for name in names & each.facts.keys():
                of_node = self._values.setdefault(name, {}).setdefault(node_of(each.subject), [])
                of_node.append((each.check, each.facts[name]))

    def facts_allow(self, cause: Cause, verdict: Verdict) -> bool:
        """Whether the check of ``verdict`` has ``with_fact`` of the cause on the node, and not ``without_fact``."""
        has_fact = not cause.with_fact or bool(self._texts(cause.with_fact, verdict))
        return has_fact and not (cause.without_fact and self._texts(cause.without_fact, verdict))

    def quotable_texts(self, cause: Cause, evidence: Sequence[Verdict]) -> frozenset[str]:
        """The texts of ``with_fact`` of the cause at the places of ``evidence``."""
        return frozenset(text for verdict in evidence for text in self._texts(cause.with_fact, verdict)[-1:])

    def _texts(self, fact: str, verdict: Verdict) -> list[str]:
        """The texts of a fact that the check of ``verdict`` has on its node; empty ones do not count."""
        values = self._values.get(fact, {}).get(node_of(verdict.subject), ())
        return [value for check, value in values if check == verdict.check and isinstance(value, str) and value]

    def process_names(self, cause: Cause, evidence: Sequence[Verdict]) -> list[str]:
        """``NAME (pid PID)`` of each process in the cause's fact at the places of ``evidence``."""
        return [f"{name} (pid {pid})" for pid, name in self._processes(cause, evidence).items()]

    def command(self, cause: Cause, evidence: Sequence[Verdict], place: str) -> str:
        """The first command of the cause at ``place`` with processes and paths; {gpu}, {port} and {node} are kept."""
        on_gpu = any(verdict.subject.partition("/")[2].startswith("gpu") for verdict in evidence)
        command = cause.rank_command if cause.rank_command and not on_gpu else cause.first_command
        if cause.place == "rank" and "/" not in place:
            command = command.replace(" --id={gpu}", "")  # all GPUs of a node
        if cause.paths_fact:
            command = command.replace("{paths}", " ".join(map(shlex.quote, self._paths(cause, evidence))) or ".")
        pids = list(self._processes(cause, evidence))[:_MAX_PIDS]
        if cause.process_command and pids:
            command += "; " + cause.process_command.replace("{pids}", ",".join(map(str, pids)))
        return command

    def _processes(self, cause: Cause, evidence: Sequence[Verdict]) -> dict[int, str]:
        """PID → name of the processes in the cause's fact; processes of a GPU only if ``evidence`` names that GPU."""
        subjects = {verdict.subject for verdict in evidence}
        names: dict[int, str] = {}
        for node in dict.fromkeys(map(node_of, (verdict.subject for verdict in evidence))):
            for _, processes in self._values.get(cause.processes_fact, {}).get(node, ()):
                for process in processes if isinstance(processes, list) else ():
                    if not isinstance(process, Mapping) or type(pid := process.get("pid")) is not int:
                        continue
                    if "gpu" not in process or f"{node}/gpu{process['gpu']}" in subjects:
                        names.setdefault(pid, str(process.get("name", "unknown")))
        return names

    def _paths(self, cause: Cause, evidence: Sequence[Verdict]) -> list[str]:
        """The absolute paths in the names of the metrics, such as write_single./home; else those in the fact."""
        suffixes = (verdict.metric.partition(".")[2] for verdict in evidence)
        if in_names := [path for path in suffixes if path.startswith("/")]:
            return list(dict.fromkeys(in_names))
        values = (value for rows in self._values.get(cause.paths_fact, {}).values() for _, value in rows)
        keys = (path for value in values if isinstance(value, Mapping) for path in value)
        return [path for path in dict.fromkeys(keys) if path.startswith("/")]
