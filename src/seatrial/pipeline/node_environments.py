"""The environment in which the workers of a trial ran, from the reports of the preflight on each node."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import JsonValue

from seatrial.config.schema import Container
from seatrial.util.input_files import read_json


def node_environments(run_dir: Path, container: Container) -> list[JsonValue]:
    """Return the last report of each node; nodes with equal reports share an entry. Empty without a preflight.

    The field ``in_container`` of an entry: whether the report has ``evidence`` that the process ran in a container.
    """
    reports: dict[str, dict[str, JsonValue]] = {}
    for path in sorted(run_dir.glob("jobs/*/attempt*/preflight/*.json"), key=lambda path: path.stat().st_mtime):
        try:
            report = read_json(path)
            reports[str(report.pop("node"))] = report
        except (OSError, ValueError, LookupError, AttributeError, TypeError):  # truncated, or of another program
            continue
    nodes: dict[str, list[JsonValue]] = {}
    for node, report in sorted(reports.items()):
        nodes.setdefault(json.dumps(report, sort_keys=True), []).append(node)
    requested: dict[str, JsonValue] = {"runtime": container.runtime, "image": container.image}
    return [
        {"nodes": names, **requested, "in_container": bool((report := json.loads(text)).get("evidence")), **report}
        for text, names in nodes.items()
    ]
