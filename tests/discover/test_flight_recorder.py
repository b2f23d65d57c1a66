"""Reading of dumps: little is kept, and no content is a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.diagnose.flight_recorder import recorder_findings
from seatrial.discover.flight_recorder import read_dump
from tests.discover.recorder_dumps import entry, hangs


def test_rank_that_is_hundreds_of_collectives_ahead_is_kept_small(tmp_path: Path) -> None:
    """The root of a broadcast goes on while the others wait in it."""
    ahead = [entry("broadcast", seq, "completed" if seq < 9 else "scheduled") for seq in range(1, 2000)]
    (hang,) = hangs(tmp_path, ahead, [*ahead[:7], entry("broadcast", 8, "started")], groups={"0": "[0, 1, 2]"})
    assert (hang.seq, tuple(hang.waiting), hang.without_dump) == (8, (1,), (2,))
    assert len(read_dump(tmp_path / "nccl_trace_rank_0").groups["0 default_pg"].collectives) < 50


@pytest.mark.parametrize("field", list(entry("all_reduce", 1, "started")))
def test_field_of_any_type_is_no_crash(field: str, tmp_path: Path) -> None:
    values: tuple[Any, ...] = (None, "x" * 1000, 2**70, [[[]]], {"a": 1}, True, [None], (1, 2), 1.5)
    for value in values:
        hanging = hangs(tmp_path, [{**entry("all_reduce", 1, "started"), field: value}])
        recorder_findings(tmp_path.iterdir(), [])
        assert len(hanging) <= 1
