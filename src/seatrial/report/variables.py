"""The environment variables of the ranks, for the first page of reports."""

from __future__ import annotations

from collections.abc import Mapping

from seatrial.checks import catalog
from seatrial.diagnose.causes import SET_BY_SEATRIAL, variable_values
from seatrial.discover.environment_variables import variables
from seatrial.model import Trial
from seatrial.util.text import and_more

_MAX_NODES = 4


def variable_lines(trial: Trial) -> list[str]:
    """One line for each variable with a known effect that is set: value, nodes, effect, and who set it if known."""
    of_trial = trial.config.get("env")
    lines = []
    for name, text, nodes, is_on_some, _ in sorted(variable_values(trial.measurements, catalog())):
        value = text.removesuffix(SET_BY_SEATRIAL).rstrip()
        effect, default = variables()[name].effect, variables()[name].default
        line = f"{name}={value}" + (f" on {and_more(nodes, _MAX_NODES)} only" if is_on_some else "")
        line += f": {effect} (default: {default})" if variables()[name].has_effect(value) else ": like the default"
        if value != text:
            line += ", set by seatrial"
        elif isinstance(of_trial, Mapping) and of_trial.get(name) == value:
            line += f", set by env of the trial ({trial.origins.get(f'env.{name}', 'origin not recorded')})"
        lines.append(line)
    return lines
