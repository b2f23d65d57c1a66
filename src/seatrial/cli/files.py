"""The command that rewrites files of earlier versions: migrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from seatrial.model import UsageError


def migrate(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Trials, training configs, baselines (YAML) or trial.json.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the changes; write nothing.")] = False,
) -> None:
    """Convert files of earlier versions to the current names and units. The old content is kept as FILE.bak.

    If a file cannot be converted, none is changed.
    """
    for file, (old, new, changes) in {file: _migrated(file) for file in files}.items():
        for change in changes:
            print(f"{file}: {change}")
        if not changes:
            print(f"{file}: no old names")
        elif not dry_run:
            _replace(file, old, new, len(changes))


def _migrated(file: Path) -> tuple[str, str, list[str]]:
    """Return the text of a file, its converted text, and a line per change. Raises UsageError."""
    from seatrial.checks import catalog
    from seatrial.config import renames
    from seatrial.pipeline.run_directory import load_trial
    from seatrial.pipeline.upgrade import upgrade_changes
    from seatrial.util.input_files import MAX_CONFIG_BYTES, MAX_RECORD_BYTES, read_text

    try:
        text = read_text(file, MAX_RECORD_BYTES)
    except IsADirectoryError as error:
        raise UsageError(f"{file} is a directory: give the files, such as {file}/*.yaml") from error
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    if text.lstrip().startswith("{"):  # a trial.json
        return text, load_trial(file).model_dump_json(indent=2) + "\n", upgrade_changes(text)
    if len(text) > MAX_CONFIG_BYTES:
        raise UsageError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes, the limit of a YAML file")
    units = {name: check.metrics for name, check in catalog().items()}
    return text, *renames.migrated(text, str(file), units)


def _replace(file: Path, old: str, new: str, changes: int) -> None:
    """Write ``old`` to FILE.bak and ``new`` to the file. Raises UsageError if there is a FILE.bak."""
    from seatrial.util.files import atomic_write
    from seatrial.util.text import plural

    backup = file.with_name(f"{file.name}.bak")
    if backup.exists():
        raise UsageError(f"{backup} exists: move it away, then run `seatrial migrate {file}` again")
    try:
        atomic_write(backup, old.encode())
        atomic_write(file, new.encode())
    except OSError as error:
        raise UsageError(f"cannot write {file} or {backup}: {error.strerror or error}") from error
    print(f"{file}: {plural(changes, 'change')}; old content in {backup}")
