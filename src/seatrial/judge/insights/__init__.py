"""Insights from the measurements of a trial, such as the smallest detectable fault. They change no outcome. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seatrial.checks.check import Check
from seatrial.config.schema import Config
from seatrial.hardware import links
from seatrial.hardware.references import select_references
from seatrial.judge import error_counters
from seatrial.judge.configured_fabric import tcp_fabric
from seatrial.judge.insights.texts import performance_insights
from seatrial.model import Baseline, Insight, Measurement


def trial_insights(
    config: Config,
    measurements: Sequence[Measurement],
    checks: Mapping[str, Check],
    site: Baseline | None = None,
) -> tuple[Insight, ...]:
    """The insights on performance, then those on error counters."""
    trial_links = links.read(measurements, checks)
    references = select_references(trial_links, site, tcp=tcp_fabric(config))
    performance = performance_insights(config, measurements, checks, references, trial_links)
    return (*performance, *error_counters.insights(measurements))
