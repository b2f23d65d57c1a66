"""Details of a cause from facts: the processes and paths that its title and first command name. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from seatrial.diagnose.cause_data import Cause
from seatrial.model import Measurement, Verdict

_MAX_PIDS = 8


class Details:
    """The facts of ``measurements`` that name processes and paths; a fact of another shape names none."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._measurements = measurements

    def process_names(self, cause: Cause, evidence: Sequence[Verdict]) -> list[str]:
        """``NAME (pid PID)`` of each process in the cause's fact at the places of ``evidence``."""
        return [f"{name} (pid {pid})" for pid, name in self._processes(cause, evidence).items()]

    def command(self, cause: Cause, evidence: Sequence[Verdict]) -> str:
        """The first command of the cause with processes and paths; {gpu}, {port} and {node} stay."""
        subjects = {verdict.subject for verdict in evidence}
        on_gpu = any(subject.partition("/")[2].startswith("gpu") for subject in subjects)
        command = cause.rank_command if cause.rank_command and not on_gpu else cause.first_command
        if cause.paths_fact:
            command = command.replace("{paths}", " ".join(map(shlex.quote, self._paths(cause, evidence))) or ".")
        pids = list(self._processes(cause, evidence))[:_MAX_PIDS]
        if cause.process_command and pids:
            command += "; " + cause.process_command.replace("{pids}", ",".join(map(str, pids)))
        return command

    def _processes(self, cause: Cause, evidence: Sequence[Verdict]) -> dict[int, str]:
        """PID → name of the processes in the cause's fact; of one with a GPU only if its GPU is in ``evidence``."""
        if not cause.processes_fact:
            return {}
        subjects = {verdict.subject for verdict in evidence}
        nodes = {subject.partition("/")[0] for subject in subjects}
        names: dict[int, str] = {}
        for measurement in self._measurements:
            node, entries = measurement.subject.partition("/")[0], measurement.facts.get(cause.processes_fact)
            if node not in nodes or not isinstance(entries, list):
                continue
            for entry in entries:
                pid = entry.get("pid") if isinstance(entry, Mapping) else None
                if not isinstance(entry, Mapping) or not isinstance(pid, int):
                    continue
                if "gpu" not in entry or f"{node}/gpu{entry['gpu']}" in subjects:
                    names.setdefault(pid, str(entry.get("name", "unknown")))
        return names

    def _paths(self, cause: Cause, evidence: Sequence[Verdict]) -> list[str]:
        """The absolute paths in the names of the metrics; without any, those in the cause's fact."""
        named = [path for verdict in evidence if (path := verdict.metric.partition(".")[2]).startswith("/")]
        return list(dict.fromkeys(named or self._paths_in_facts(cause.paths_fact)))

    def _paths_in_facts(self, name: str) -> Iterator[str]:
        for measurement in self._measurements:
            value = measurement.facts.get(name)
            for path in value if isinstance(value, Mapping) else ():
                if path.startswith("/"):
                    yield path
