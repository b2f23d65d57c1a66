"""The folder of the run directory is on a filesystem that is mounted read-only."""

from __future__ import annotations

import shlex

from seatrial.drill.base import Drill, DrillTrial, Expected, Needs
from seatrial.drill.injection import Injection


def mount_read_only(injection: Injection) -> None:
    """Mount an empty read-only filesystem at the parent folder of the run directory, for the trial only."""
    folder = injection.folder / "read-only"
    folder.mkdir()
    injection.run_dir = folder / "run"
    injection.new_mounts = True
    injection.setup.append(f"mount -t tmpfs -o ro tmpfs {shlex.quote(str(folder))}")


DRILL = Drill(
    name="run-dir-read-only",
    title="the run directory is on a read-only filesystem",
    machine="cpu",
    trial=DrillTrial(checks={"host.inventory": {}}),
    expected=Expected(
        refusal=r"cannot write to --out",
        cause="Read-only file system",
        place=r"/read-only/run\b",
        command=r"findmnt -T [^;]*/read-only",
    ),
    needs=Needs(root=True, programs=("unshare", "mount")),
    prepare=mount_read_only,
)
