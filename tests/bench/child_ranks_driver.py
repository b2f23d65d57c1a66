"""Runs child ranks with several tasks; each rank writes OUT/rank<N>.json."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seatrial.bench import child_ranks, spare_children
from seatrial.bench.group import (
    close_group,
    disable_graph_mixing,
    enable_nccl_log,
    open_group,
)

LIMIT_S = 2.0
CHILD = "tests.bench.child_ranks_child"
NCCL_SETTINGS_TASK = {
    "groups": {"all_ranks": [[0, 1]]},
    "size": 2**16,
    "seconds": 0.1,
    "untimed_sizes": [2**10],
}

ALGORITHM_REQUESTS = [
    {"operation": operation, "size": 1000, "dtype": "bfloat16", "buffers": "torch"}
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_receive")
]


def run(
    module: str, out: Path, limit_s: float, child_groups: Any = None, *, spare_gpus: Any = None, **task: Any
) -> dict[str, Any]:
    started = time.monotonic()
    results = child_ranks.run_child_ranks(
        module,
        task,
        {"NCCL_EXTRA": "of the child"},
        device="cpu",
        local_rank=int(os.environ["LOCAL_RANK"]),
        file_prefix=out,
        limit_s=limit_s,
        groups=child_groups,
        spare_gpus=spare_gpus,
    )
    return {"results": [asdict(result) for result in results], "seconds": time.monotonic() - started}


def started_together(out: Path) -> dict[str, Any]:
    """Two starts of children, with the times at which they opened their group and the time between; an unused start."""
    common: dict[str, Any] = {"device": "cpu", "local_rank": int(os.environ["LOCAL_RANK"]), "limit_s": 60}
    tasks = ({"behaviour": "open_group"}, {"behaviour": "algorithms", "requests": ALGORITHM_REQUESTS})
    with (
        child_ranks.start_child_ranks(CHILD, tasks[0], {}, file_prefix=out / "first", **common) as first,
        child_ranks.start_child_ranks(CHILD, tasks[1], {}, file_prefix=out / "second", **common) as second,
        child_ranks.start_child_ranks(CHILD, {"behaviour": "hang"}, {}, file_prefix=out / "unused", **common) as unused,
    ):
        for children in (first, second):
            children.wait_until_ready()
        ready = time.time()
        opened = [result.value for result in first.results()]
        between = time.time()
        results = second.results()
    assert unused.child is not None
    return {
        "ready": ready,
        "first": opened,
        "between": between,
        "second": [asdict(result) for result in results],
        "unused_ended": unused.child.poll(),
    }


def run_in_spare_child(out: Path) -> dict[str, Any]:
    """A task in the child that waits for one, then another task, for which there is none: it sees another GPU."""
    os.environ["NCCL_EXTRA_2"] = "set after the start of the child"
    spare = spare_children._waiting[1].child.process.pid
    first = run(CHILD, out / "in_spare_child", 60, spare_gpus="all", behaviour="print_process")
    second = run(CHILD, out / "in_new_child", 60, spare_gpus="all", behaviour="print_process")
    return {"spare": spare, **{name: record["results"] for name, record in (("first", first), ("second", second))}}


def main(out: Path) -> None:
    spare_children.start(["own", "all"], out, "cpu")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    enable_nccl_log(out)
    disable_graph_mixing()
    open_group("cpu", timeout_s=60)
    spare_children.wait_until_ready()
    spare = run_in_spare_child(out)
    records = {}
    for behaviour in ("succeed", "fail_on_rank1", "hang", "print_nothing", "print_text"):
        limit_s = LIMIT_S if behaviour == "hang" else 60
        records[behaviour] = run(CHILD, out / behaviour, limit_s, behaviour=behaviour)
    records["two_groups"] = run(CHILD, out / "two_groups", 60, [[1], [0]], behaviour="succeed")
    records["one_group"] = run(CHILD, out / "one_group", 60, [[1]], behaviour="succeed")
    # The child of the other group ends 2 s later, and is not affected by the failure
    records["one_group_fails"] = run(CHILD, out / "fails", 60, [[1], [0]], behaviour="fail_or_succeed")
    # In the other waiting child, which saves an import of torch
    records["nccl_settings"] = run(
        "seatrial.bench.nccl_settings", out / "nccl_settings", 60, spare_gpus="own", **NCCL_SETTINGS_TASK
    )
    together = started_together(out)
    close_group()
    (out / f"spare{os.environ['RANK']}.json").write_text(json.dumps(spare))
    (out / f"together{os.environ['RANK']}.json").write_text(json.dumps(together))
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(records))
