"""The node's /dev/shm has Docker's default size."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected, Needs
from seatrial.drill.cpu._host import HOST
from seatrial.drill.injection import Injection
from seatrial.model import Outcome


def mount_small(injection: Injection) -> None:
    """Mount 64 MiB at /dev/shm, in the mount namespace of the trial only."""
    injection.new_mounts = True
    injection.setup.append("mount -t tmpfs -o size=64m tmpfs /dev/shm")


DRILL = Drill(
    name="shm-small",
    title="/dev/shm of 64 MiB, as in a container without --shm-size",
    machine="cpu",
    trial=DrillTrial(checks={"host.inventory": {}}),
    expected=Expected(
        check="host.inventory",
        metric="shm_bytes",
        outcomes=(Outcome.FAIL,),
        cause="shm_too_small",
        place=rf"^{HOST}: .*shm_bytes",
        command=r"df -h /dev/shm",
        action="fix-environment",
    ),
    needs=Needs(root=True, programs=("unshare", "mount")),
    prepare=mount_small,
)
