"""A process may lock only little memory."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected, Needs
from seatrial.drill.cpu._host import HOST
from seatrial.drill.injection import Injection


def limit_memlock(injection: Injection) -> None:
    """Limit locked memory to 64 KiB, and drop CAP_IPC_LOCK, with which the limit does not apply."""
    injection.setup.append("ulimit -l 64")
    injection.setup.append('set -- setpriv --inh-caps=-ipc_lock --bounding-set=-ipc_lock "$@"')


DRILL = Drill(
    name="memlock-low",
    title="locked memory is limited to 64 KiB (ulimit -l), without CAP_IPC_LOCK",
    machine="cpu",
    # the check's rule applies only to nodes with RDMA devices; this threshold applies to any node
    trial=DrillTrial(
        checks={"host.inventory": {}},
        settings={"checks": {"host.inventory": {"expect": {"memlock_unlimited": "== 1 bool"}}}},
    ),
    expected=Expected(
        check="host.inventory",
        metric="memlock_unlimited",
        cause="memlock_limited",
        place=rf"^{HOST}: .*memlock_unlimited",
        command=r"ulimit -l",
        action="fix-config",
    ),
    needs=Needs(root=True, programs=("setpriv",)),
    prepare=limit_memlock,
)
