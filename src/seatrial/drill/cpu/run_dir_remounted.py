"""The filesystem of the run directory becomes read-only while ranks train, as ext4 and XFS do after an I/O error."""

from __future__ import annotations

import shlex

from seatrial.drill.base import Drill, DrillTrial, Expected, Needs
from seatrial.drill.cpu._ranks import TRAINING
from seatrial.drill.injection import Injection

FOLDER = "remounted"


def mount(injection: Injection) -> None:
    """Mount a filesystem at the parent folder of the run directory, for the trial only."""
    folder = injection.folder / FOLDER
    folder.mkdir()
    injection.run_dir = folder / "run"
    injection.new_mounts = True
    injection.setup.append(f"mount -t tmpfs -o size=64m tmpfs {shlex.quote(str(folder))}")


def remount(injection: Injection) -> None:
    """Make the filesystem read-only when rank 0 has started a check; only the trial's namespace shows its files."""
    journal = injection.run_dir / "jobs" / "ranks" / "attempt1" / "rank0.jsonl"
    injection.wait_for(
        lambda: bool(injection.run_in_trial_mounts(f"test -s {shlex.quote(str(journal))} && echo yes || true")),
        "rank 0 is in a check",
    )
    injection.mark_injected()
    # a new mount of the same folder: a remount of the first one fails while files are open for writing
    folder = shlex.quote(str(injection.folder / FOLDER))
    injection.run_in_trial_mounts(f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}")


DRILL = Drill(
    name="run-dir-remounted",
    title="the filesystem of the run directory becomes read-only while ranks train",
    machine="cpu",
    trial=DrillTrial(checks=TRAINING),
    expected=Expected(
        refusal=r"some reports could not be written",
        cause="Read-only file system",
        place=rf"/{FOLDER}/run\b",
        command=rf"findmnt -T [^;]+/{FOLDER}/run",
    ),
    needs=Needs(root=True, programs=("unshare", "nsenter", "mount")),
    prepare=mount,
    act=remount,
)
