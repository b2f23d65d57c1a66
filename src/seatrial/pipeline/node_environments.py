"""The environment in which the workers of a trial ran, from the reports of the preflight on each node."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import JsonValue

from seatrial.config.schema import Container
from seatrial.util.grouping import grouped
from seatrial.util.input_files import read_json


def node_environments(run_dir: Path, container: Container) -> list[JsonValue]:
    """Return the last report of each node; nodes with equal reports share an entry. Empty without a preflight.

    The field ``in_container`` of an entry: whether the report has ``evidence`` that the process ran in a container.
    """
    report_by_node: dict[str, dict[str, JsonValue]] = {}
    for path in sorted(run_dir.glob("jobs/*/attempt*/preflight/*.json"), key=lambda path: path.stat().st_mtime):
        try:
            report = read_json(path)
            report_by_node[str(report.pop("node"))] = report
        except (OSError, ValueError, LookupError, AttributeError, TypeError):  # truncated, or of another program
            continue
    nodes_by_report = grouped(
        (json.dumps(report_by_node[node], sort_keys=True), node) for node in sorted(report_by_node)
    )
    requested: dict[str, JsonValue] = {"runtime": container.runtime, "image": container.image}
    environments: list[JsonValue] = []
    for report_json, nodes in nodes_by_report.items():
        report = json.loads(report_json)
        environments.append({"nodes": [*nodes], **requested, "in_container": bool(report.get("evidence")), **report})
    return environments
