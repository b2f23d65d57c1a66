"""The filesystem of a check's artifacts is full while a checkpoint is saved."""

from __future__ import annotations

import shlex

from seatrial.drill.base import Drill, DrillTrial, Expected, Needs
from seatrial.drill.injection import Injection

CHECK = "train.checkpoint"
SIZE = "1m"  # enough for the prepared data and logs, too little for a checkpoint of 1.4 MB


def mount_small_filesystem(injection: Injection) -> None:
    """Mount a small filesystem at the artifacts of the check, for the trial only, before the training starts."""
    folder = injection.run_dir / "artifacts" / CHECK
    injection.wait_for(lambda: (injection.run_dir / "run.json").exists(), "the run directory exists")
    folder.mkdir(parents=True, exist_ok=True)
    injection.run_in_trial_mounts(f"mount -t tmpfs -o size={SIZE} tmpfs {shlex.quote(str(folder))}")


def use_new_mounts(injection: Injection) -> None:
    """Give the trial its own mount namespace."""
    injection.new_mounts = True


DRILL = Drill(
    name="disk-full",
    title=f"the filesystem of the checkpoints has {SIZE.upper()}B, less than one checkpoint",
    machine="cpu",
    trial=DrillTrial(checks={CHECK: {}}),
    expected=Expected(
        check=CHECK,
        cause="host.disk_full",
        place=rf"/artifacts/{CHECK}\b",
        command=r"df -h",
        action="fix-environment",
    ),
    needs=Needs(root=True, programs=("unshare", "nsenter", "mount")),
    prepare=use_new_mounts,
    act=mount_small_filesystem,
)
