"""``torchrun … training_driver.py CHECK OUT``: measures a check that starts trainings, on a CPU; OUT/rank<N>.json."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from seatrial.bench.group import close_group, end_process, open_group
from seatrial.checks import catalog
from seatrial.checks.base import Place
from seatrial.worker import measure


def main(check: str, out: Path) -> None:
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    open_group("cpu", timeout_s=300)
    place = Place(
        node="node0",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device="cpu",
        promised_gpus=None,
        out=out,
        run_dir=out,
    )
    found = measure(catalog()[check], place, {})
    close_group()
    (out / f"rank{rank}.json").write_text(found.model_dump_json())
    end_process()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
