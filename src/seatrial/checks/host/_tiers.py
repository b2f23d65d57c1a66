"""Tiers of filesystems: a tier is a use of a path, such as ``home``; data/filesystem_tiers.yaml has its thresholds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Literal

from pydantic import Field

from seatrial.checks.check import Options
from seatrial.checks.declare import Answers, absent, forbidden, metric, value
from seatrial.checks.host.filesystem_shared import AbsolutePath
from seatrial.model import Frozen, Outcome
from seatrial.util import data_files

RUN_DIRECTORY, HOME, HF_CACHE, LOCAL_SCRATCH = "run_directory", "home", "hf_cache", "local_scratch"


class Tier(Frozen):
    """One row of data/filesystem_tiers.yaml.

    ``use``: what the tier is for. ``local_disk``: whether the tier belongs on a disk of the node.
    ``rates``: operation → threshold in files/s. ``outcome``: outcome of a rate below its threshold.
    ``meaning``: consequence of such a rate for jobs.
    """

    use: str
    local_disk: bool
    outcome: Literal[Outcome.FAIL, Outcome.WARN]
    rates: dict[str, float]
    meaning: str


class TierOptions(Options):
    """``paths``: tier → path, such as ``{run_directory: /shared/runs, archive: /archive}``."""

    paths: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], AbsolutePath] = {}


UNKNOWN_TIERS = metric(
    "unknown_tiers",
    "== 0 paths",
    "A path belongs to no known tier: its values are recorded, but no threshold applies to them.",
    "Name the path after its use: run_directory, home, hf_cache or local_scratch.",
)


@cache
def tiers() -> dict[str, Tier]:
    return {name: Tier(**row) for name, row in data_files.read("filesystem_tiers.yaml")["tiers"].items()}


def default_paths(run_directory: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Tier → its path on this node, from the environment variables that programs use, or their defaults."""
    home = environ.get("HOME") or os.path.expanduser("~")
    return {
        RUN_DIRECTORY: run_directory,
        HOME: home,
        HF_CACHE: environ.get("HF_HOME") or os.path.join(home, ".cache", "huggingface"),
        LOCAL_SCRATCH: environ.get("TMPDIR") or tempfile.gettempdir(),
    }


def answers(paths: Mapping[str, str]) -> Answers:
    """UNKNOWN_TIERS, and the metrics ``*.TIER`` of the known tiers without a path. ``paths``: tier → path."""
    if unknown := [name for name in paths if name not in tiers()]:
        reason = f"no thresholds for tier {', '.join(unknown)}; known tiers: {', '.join(tiers())}"
        yield forbidden("unknown_tiers", reason)
    else:
        yield value("unknown_tiers", 0)
    for name in tiers():
        if name not in paths:
            yield absent(f"*.{name}", "no path of this tier")
