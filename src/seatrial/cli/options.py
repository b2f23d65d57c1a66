"""Options and exit codes that several commands share."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from seatrial.model import DecisionValue

EXIT_CODES = {DecisionValue.ACCEPTED: 0, DecisionValue.REJECTED: 1, DecisionValue.INCOMPLETE: 3}
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE  # as a shell reports a program that the signal ended

Names = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME,…", help="Checks, or patterns such as 'train.*'; may be given again."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
RunPath = Annotated[Path, typer.Argument(help="A run directory, or a trial.json.")]
TrialName = Annotated[str, typer.Argument(help="quick, acceptance, burn-in, training, or a YAML file.")]
NodesOption = Annotated[int | None, typer.Option(help="Nodes that were promised.")]
GpusOption = Annotated[int | None, typer.Option(help="GPUs a node was promised; 0: use none.")]
LauncherOption = Annotated[str | None, typer.Option(help="auto, local or slurm.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the trial.")]


def overrides_of(
    launcher: str | None, nodes: int | None, gpus_per_node: int | None, assignments: list[str] | None
) -> list[tuple[str, str, Any]]:
    from seatrial.config.layers import parse_assignment

    flags = [
        ("--launcher", "launcher", launcher),
        ("--nodes", "cluster.nodes", nodes),
        ("--gpus-per-node", "cluster.gpus_per_node", gpus_per_node),
    ]
    given = [(flag, key, value) for flag, key, value in flags if value is not None]
    return [("--set", *parse_assignment(text)) for text in assignments or ()] + given


def check_names(given: list[str] | None) -> tuple[str, ...]:
    return tuple(name.strip() for names in given or () for name in names.split(","))
