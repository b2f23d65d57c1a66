"""Runs host.process in this process: ``process_driver.py ROOT FOLDER`` prints the measurement as JSON."""

import sys
from dataclasses import replace
from pathlib import Path

from seatrial.checks.check import Context
from seatrial.checks.host.process import CHECK
from seatrial.worker import measure

if __name__ == "__main__":
    root, folder = map(Path, sys.argv[1:])
    context = Context(
        node="n0",
        rank=0,
        world_size=1,
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=folder,
        run_dir=folder,
    )
    print(measure(CHECK, replace(context, root=root), {}).model_dump_json())
