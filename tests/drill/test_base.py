"""A drill holds only if it ran and every part holds."""

from __future__ import annotations

import pytest

from seatrial.drill.base import DrillResult

ALL = dict.fromkeys(("seen", "located", "explained", "command_right", "action_right"), True)


@pytest.mark.parametrize("missing", ALL)
def test_one_missing_part_is_a_miss(missing: str) -> None:
    result = DrillResult(name="drill", title="", machine="cpu", **ALL)
    assert result.holds
    assert not result.model_copy(update={missing: False}).holds
    assert not result.model_copy(update={"could_not_run": "needs 2 GPUs"}).holds
