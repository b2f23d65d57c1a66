"""The rank of a log line, by the prefixes of launchers and the names of logs."""

from __future__ import annotations

import pytest

from seatrial.diagnose.log_origin import line_rank


@pytest.mark.parametrize(
    ("line", "source", "rank"),
    [
        ("[rank3]: Traceback (most recent call last):", "x.log:1", 3),
        ("[rank1]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1785] x", "x.log:1", 1),
        ("[E ProcessGroupNCCL.cpp:475] [Rank 2] Watchdog caught", "x.log:1", 2),
        ("[INFO] [axolotl.load_model:593] [PID:6548] [RANK:0] x", "x.log:1", 0),
        ("[1,31]<stderr>:ip-172-32-36-209:8800:9549 [7] NCCL INFO x", "x.log:1", 31),
        (" 29: srun: x", "slurm-8.out:1", 29),
        ("x", "logs/rank_12.err:4", 12),
        ("x", "logs/none_abc/attempt_0/5/stderr.log:4", 5),
        ("x", "slurm-4711_3.out:4", 3),
        ("x", "slurm-4711.out:4", None),
        ("CUDA out of memory", "standard input:1", None),
        ("05:56:51 started", "x.log:1", None),
        ("x", "ranking.log:7", None),
    ],
)
def test_line_rank(line: str, source: str, rank: int | None) -> None:
    assert line_rank(line, source) == rank
