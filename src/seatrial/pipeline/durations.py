"""Typical durations of checks and jobs on a cluster of a given size, from data/typical_seconds.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.config.schema import Config
from seatrial.model import Frozen
from seatrial.util import data_files

Unit = Literal["gpu", "gpu_pair", "node", "slurm", "kubernetes"]


class Duration(Frozen):
    """The typical duration of a check in seconds: a constant, a part per unit, and a part per unit of an option."""

    seconds: float = 0
    per: dict[Unit, float] = {}
    options: dict[str, float] = {}


class TypicalSeconds(Frozen):
    """Content of typical_seconds.yaml; ``jobs``: the start and end of a job, by placement."""

    jobs: dict[str, float]
    checks: dict[str, Duration]


@cache
def typical_seconds() -> TypicalSeconds:
    return TypicalSeconds.model_validate(data_files.read("typical_seconds.yaml"))


def typical_duration(
    check: Check, options: Mapping[str, JsonValue], config: Config, gpus_per_node: int
) -> float | None:
    """Return the typical duration of ``check`` in seconds; None if it is unknown."""
    duration = typical_seconds().checks.get(check.name)
    if duration is None:
        return None
    counts: Mapping[Unit, int] = {
        "gpu": gpus_per_node,
        "gpu_pair": gpus_per_node * (gpus_per_node - 1),
        "node": config.cluster.nodes - 1,
        "slurm": int(config.uses_slurm),
        "kubernetes": int(config.launcher == "kubernetes"),
    }
    defaults = {name: field.default for name, field in check.options.model_fields.items()}
    values = {**defaults, **options}
    of_options = sum(
        factor * value
        for name, factor in duration.options.items()
        if isinstance(value := values.get(name), (int, float))
    )
    return duration.seconds + sum(factor * counts[unit] for unit, factor in duration.per.items()) + of_options
