"""The clock of one node is ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, cluster_needs, missing_cluster, set_variables, settings
from seatrial.drill.injection import Injection

LIBRARIES = "/usr/lib/*/faketime/libfaketime.so.1"  # Debian package libfaketime


def _libraries() -> list[Path]:
    return sorted(Path("/").glob(LIBRARIES.removeprefix("/")))


def _unmet_need() -> str:
    missing = "" if _libraries() else f"needs {LIBRARIES}: apt-get install libfaketime"
    return missing_cluster() or missing


def set_clock(injection: Injection) -> None:
    """Add 2 s to the time that the tasks of the node read.

    With libfaketime, since all nodes of the test cluster share the clock of one kernel. libfaketime also delays the end
    of waits with a time limit by 2 s.
    """
    set_variables(injection, LD_PRELOAD=str(_libraries()[0]), FAKETIME="+2s")


DRILL = Drill(
    name="clock-skew",
    title="libfaketime adds 2 s to the clock of one of two nodes",
    machine="cluster",
    trial=DrillTrial(checks={"nodes.connectivity": {}}, settings=settings(), launcher="slurm"),
    expected=Expected(
        check="nodes.connectivity",
        metric="clock_skew",
        cause="clock_skew",
        place=rf"^{NODE}: ",
        command=rf"nodelist={NODE} .*chronyc tracking",
        action="fix-config",
    ),
    needs=replace(cluster_needs(), other=_unmet_need),
    prepare=set_clock,
)
