"""Texts of changes of a node's state."""

from __future__ import annotations

from seatrial.model import DecisionValue
from seatrial.operate.node_changes import NodeChange, reason_text


def test_a_reason_is_one_short_line_that_starts_with_seatrial() -> None:
    text = reason_text("run-1", DecisionValue.REJECTED, "NIC \"mlx5_0\"\nis\x1b[31m slow: 'x' \\ " + "y" * 1000)
    assert text.startswith("seatrial run-1: REJECTED: NIC mlx5_0 is [31m slow: x y")
    assert len(text) < 200
    assert text.isprintable()
    assert reason_text("run-1", DecisionValue.ACCEPTED) == "seatrial run-1: ACCEPTED"


def test_a_change_is_shown_as_a_command_that_a_shell_takes() -> None:
    change = NodeChange(nodes=("n1",), action="drain", command=("scontrol", "Reason=a b"), outcome="failed", detail="x")
    assert str(change) == "failed: drain: n1 (x): scontrol 'Reason=a b'"
