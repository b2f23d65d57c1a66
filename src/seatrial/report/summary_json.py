"""The rows of the first page as JSON, for programs: decision, headline figures and bad parts."""

from __future__ import annotations

import json
import math
from typing import Any

from seatrial.model import Trial
from seatrial.report.figures import Figure, headline
from seatrial.report.parts import Part, parts

_FIGURE = (
    *("checks", "metric", "measured", "unit", "expected", "share", "op", "limit"),
    *("source", "worst_part", "n", "outcome"),
)


def render(trial: Trial) -> str:
    """One JSON document with a stable form; text is as recorded, and a value that is not finite is null."""
    decision = {"value": trial.decision.value, "reason": trial.decision.reason}
    rows = {"headline": list(map(_figure, headline(trial))), "parts": list(map(_part, parts(trial)))}
    return json.dumps({"trial": trial.name, "decision": decision, **rows}, indent=1) + "\n"


def _figure(figure: Figure) -> dict[str, Any]:
    values = {name: getattr(figure, name) for name in _FIGURE}
    return values | {"measured": values["measured"] if math.isfinite(values["measured"] or 0.0) else None}


def _part(part: Part) -> dict[str, Any]:
    values = {name: getattr(part, name) for name in ("kind", "name", "node", "index")}
    values |= {name: getattr(part.gpu, name) for name in ("model", "serial", "uuid", "slot")}
    values |= {name: getattr(part, name) for name in ("outcome", "cause", "first_command")}
    return values | {"figures": list(map(_figure, part.figures))}
