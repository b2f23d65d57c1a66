"""Other programs use all CPUs."""

from __future__ import annotations

import os
import time

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.cpu._host import HOST
from seatrial.drill.injection import Injection

PROGRAM = "cpu-hog"
LIMIT = "<= 25 %"  # host.load has this limit for GPU nodes; the trial sets it for a node without GPUs
_LOOPS_START_S = 1.0  # seconds until all loops run


def use_all_cpus(injection: Injection) -> None:
    """Start two busy loops per CPU before the trial."""
    script = injection.folder / PROGRAM
    script.write_text("#!/bin/sh\nwhile :; do :; done\n", encoding="utf-8")
    script.chmod(0o700)
    for number in range(2 * len(os.sched_getaffinity(0))):
        injection.start_process([str(script)], f"{PROGRAM}-{number}")
    time.sleep(_LOOPS_START_S)


DRILL = Drill(
    name="cpu-hog",
    title=f"two busy loops per CPU, in processes named {PROGRAM}",
    machine="cpu",
    trial=DrillTrial(
        checks={"host.load": {}},
        settings={"checks": {"host.load": {"expect": {"cpu_busy": LIMIT}}}},
    ),
    expected=Expected(
        check="host.load",
        metric="cpu_busy",
        cause="busy_cpus",
        place=rf"^{HOST}: .*{PROGRAM}",
        command=r"top |ps ",
        action="fix-environment",
    ),
    prepare=use_all_cpus,
)
