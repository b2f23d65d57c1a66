"""Tiers of filesystems: a tier is a use of a path, such as ``home``; data/filesystem_tiers.yaml has its thresholds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Literal

from pydantic import Field

from seatrial.checks.base import Options, RuleFact, metric
from seatrial.checks.host.filesystem_shared import AbsolutePath
from seatrial.model import CLUSTER, Fact, Frozen, Observation, Outcome, Rule
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


_HAVE_THRESHOLDS = "tiers_have_thresholds"  # fact: whether all paths belong to known tiers
METRICS = {"unknown_tiers": "paths"}
RULE = Rule(
    metric="unknown_tiers",
    expect="== 0 paths",
    applies_if={_HAVE_THRESHOLDS: "yes"},
    meaning="A path belongs to no known tier: its values are recorded, but no threshold applies to them.",
    fix="Name the path after its use: run_directory, home, hf_cache or local_scratch.",
)
# With a path of an unknown tier the outcome of RULE is UNJUDGED
RULE_FACTS = {_HAVE_THRESHOLDS: RuleFact("yes", not_supported=Outcome.UNJUDGED)}


@cache
def tiers() -> dict[str, Tier]:
    """Name → tier."""
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


def observations(tier_names: Iterable[str], subject: str = CLUSTER) -> Iterator[Observation]:
    """The number of paths that belong to no known tier, and the fact that RULE requires."""
    unknown = [name for name in tier_names if name not in tiers()]
    reason = f"no thresholds for tier {', '.join(unknown)}; known tiers: {', '.join(tiers())}"
    yield Fact(name=_HAVE_THRESHOLDS, value=f"not_supported: {reason}" if unknown else "yes")
    yield metric("unknown_tiers", len(unknown), "paths", subject)
