"""What the figures of a trial say beyond its verdicts. Pure, and above the judge: it changes no outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seatrial.analysis.insights import insights
from seatrial.checks.base import Check
from seatrial.config.schema import Config
from seatrial.hardware import links
from seatrial.hardware.references import known_for
from seatrial.judge import error_counters
from seatrial.model import Baseline, Insight, Measurement, Verdict


def read(
    config: Config,
    measurements: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    checks: Mapping[str, Check],
    site: Baseline | None = None,
) -> tuple[Insight, ...]:
    """Every insight of a trial; see ``insights``."""
    found = links.read(measurements, checks)
    figures = insights(config, measurements, verdicts, checks, known_for(found, site), found)
    return (*figures, *error_counters.insights(measurements))
