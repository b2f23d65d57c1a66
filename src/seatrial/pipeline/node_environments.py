"""The environment that the workers of a trial really had, from the reports of the preflight on each node."""

from __future__ import annotations

from pathlib import Path

from pydantic import JsonValue

from seatrial.config.schema import Container
from seatrial.util.input_files import read_json


def node_environments(run_dir: Path, container: Container) -> list[JsonValue]:
    """Return the last report of each node, nodes with the same report in one entry; empty without a preflight.

    ``in_container``: whether the workers' process found itself in a container, by the ``evidence`` that it lists.
    """
    reports: dict[str, dict[str, JsonValue]] = {}
    for path in sorted(run_dir.glob("jobs/*/attempt*/preflight/*.json"), key=lambda path: path.stat().st_mtime):
        try:
            report = read_json(path)
            reports[str(report.pop("node"))] = report
        except (OSError, ValueError, LookupError, AttributeError, TypeError):  # truncated, or of another program
            continue
    entries: list[dict[str, JsonValue]] = []
    for node, report in sorted(reports.items()):
        evidence = report.pop("container", [])
        asked = {"runtime": container.runtime, "image": container.image}
        entry = {**asked, "in_container": bool(evidence), "evidence": evidence, **report}
        same = next((other for other in entries if {**other, "nodes": None} == {**entry, "nodes": None}), None)
        if same is None:
            entries.append({"nodes": [node], **entry})
        else:
            same["nodes"] = [*_nodes(same), node]
    return [dict(entry) for entry in entries]


def _nodes(entry: dict[str, JsonValue]) -> list[JsonValue]:
    nodes = entry["nodes"]
    return nodes if isinstance(nodes, list) else []
