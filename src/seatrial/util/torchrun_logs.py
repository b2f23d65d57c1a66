"""The rank that wrote a log of torchrun, from the path of the log in the run directory."""

from __future__ import annotations

import re
from pathlib import Path


def rank_of_log(log: Path, ranks_per_node: int) -> int:
    """The global rank of ``logs/nodeN/RUN_ID/attempt_0/LOCAL_RANK/stderr.log``; on one node ``nodeN`` may be missing.

    Raises ValueError for another path.
    """
    node = re.fullmatch(r"node(\d+)", log.parents[3].name if len(log.parents) > 3 else "")
    return int(node[1] if node else 0) * ranks_per_node + int(log.parent.name)
