"""Exit codes and common options."""

from __future__ import annotations

import pytest

from seatrial.cli.options import EXIT_CODES, EXIT_INTERRUPTED, EXIT_USAGE, check_names, collect_overrides
from seatrial.model import DecisionValue


def test_exit_codes() -> None:
    assert EXIT_CODES == {DecisionValue.ACCEPTED: 0, DecisionValue.REJECTED: 1, DecisionValue.INCOMPLETE: 3}
    assert (EXIT_USAGE, EXIT_INTERRUPTED) == (2, 130)


@pytest.mark.parametrize(
    ("values", "names"),
    [(None, ()), (["a"], ("a",)), (["a, b", "train.*"], ("a", "b", "train.*"))],
)
def test_check_names_are_separated_by_commas_or_options(values: list[str] | None, names: tuple[str, ...]) -> None:
    assert check_names(values) == names


def test_flags_come_after_set_and_each_value_has_its_origin() -> None:
    overrides = collect_overrides(
        ["cluster.nodes=4", "limits.heartbeat_timeout_s=12"], launcher="local", nodes=2, gpus_per_node=0
    )
    assert overrides == [
        ("--set", "cluster.nodes", 4),
        ("--set", "limits.heartbeat_timeout_s", 12),
        ("--launcher", "launcher", "local"),
        ("--nodes", "cluster.nodes", 2),
        ("--gpus-per-node", "cluster.gpus_per_node", 0),
    ]
    assert collect_overrides(None) == []


def test_choice_of_nodes_and_topology() -> None:
    overrides = collect_overrides(None, nodelist="n[1-4]", exclude="n9", topology="racks.yaml")
    assert overrides == [
        ("--nodelist", "slurm.nodelist", "n[1-4]"),
        ("--exclude", "slurm.exclude", "n9"),
        ("--topology", "cluster.topology", "racks.yaml"),
    ]
