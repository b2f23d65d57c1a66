"""One node has another filesystem at the path of a shared folder."""

from __future__ import annotations

import shlex

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, change_node, cluster_needs, settings
from seatrial.drill.injection import Injection


def mount_other_filesystem(injection: Injection) -> None:
    """Mount an empty tmpfs over a folder on the node; the trial tests whether all nodes share the folder."""
    shared = injection.folder / "shared"
    shared.mkdir()
    injection.settings["checks"] = {"filesystem.shared": {"options": {"paths": [str(shared)]}}}
    path = shlex.quote(str(shared))
    change_node(injection, f"mount -t tmpfs tmpfs {path}", f"umount --lazy {path}")


DRILL = Drill(
    name="folder-unshared",
    title="a tmpfs at the path of a shared folder on one of three nodes",
    machine="cluster",
    trial=DrillTrial(checks={"filesystem.shared": {}}, settings=settings(3), launcher="slurm"),
    expected=Expected(
        check="filesystem.shared",
        metric="paths_not_shared",
        cause="filesystem_not_shared",
        place=rf"^{NODE}: ",
        command=rf"nodelist={NODE} .*df -hT .*/shared",
        action="fix-environment",
    ),
    needs=cluster_needs(3),
    prepare=mount_other_filesystem,
)
