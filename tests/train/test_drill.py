from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.model import SeatrialError
from seatrial.train import drill, failure, loop, settings


def test_a_rank_that_ended_with_another_still_says_what_it_had_seen_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: Any) -> None:
        raise failure.EndedWithAnother("rank 0 ended with rank 1, which says why") from SeatrialError("a file is bad")

    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(drill, "_go_on", lambda: None)  # of a group
    act = drill.Act(settings=settings.load("tiny/parity"), out=tmp_path, refused=True)
    assert drill.carry_out(act) == "a file is bad"
