"""What a child may do, good and bad; see anew_driver."""

from __future__ import annotations

import json
import os
import sys
import time

task = json.loads(sys.argv[1])
rank = int(os.environ["RANK"])
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CONTRAST", "NCCL_GRAPH_MIXING_SUPPORT", "NCCL_DEBUG_FILE")
match task["deed"]:
    case "tell":
        print("a library's own words")
        print(json.dumps({name: os.environ[name] for name in NAMES if name in os.environ}))
    case "fail_on_one" if rank == 1:
        raise SystemExit("out of order")
    case "fail_or_tell" if os.environ["LOCAL_RANK"] == "1":
        raise SystemExit("out of order")
    case "fail_or_tell":
        time.sleep(2.0)
        print("null")
    case "fail_on_one" | "hang":
        time.sleep(600)
    case "say_nothing":
        pass
    case "babble":
        print("no JSON at all")
