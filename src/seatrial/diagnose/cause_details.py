"""Details of a cause from facts: processes and paths for the title and the first command of the cause. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue

from seatrial.diagnose.cause_data import Cause
from seatrial.model import Measurement, Verdict

_MAX_PIDS = 8


class Details:
    """The facts of ``measurements`` on which causes depend; a malformed fact gives no process and no path."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._measurements = measurements
        self._objects_by_fact: dict[str, dict[str, list[Mapping[str, JsonValue]]]] = {}  # see _objects
        self._texts_by_fact: dict[str, dict[tuple[str, str], str]] = {}  # see _texts

    def facts_allow(self, cause: Cause, verdict: Verdict) -> bool:
        """Whether the check of ``verdict`` has ``with_fact`` of the cause on the node, and not ``without_fact``."""
        key = verdict.check, verdict.subject.partition("/")[0]
        has_fact = not cause.with_fact or key in self._texts(cause.with_fact)
        return has_fact and not (cause.without_fact and key in self._texts(cause.without_fact))

    def quotable_texts(self, cause: Cause, evidence: Sequence[Verdict]) -> frozenset[str]:
        """The texts of ``with_fact`` of the cause at the places of ``evidence``."""
        texts = self._texts(cause.with_fact) if cause.with_fact else {}
        keys = {(verdict.check, verdict.subject.partition("/")[0]) for verdict in evidence}
        return frozenset(texts[key] for key in keys if key in texts)

    def _texts(self, fact: str) -> dict[tuple[str, str], str]:
        """(check, node) → the text of a fact that is not empty; computed once, for thousands of nodes."""
        if fact not in self._texts_by_fact:
            values = ((each, each.facts.get(fact)) for each in self._measurements)
            self._texts_by_fact[fact] = {
                (each.check, each.subject.partition("/")[0]): text
                for each, text in values
                if text and isinstance(text, str)
            }
        return self._texts_by_fact[fact]

    def process_names(self, cause: Cause, evidence: Sequence[Verdict]) -> list[str]:
        """``NAME (pid PID)`` of each process in the cause's fact at the places of ``evidence``."""
        return [f"{name} (pid {pid})" for pid, name in self._processes(cause, evidence).items()]

    def command(self, cause: Cause, evidence: Sequence[Verdict], place: str) -> str:
        """The first command of the cause at ``place`` with processes and paths; {gpu}, {port} and {node} are kept."""
        subjects = {verdict.subject for verdict in evidence}
        on_gpu = any(subject.partition("/")[2].startswith("gpu") for subject in subjects)
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
        if not cause.processes_fact:
            return {}
        subjects = {verdict.subject for verdict in evidence}
        names: dict[int, str] = {}
        for node in dict.fromkeys(verdict.subject.partition("/")[0] for verdict in evidence):
            for process in self._objects(cause.processes_fact).get(node, ()):
                pid = process.get("pid")
                is_at_subject = "gpu" not in process or f"{node}/gpu{process['gpu']}" in subjects
                if type(pid) is int and is_at_subject:
                    names.setdefault(pid, str(process.get("name", "unknown")))
        return names

    def _objects(self, fact: str) -> dict[str, list[Mapping[str, JsonValue]]]:
        """Node → the objects in a fact that is a list of objects; computed once, for thousands of nodes."""
        if fact not in self._objects_by_fact:
            by_node = self._objects_by_fact[fact] = {}
            for measurement in self._measurements:
                value = measurement.facts.get(fact)
                objects = [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
                if objects:
                    by_node.setdefault(measurement.subject.partition("/")[0], []).extend(objects)
        return self._objects_by_fact[fact]

    def _paths(self, cause: Cause, evidence: Sequence[Verdict]) -> list[str]:
        """The absolute paths in the names of the metrics, such as write_single./home; else those in the fact."""
        suffixes = [verdict.metric.partition(".")[2] for verdict in evidence]
        named_paths = [suffix for suffix in suffixes if suffix.startswith("/")]
        return list(dict.fromkeys(named_paths or self._paths_in_facts(cause.paths_fact)))

    def _paths_in_facts(self, name: str) -> Iterator[str]:
        for measurement in self._measurements:
            value = measurement.facts.get(name)
            for path in value if isinstance(value, Mapping) else ():
                if path.startswith("/"):
                    yield path
