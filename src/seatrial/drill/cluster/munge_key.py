"""A node has another munge key than the controller."""

from __future__ import annotations

import os
import shlex

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, change_node, cluster_needs, settings, test_cluster, wait_until_idle
from seatrial.drill.injection import Injection


def replace_key(injection: Injection) -> None:
    """Start a munged with another key on the node, and mount its socket over that of the cluster's munged."""
    folder = injection.folder / "munge"
    folder.mkdir(mode=0o755)
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    run, quoted = shlex.quote(str(test_cluster().folder / "run")), shlex.quote(str(folder))
    files = f"--key-file={quoted}/key --socket={quoted}/socket --pid-file={quoted}/pid --seed-file={quoted}/seed"
    injection.at_end(wait_until_idle)
    change_node(
        injection,
        f"munged --force {files} --log-file={quoted}/log && mount --bind {quoted}/socket {run}/munge.socket",
        f"umount {run}/munge.socket; kill $(cat {quoted}/pid)",
    )


DRILL = Drill(
    name="munge-key",
    title="one of two nodes has another munge key",
    machine="cluster",
    trial=DrillTrial(checks={"host.inventory": {}}, settings=settings(), launcher="slurm"),
    expected=Expected(
        check="host.inventory",
        cause="node_authentication",
        place=rf"^{NODE}: ",
        command=rf"munge -n \| ssh {NODE} unmunge",
        action="fix-environment",
    ),
    needs=cluster_needs(2, "munged"),
    prepare=replace_key,
)
