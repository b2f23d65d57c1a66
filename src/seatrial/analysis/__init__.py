"""What the figures of a trial say beyond its verdicts. Pure, and above the judge: it changes no outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seatrial.analysis.insights import performance_insights
from seatrial.checks.base import Check
from seatrial.config.schema import Config
from seatrial.hardware import links
from seatrial.hardware.references import references_for
from seatrial.judge import error_counters
from seatrial.model import Baseline, Insight, Measurement


def trial_insights(
    config: Config,
    measurements: Sequence[Measurement],
    checks: Mapping[str, Check],
    site: Baseline | None = None,
) -> tuple[Insight, ...]:
    """Every insight of a trial; see ``insights``."""
    found = links.read(measurements, checks)
    figures = performance_insights(config, measurements, checks, references_for(found, site), found)
    return (*figures, *error_counters.insights(measurements))
