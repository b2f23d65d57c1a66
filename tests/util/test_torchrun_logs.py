"""The rank of a log that torchrun writes, by the folders of its path."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.util.torchrun_logs import rank_of_log


@pytest.mark.parametrize(
    ("log", "rank"),
    [
        ("logs/none_abc/attempt_0/3/stderr.log", 3),
        ("logs/node1/none_abc/attempt_0/3/error.json", 11),
        ("/data/node7/run/logs/none_abc/attempt_0/3/stderr.log", 3),  # a folder above is no node of the job
    ],
)
def test_rank_of_log(log: str, rank: int) -> None:
    assert rank_of_log(Path(log), 8) == rank


def test_other_paths_have_no_rank() -> None:
    with pytest.raises(ValueError, match="attempt1"):
        rank_of_log(Path("jobs/ranks/attempt1/stderr.log"), 8)
