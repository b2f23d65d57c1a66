"""The command that writes a site's folder: init."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new directory on a filesystem that all nodes share.")
    ],
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of the site; by default from Slurm.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=0, help="GPUs per node; by default from Slurm. 0: CPU only, tiny training runs.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition; by default the one with GPUs.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account of the jobs.")] = None,
    venv: Annotated[
        Path | None, typer.Option(help="Virtual environment of the nodes; by default the one that runs seatrial.")
    ] = None,
) -> None:
    """Write a site's directory: environment, acceptance trial, job scripts, and a README with the steps to ACCEPTED."""
    from seatrial.launch import site_folder
    from seatrial.operate import site

    folder = Path(os.path.realpath(folder))
    site.require_new(folder)
    options = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "partition": partition,
        "account": account,
        "venv": None if venv is None else os.path.abspath(venv),
    }
    print("reading Slurm's partitions and nodes (a client without a controller may wait for a minute)", file=sys.stderr)
    described_site = site.describe(folder, options)
    files = site_folder.render(described_site)
    site.write(folder, files)
    for name in sorted(files):
        print(folder / name)
    for name, setting in described_site.settings().items():
        print(f"{name}: {'not set' if setting.value is None else setting.value} ({setting.note})")
    if described_site.slurm_error:
        print(f"Slurm could not be read: {described_site.slurm_error}", file=sys.stderr)
    print(f"Next: read {folder}/README.md")
