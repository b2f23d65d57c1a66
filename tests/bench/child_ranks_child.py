"""A child process that succeeds or fails in different ways; see child_ranks_driver."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

task = json.loads(sys.argv[1])
rank = int(os.environ["RANK"])
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NCCL_EXTRA", "NCCL_GRAPH_MIXING_SUPPORT", "NCCL_DEBUG_FILE")
match task["behaviour"]:
    case "succeed":
        print("output of a library")
        print(json.dumps({name: os.environ[name] for name in NAMES if name in os.environ}))
    case "fail_on_rank1" if rank == 1:
        raise SystemExit("out of order")
    case "fail_or_succeed" if os.environ["LOCAL_RANK"] == "1":
        raise SystemExit("out of order")
    case "fail_or_succeed":
        time.sleep(2.0)
        print("null")
    case "fail_on_rank1" | "hang":
        time.sleep(600)
    case "open_group":
        from seatrial.bench import child_ranks

        # As every child with a process group: an end by interpreter teardown may be an abort of torch's threads
        child_ranks.child_rank_main(lambda _task, _device: time.time())
    case "algorithms":
        from seatrial.bench import algorithms, child_ranks

        def run_algorithms(task: Mapping[str, Any], device: str) -> dict[str, Any]:
            return {"opened": time.time(), "log_ranges": algorithms.run(task, device)["log_ranges"]}

        child_ranks.child_rank_main(run_algorithms)
    case "print_process":
        names = (*NAMES, "NCCL_EXTRA_2")
        values = {name: os.environ[name] for name in names if name in os.environ}
        print(json.dumps({"pid": os.getpid(), "torch": "torch" in sys.modules, **values}))
    case "print_nothing":
        pass
    case "print_text":
        print("no JSON at all")
