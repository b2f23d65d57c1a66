"""One node has another filesystem at the path of the run directory."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, change_node, cluster_needs, run_on, settings, test_cluster
from seatrial.drill.injection import Injection


def mount_other_filesystem(injection: Injection) -> None:
    """Mount an empty tmpfs over the folder of the drill on the node; each node has its own scratch folder."""
    scratch = test_cluster().folder / "scratch"
    scratch.mkdir(exist_ok=True)
    for node in test_cluster().nodes:
        run_on(injection, node, f"mount -t tmpfs tmpfs {scratch}")
        injection.at_end(run_on, injection, node, f"umount --lazy {scratch}")
    injection.settings["slurm"] = {**dict(injection.settings["slurm"]), "scratch": str(scratch)}  # type: ignore[arg-type, call-overload]
    change_node(injection, f"mount -t tmpfs tmpfs {injection.folder}", f"umount --lazy {injection.folder}")


DRILL = Drill(
    name="run-dir-unshared",
    title="a tmpfs at the path of the run directory on one of three nodes",
    machine="cluster",
    trial=DrillTrial(checks={"filesystem.shared": {}}, settings=settings(3), launcher="slurm"),
    expected=Expected(
        check="filesystem.shared",
        metric="paths_not_shared",
        cause="filesystem_not_shared",
        place=rf"^{NODE}: ",
        command=rf"nodelist={NODE} ",
        action="fix-environment",
    ),
    needs=cluster_needs(3),
    prepare=mount_other_filesystem,
)
