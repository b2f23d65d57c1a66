"""The tasks of one node may lock only little memory."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cluster._nodes import NODE, cluster_needs, kill_slurmd, run_before_tasks, settings, start_slurmd
from seatrial.drill.injection import Injection


def limit_memlock(injection: Injection) -> None:
    """Restart slurmd of the node without CAP_IPC_LOCK, and limit the locked memory of its tasks to 64 KiB."""
    run_before_tasks(injection, "prlimit --pid $SLURM_TASK_PID --memlock=65536:65536\n")
    kill_slurmd(injection)
    injection.at_end(start_slurmd, injection)
    injection.at_end(kill_slurmd, injection)
    start_slurmd(injection, "setpriv --inh-caps=-ipc_lock --bounding-set=-ipc_lock")


DRILL = Drill(
    name="memlock-low-on-node",
    title="locked memory is limited to 64 KiB on one of two nodes, without CAP_IPC_LOCK",
    machine="cluster",
    # the check's rule applies only to nodes with RDMA devices; this threshold applies to any node
    trial=DrillTrial(
        checks={"host.inventory": {}},
        settings=settings(checks={"host.inventory": {"expect": {"memlock_unlimited": "== 1 bool"}}}),
        launcher="slurm",
    ),
    expected=Expected(
        check="host.inventory",
        metric="memlock_unlimited",
        cause="memlock_limited",
        place=rf"^{NODE}: ",
        command=rf"nodelist={NODE} .*ulimit -l",
        action="fix-config",
    ),
    needs=cluster_needs(2, "setpriv", "prlimit"),
    prepare=limit_memlock,
)
