"""What a child may do, good and bad; see anew_driver."""

from __future__ import annotations

import json
import os
import sys
import time

task = json.loads(sys.argv[1])
rank = int(os.environ["RANK"])
match task["deed"]:
    case "tell":
        print("a library's own words")
        print(json.dumps({name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CONTRAST")}))
    case "fail_on_one" if rank == 1:
        raise SystemExit("out of order")
    case "fail_on_one" | "hang":
        time.sleep(600)
    case "say_nothing":
        pass
    case "babble":
        print("no JSON at all")
