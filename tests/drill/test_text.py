"""The table of drills on the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from seatrial.drill.base import DrillResult
from seatrial.drill.text import print_results, totals

HOLDS = DrillResult(
    name="rank-killed",
    title="",
    machine="cpu",
    seen=True,
    located=True,
    explained=True,
    command_right=True,
    action_right=True,
    seconds=9.4,
)
MISSED = HOLDS.model_copy(update={"name": "cpu-hog", "explained": False, "problems": ("not explained: [red]",)})
NOT_RUN = DrillResult(name="missing-gpu", title="", machine="gpu", could_not_run="needs 2 GPUs")


def test_table_has_each_part_of_each_drill() -> None:
    text = io.StringIO()
    print_results([HOLDS, MISSED, NOT_RUN], Console(file=text, width=100))
    lines = text.getvalue().splitlines()
    assert lines[1].split() == ["rank-killed", "yes", "yes", "yes", "yes", "yes", "9.4"]
    assert lines[2].split()[:4] == ["cpu-hog", "yes", "yes", "NO"]
    assert lines[3].split() == ["missing-gpu", *"------"]
    assert "cpu-hog: not explained: [red]" in lines
    assert "missing-gpu: could not run here: needs 2 GPUs" in lines


def test_totals_do_not_count_drills_that_could_not_run() -> None:
    without_action = HOLDS.model_copy(update={"name": "refused", "action_right": None})
    assert totals([HOLDS, MISSED, without_action, NOT_RUN]) == (
        "3 drills ran: 3 of 3 seen, 3 of 3 located, 2 of 3 explained, 3 of 3 first command, 2 of 2 action; "
        "1 drill could not run here"
    )
