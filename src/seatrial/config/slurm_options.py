"""Options of sbatch and srun from the settings of a trial, for its jobs and for the probe jobs of checks. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping

from seatrial.config.schema import JobPlacement, Override

# Settings of JobPlacement that sbatch also reads from the environment: sbatch(1), INPUT ENVIRONMENT VARIABLES
_IN_ENVIRONMENT = ("partition", "account", "qos", "reservation", "constraint")
# One-letter option of sbatch → setting
_SHORT_OPTIONS = {"A": "account", "C": "constraint", "p": "partition", "q": "qos", "w": "nodelist", "x": "exclude"}


def placement_options(placement: JobPlacement) -> list[tuple[str, object]]:
    """Return the name and value of each option that selects account and nodes; the value None: not set."""
    return [(name, getattr(placement, name)) for name in JobPlacement.model_fields]


def srun_command(placement: JobPlacement, nodelist: str) -> str:
    """Return the start of an srun command line, for a shell, that runs on the nodes of ``nodelist``."""
    on_nodes = placement.model_copy(update={"nodelist": None, "exclude": None})
    return " ".join([f"srun --nodelist={nodelist}", *option_lines(placement_options(on_nodes))])


def option_lines(options: Iterable[tuple[str, object]], quote: Callable[[str], str] = shlex.quote) -> list[str]:
    """Return ``--name=value`` for each option with a value, quoted as in an #SBATCH line or a shell."""
    # sbatch parses quotes as a shell does, without expansion
    return [f"--{name}={quote(str(value))}" for name, value in options if value is not None]


def environment_overrides(environ: Mapping[str, str]) -> list[Override]:
    """Return (variable, key, value) for each SBATCH_* variable that overrides a setting, as it does in a job script."""
    variables = {f"SBATCH_{name.upper()}": f"slurm.{name}" for name in _IN_ENVIRONMENT}
    return [(f"${variable}", key, environ[variable]) for variable, key in variables.items() if environ.get(variable)]


def setting_of_option(option: str) -> str | None:
    """Return the setting of JobPlacement that an option sets: ``-pgpu`` or ``--partition=gpu`` → partition."""
    name = option.removeprefix("--").partition("=")[0].partition(" ")[0]
    if not option.startswith("--"):
        return _SHORT_OPTIONS.get(option[1:2]) if option.startswith("-") else None
    return name if name in JobPlacement.model_fields else None
