"""Options and exit codes that several commands share."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial.model import DecisionValue, Outcome, UsageError

if TYPE_CHECKING:
    from seatrial.config.schema import Override

DRAIN_SHARE, DRAIN_WINDOW_MIN = 0.1, 60.0  # defaults; drains of `hook` and `readmit` count in the same record

EXIT_ACCEPTED, EXIT_REJECTED, EXIT_INCOMPLETE = 0, 1, 3
EXIT_CODES = {
    DecisionValue.ACCEPTED: EXIT_ACCEPTED,
    DecisionValue.REJECTED: EXIT_REJECTED,
    DecisionValue.INCOMPLETE: EXIT_INCOMPLETE,
}
# Exit codes of `judge` for the output of a benchmark, which has no decision
EXIT_CODES_OF_OUTCOMES = {Outcome.PASS: 0, Outcome.WARN: 0, Outcome.FAIL: 1, Outcome.UNJUDGED: 3}
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
EXIT_NOTHING_KNOWN = 4  # explain found no known failure
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE  # the exit status that a shell reports for SIGPIPE

OnlyOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME,…", help="Run only these checks, or patterns such as 'train.*'; may be repeated."),
]
SkipOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME,…", help="Leave out these checks, or patterns such as 'train.*'; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
VerboseOption = Annotated[
    bool, typer.Option("-v", "--verbose", help="Print all problems with evidence and fixes, and all checks.")
]
BaselineOption = Annotated[Path | None, typer.Option(help="Reference values from `seatrial baseline learn`.")]
TrialName = Annotated[str, typer.Argument(help="quick, acceptance, burn-in, training, readmit, hook or a YAML file.")]
NodesOption = Annotated[int | None, typer.Option(help="Expected number of nodes.")]
NodelistOption = Annotated[
    str | None, typer.Option(metavar="HOSTS", help="With Slurm: run on exactly these nodes, such as n[1-4,7].")
]
ExcludeOption = Annotated[
    str | None, typer.Option(metavar="HOSTS", help="With Slurm: do not run on these nodes, such as n[2,5].")
]
TopologyOption = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Racks and switches of the nodes; by default those that Slurm knows."),
]
MinNodesOption = Annotated[
    int | None,
    typer.Option(help="With Slurm: run on at least N nodes if nodes are missing; the decision is then never ACCEPTED."),
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="MINUTES",
        help="Leave out checks that do not fit into this time; the decision is then never ACCEPTED.",
    ),
]
BudgetOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="Time under load of burn-in, such as 8m, 30m or 24h.")
]
NoLocalizeOption = Annotated[
    bool,
    typer.Option("--no-localize", help="Do not search for slow nodes if a multi-node metric violates a threshold."),
]
GroupOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Let this group read the results; files with the trial's secrets stay readable by you only.",
    ),
]
GpusOption = Annotated[int | None, typer.Option(help="Expected GPUs per node; 0: CPU only.")]
LauncherOption = Annotated[str | None, typer.Option(help="auto, local, slurm, kubernetes or torchrun.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the trial; may be repeated.")
]
DrainShareOption = Annotated[
    float,
    typer.Option(
        "--drain-share",
        min=0,
        max=1,
        help="At most this share of the nodes is taken out of service; one node is always allowed.",
    ),
]
DrainWindowOption = Annotated[
    float,
    typer.Option(
        "--drain-window", metavar="MINUTES", min=1, help="Only drains of the last MINUTES count towards --drain-share."
    ),
]


# Parameter of a command → key of the trial that its option sets, if the parameter is not None
_TRIAL_KEYS = {
    "launcher": "launcher",
    "nodes": "cluster.nodes",
    "min_nodes": "cluster.min_nodes",
    "gpus_per_node": "cluster.gpus_per_node",
    "nodelist": "slurm.nodelist",
    "exclude": "slurm.exclude",
    "topology": "cluster.topology",
    "no_localize": "localize",
    "group": "group",
    "budget": "budget",
}


def collect_overrides(assignments: list[str] | None, **parameters: str | int | None) -> list[Override]:
    """Return (option, key of the trial, value) of each setting in rising priority: --set, then the other options."""
    from seatrial.config.layers import parse_assignment

    options = {f"--{name.replace('_', '-')}": (_TRIAL_KEYS[name], value) for name, value in parameters.items()}
    given_options = [(option, key, value) for option, (key, value) in options.items() if value is not None]
    return [("--set", *parse_assignment(text)) for text in assignments or ()] + given_options


def check_names(values: list[str] | None) -> tuple[str, ...]:
    """Return the names in the values of --only or --skip. Each value may be a list separated by commas."""
    return tuple(name.strip() for value in values or () for name in value.split(","))


def create_out_folder(out: Path) -> None:
    """Create the directory ``out`` of the option --out. Raises UsageError if it is not empty or cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"--out {out} is not empty: use another directory")
    except OSError as error:
        raise UsageError(f"cannot write to --out {out}: {error.strerror or error}") from error
