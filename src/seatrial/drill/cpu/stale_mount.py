"""A mounted filesystem does not answer: a FUSE filesystem whose program never replies."""

from __future__ import annotations

import shlex
import sys

from seatrial.drill.base import Drill, DrillTrial, Expected, Needs
from seatrial.drill.cpu._host import HOST
from seatrial.drill.injection import Injection
from seatrial.model import Outcome


def mount_silent(injection: Injection) -> None:
    """Mount the filesystem for the trial only. Its program ends with the trial, and the mount with its program."""
    folder = injection.folder / "silent"
    folder.mkdir()
    injection.new_mounts = True
    program = shlex.join([sys.executable, "-m", "seatrial.drill.silent_filesystem", str(folder)])
    injection.setup.append(f"setpriv --pdeathsig KILL {program} &")
    mounted = shlex.quote(str(folder).replace(" ", "\\040"))  # as /proc/mounts has it
    injection.setup.append(f"for _ in $(seq 300); do grep -qF {mounted} /proc/mounts && break; sleep 0.1; done")


DRILL = Drill(
    name="stale-mount",
    title="a FUSE filesystem whose program does not reply",
    machine="cpu",
    trial=DrillTrial(checks={"host.inventory": {}}),
    expected=Expected(
        check="host.inventory",
        metric="hung_mounts",
        outcomes=(Outcome.FAIL,),
        cause="hung_mounts",
        place=rf"^{HOST}: .*/silent\b",
        command=r"/proc/mounts|findmnt|dmesg",
        action="restart-service",
    ),
    needs=Needs(root=True, programs=("unshare", "setpriv"), device_files=("/dev/fuse",)),
    prepare=mount_silent,
)
