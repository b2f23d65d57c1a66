from __future__ import annotations

import pytest

from seatrial.config.schema import JobPlacement
from seatrial.config.slurm_options import (
    environment_overrides,
    option_lines,
    placement_options,
    setting_of_option,
    srun_command,
)

PLACEMENT = JobPlacement(partition="gpu", account="ops", constraint="h100&ib", nodelist="n[1-3]", exclude="n4")


def test_every_setting_of_a_placement_is_an_option() -> None:
    every_setting = JobPlacement(**dict.fromkeys(JobPlacement.model_fields, "x"))
    assert option_lines(placement_options(every_setting)) == [
        f"--{name}=x" for name in ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude")
    ]
    assert option_lines(placement_options(JobPlacement())) == []


def test_values_are_quoted_for_a_shell_but_not_for_an_argument_list() -> None:
    assert "--constraint='h100&ib'" in option_lines(placement_options(PLACEMENT))
    assert "--constraint=h100&ib" in option_lines(placement_options(PLACEMENT), quote=str)


def test_srun_command_replaces_the_node_lists() -> None:
    command = srun_command(PLACEMENT, "n2")
    assert command == "srun --nodelist=n2 --partition=gpu --account=ops --constraint='h100&ib'"


def test_environment_of_sbatch() -> None:
    environ = {"SBATCH_PARTITION": "gpu", "SBATCH_QOS": "", "SLURM_PARTITION": "cpu", "SBATCH_TIMELIMIT": "5"}
    assert environment_overrides(environ) == [("$SBATCH_PARTITION", "slurm.partition", "gpu")]


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--partition=gpu", "partition"),
        ("--nodelist n1", "nodelist"),
        ("-pgpu", "partition"),
        ("-A ops", "account"),
        ("--comment=-p", None),
        ("--gpus-per-node=8", None),
        ("-N 2", None),
        ("gpu", None),
    ],
)
def test_setting_of_an_option(option: str, setting: str | None) -> None:
    assert setting_of_option(option) == setting
