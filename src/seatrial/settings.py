"""What a trial may say: the schema of its YAML file. The reason for a default stands beside it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from seatrial.model import Frozen, ParsedLimit


class Cluster(Frozen):
    """What was promised. Absent promises are not judged; a promise that is not kept fails."""

    nodes: int = Field(default=1, ge=1)
    gpus_per_node: int | None = Field(default=None, ge=0)


class Limits(Frozen):
    """Seconds after which seatrial stops waiting. Generous: they catch hangs, not slowness."""

    # importing torch from a cold network filesystem on many nodes has been seen to take minutes
    startup_s: float = Field(default=180, gt=0)
    # every rank gives a sign of life each second from a thread of its own; a minute of silence is no hiccup
    silence_s: float = Field(default=60, gt=0)


class CheckSettings(Frozen):
    """One check in a trial: whether the decision needs it, thresholds that outrank the check's own, its options."""

    required: bool = True
    limit_s: float | None = Field(default=None, gt=0, description="in place of the check's own time limit")
    expect: dict[str, ParsedLimit] = {}
    options: dict[str, JsonValue] = {}


class Config(Frozen):
    """A resolved trial."""

    name: str
    description: str = ""
    launcher: Literal["auto", "local"] = "auto"
    cluster: Cluster = Cluster()
    limits: Limits = Limits()
    env: dict[str, str] = Field(default={}, description="variables for the workers, such as NCCL_DEBUG")
    checks: dict[str, CheckSettings]
