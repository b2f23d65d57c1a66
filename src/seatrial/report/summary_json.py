"""The rows of the first page as JSON, for programs: decision, headline figures and bad parts."""

from __future__ import annotations

import json
import math
from typing import Any

from seatrial.model import Trial
from seatrial.report.figures import Figure, headline
from seatrial.report.parts import Part, parts


def render(trial: Trial) -> str:
    """One JSON document with a stable form; text is as recorded, and a value that is not finite is null."""
    decision = {"value": trial.decision.value, "reason": trial.decision.reason}
    rows = {"headline": list(map(_figure, headline(trial))), "parts": list(map(_part, parts(trial)))}
    return json.dumps({"trial": trial.name, "decision": decision, **rows}, indent=1) + "\n"


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "checks": figure.checks,
        "metric": figure.metric,
        "measured": figure.measured if figure.measured is None or math.isfinite(figure.measured) else None,
        "unit": figure.unit,
        "expected": figure.expected,
        "share": figure.share,
        "op": figure.op,
        "limit": figure.limit,
        "source": figure.source,
        "worst_part": figure.worst_part,
        "n": figure.n,
        "outcome": figure.outcome,
    }


def _part(part: Part) -> dict[str, Any]:
    return {
        "kind": part.kind,
        "name": part.name,
        "node": part.node,
        "index": part.index,
        "model": part.gpu.model,
        "serial": part.gpu.serial,
        "uuid": part.gpu.uuid,
        "slot": part.gpu.slot,
        "outcome": part.outcome,
        "cause": part.cause,
        "first_command": part.first_command,
        "figures": list(map(_figure, part.figures)),
    }
