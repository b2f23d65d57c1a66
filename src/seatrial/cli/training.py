"""Commands that train: train run, preprocess, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from seatrial.cli.options import EXIT_ACCEPTED, EXIT_REJECTED, AsJson
from seatrial.cli.output import print_json
from seatrial.model import UsageError

SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the config; may be repeated.")
]


def run(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A shipped training config, such as throughput, or a .yaml file.")],
    set_: SetOption = None,
    run_args: Annotated[
        Path | None, typer.Option("--run-args", "--run_args", help="Set the keys in a run_args.json.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output directory; by default a new one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model in one process, or as one rank under torchrun.

    Flags with the names of common training scripts, such as --max_steps 10 --use_lora, set keys of the config too. The
    config comes before the flags. --set has priority over flags, flags over --run-args.
    """
    from seatrial.train import command, script_flags

    if str(config).startswith("--"):
        raise UsageError(f"{config}: the config comes before its arguments: seatrial train run CONFIG {config} VALUE")
    overrides = script_flags.overrides_from_run_args(run_args) if run_args else []
    overrides += [*script_flags.overrides_from_flags(context.args), *(set_ or ())]
    command.train(config, overrides, out, as_json)
    # imported after command.train has run: without torch, command.train reports a clearer error than this import
    from seatrial.bench.group import exit_without_teardown

    exit_without_teardown()


def preprocess(
    config: Annotated[Path, typer.Argument(help="A shipped training config with rows, or a .yaml file.")],
    set_: SetOption = None,
    as_json: AsJson = False,
) -> None:
    """Convert rows to tokens before training, without a GPU; runs with the same config and data use these tokens."""
    from seatrial.train import command, train_config

    result = command.preprocess(train_config.load(config, set_ or ()))
    if as_json:
        print_json(result or {"folder": None})
    elif result is None:
        print("nothing to prepare: data.path is not set, and sequences are generated from the seed")
    else:
        text = "found (sizes and SHA-256 compared)" if result["existed"] else "written"
        print(f"{text} in {result['seconds']:g} s: {result['folder']}")


def evaluate(
    config: Annotated[
        Path, typer.Argument(help="A shipped training config, such as function-calling-qwen2-7b, or a .yaml file.")
    ],
    out: Annotated[Path, typer.Option(help="Output directory of the training run (its --out).")],
    set_: SetOption = None,
    as_json: AsJson = False,
) -> None:
    """Compare function-calling scores before and after training. Exit code 1: no significant improvement."""
    from seatrial.train import hf, train_config
    from seatrial.train.function_calling import score

    evaluation = hf.evaluate(train_config.load(config, set_ or ()), out)
    if as_json:
        print_json(evaluation)
    else:
        print(*score.table(evaluation), f"Results: {out}/evaluation.json", sep="\n")
    raise typer.Exit(EXIT_ACCEPTED if evaluation["sign_test"]["passed"] else EXIT_REJECTED)


TRAIN = (run, preprocess, evaluate)
