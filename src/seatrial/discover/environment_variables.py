"""The environment variables that affect speed: their defaults and effects, and the values in this process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache

from seatrial.model import Frozen
from seatrial.util import data_files
from seatrial.util.text import printable


class Variable(Frozen):
    """An environment variable: its default, and the effect of other values than those that ``harmless`` matches.

    ``large``: the effect alone can make collectives several times slower. ``warn``: every job with such a value is
    slower.
    """

    default: str
    harmless: str = r"(?!)"
    effect: str
    explains: tuple[str, ...]
    large: bool = False
    warn: bool = False
    source: str

    def has_effect(self, value: str) -> bool:
        """Whether the variable with this value differs from its default."""
        return re.fullmatch(self.harmless, value) is None


@cache
def variables() -> Mapping[str, Variable]:
    rows = data_files.read("environment_variables.yaml")
    return {name: Variable.model_validate(row) for name, row in rows.items()}


def read() -> dict[str, str]:
    """Name → value of those variables that this process has; NCCL reads an empty value as unset."""
    return {name: printable(value) for name in variables() if (value := os.environ.get(name))}
