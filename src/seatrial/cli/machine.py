"""Commands about this machine, the checks and GPU models: discover, show checks, show skus."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from seatrial.cli.options import AsJson
from seatrial.cli.output import print_json, stdout
from seatrial.model import UsageError


def discover(as_json: AsJson = False) -> None:
    """Print the hardware and software of this machine. Only reads; causes no load."""
    from seatrial.pipeline.this_host import discover as discover_machine
    from seatrial.report.inventory import print_inventory

    facts = discover_machine().facts
    if as_json:
        print_json(facts)
    else:
        print_inventory(facts, stdout())


def checks(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Checks whose rules are shown, or patterns; default: a list of all."),
    ] = None,
    power: Annotated[
        bool,
        typer.Option(
            "--power",
            help="Statistical power: show how many samples each limit needs to reject a slowdown.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List all checks, one per line; with NAME, show scope, requirements and rules of these checks."""
    from seatrial.checks import catalog
    from seatrial.config.expect import matching
    from seatrial.report.inventory import checks_as_json, print_check_list, print_checks, print_power

    selected_names = matching(names or ["*"], catalog(), "check", "; list all checks: seatrial show checks")
    selected = {name: catalog()[name] for name in selected_names}
    if as_json:
        print_json(checks_as_json(selected))
    elif power:
        for check in selected.values():
            print_power(check, stdout())
    elif names:
        print_checks(selected, stdout())
    else:
        print_check_list(selected, stdout())


def skus(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Name of a GPU model, or part of it.")] = "",
    as_json: AsJson = False,
) -> None:
    """List GPU models, each with its number of reference values; with MODEL, show the values and their sources."""
    from seatrial.checks import catalog
    from seatrial.hardware import references
    from seatrial.report import inventory
    from seatrial.report.reference_metrics import reference_metrics

    all_metrics, models = reference_metrics(catalog()), references.skus()
    for pattern in (rf"\b{re.escape(model)}\b", re.escape(model)):  # H200 is not a part of GH200, if both are known
        contains = re.compile(pattern, re.IGNORECASE).search
        if selected := [sku for sku in models if any(map(contains, (sku.name, *sku.nvml_names)))]:
            break
    if not selected:
        raise UsageError(f"no GPU model matches {model!r}; known: {', '.join(sku.name for sku in models)}")
    if as_json:
        print_json(inventory.models_as_json(selected, all_metrics))
    elif not model:
        inventory.print_models(selected, all_metrics, stdout())
    else:
        for sku in selected:
            inventory.print_model(sku, all_metrics, stdout())


SHOW = (checks, skus)
