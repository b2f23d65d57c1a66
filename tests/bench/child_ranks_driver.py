"""``torchrun … anew_driver.py OUT``: has children do what anew_child knows, and one contrast; see OUT/rank<N>.json."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seatrial.bench import child_ranks
from seatrial.bench.group import close_group, disable_graph_mixing, enable_nccl_log, exit_without_teardown, open_group

LIMIT_S = 2.0
CONTRAST = {
    "groups": {"all": [[0, 1]]},
    "size": 2**16,
    "seconds": 0.1,
    "path_sizes": [2**10],
}

CHOICES = [
    {"operation": operation, "size": 1000, "dtype": "bfloat16", "buffers": "torch"}
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_receive")
]


def ask(module: str, out: Path, limit_s: float, split: Any = None, **task: Any) -> dict[str, Any]:
    started = time.monotonic()
    answers = child_ranks.run_child_ranks(
        module,
        task,
        {"CONTRAST": "this one"},
        device="cpu",
        local_rank=int(os.environ["LOCAL_RANK"]),
        file_prefix=out,
        limit_s=limit_s,
        groups=split,
    )
    return {"answers": [asdict(one) for one in answers], "seconds": time.monotonic() - started}


def main(out: Path) -> None:
    enable_nccl_log(out)
    disable_graph_mixing()
    open_group("cpu", timeout_s=60)
    records = {}
    for deed in ("tell", "fail_on_one", "hang", "say_nothing", "babble"):
        limit_s = LIMIT_S if deed == "hang" else 60
        records[deed] = ask("tests.bench.child_ranks_child", out / deed, limit_s, deed=deed)
    records["in_groups"] = ask("tests.bench.child_ranks_child", out / "in_groups", 60, [[1], [0]], deed="tell")
    records["one_alone"] = ask("tests.bench.child_ranks_child", out / "one_alone", 60, [[1]], deed="tell")
    # the other group is not its peer: it tells on, though slowly
    records["one_group_fails"] = ask(
        "tests.bench.child_ranks_child", out / "fails", 60, [[1], [0]], deed="fail_or_tell"
    )
    records["contrast"] = ask("seatrial.bench.nccl_settings", out / "contrast", 60, **CONTRAST)
    records["choices"] = ask("seatrial.bench.algorithms", out / "choices", 60, asks=CHOICES)
    close_group()
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(records))
    exit_without_teardown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
