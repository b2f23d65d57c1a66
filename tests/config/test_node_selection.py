"""--nodelist and --exclude: passed to Slurm, compared with the number of nodes, refused by other launchers."""

from __future__ import annotations

import pytest

from seatrial.config.layers import ResolvedTrial, resolve
from seatrial.model import UsageError
from tests.config.test_layers import SCHEMAS

NODELIST, EXCLUDE, NODES, SLURM = "slurm.nodelist", "slurm.exclude", "cluster.nodes", ("launcher", "slurm")


def resolved(*settings: tuple[str, object]) -> ResolvedTrial:
    overrides = [(f"--{key.rpartition('.')[2]}", key, value) for key, value in settings]
    return resolve("quick", overrides=overrides, environ={}, schemas=SCHEMAS)


def test_the_number_of_nodes_is_that_of_the_list() -> None:
    trial = resolved((NODELIST, "n[1-4,7]"), (EXCLUDE, "n[5-6]"))
    assert (trial.config.cluster.nodes, trial.origins[NODES]) == (5, "--nodelist")
    assert (trial.config.slurm.nodelist, trial.config.slurm.exclude) == ("n[1-4,7]", "n[5-6]")
    assert trial.config.uses_slurm


def test_an_equal_number_of_nodes_is_accepted() -> None:
    assert resolved(SLURM, (NODELIST, "n1"), (NODES, 1)).config.cluster.nodes == 1


@pytest.mark.parametrize("nodes", [2, 5])
def test_another_number_of_nodes_is_refused_with_both_numbers(nodes: int) -> None:
    with pytest.raises(UsageError, match=f"--nodelist: .* has 4 nodes .n1, n2, n3, n4.*--nodes is {nodes}"):
        resolved((NODELIST, "n[1-4]"), (NODES, nodes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([SLURM, (NODELIST, "n[1-")], "--nodelist: slurm.nodelist: .*is not a list of hosts"),
        ([SLURM, (EXCLUDE, "n2 n3")], "--exclude: slurm.exclude: .*is not a list of hosts"),
        ([SLURM, (NODELIST, "/home/nodes")], "is not a list of hosts"),
        ([SLURM, (NODELIST, "n[1-4]"), (EXCLUDE, "n[4-6]")], "both name n4"),
        ([(NODELIST, "n1")], "launcher auto does not choose nodes"),
        ([("launcher", "local"), (EXCLUDE, "n1")], "launcher local does not choose nodes"),
        ([("launcher", "torchrun"), (NODELIST, "n[1-2]")], "launcher torchrun does not choose nodes"),
        (
            [SLURM, ("slurm.extra", ["--comment=x", "--partition=gpu"])],
            "--extra: .* --partition=gpu: set slurm.part",
        ),
        ([SLURM, ("slurm.extra", ["-w n1"])], "-w n1: set slurm.nodelist"),
    ],
)
def test_invalid_selections(settings: list[tuple[str, object]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolved(*settings)
