"""The command that rewrites files of earlier versions: migrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from seatrial.model import UsageError


def migrate(
    file: Annotated[Path, typer.Argument(help="A trial, training config or baseline (YAML), or a trial.json.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the changes; write nothing.")] = False,
) -> None:
    """Convert a file of an earlier version to the current names. The old content is kept as FILE.bak."""
    from seatrial.config import renames
    from seatrial.pipeline.run_directory import load_trial
    from seatrial.pipeline.upgrade import upgrade_changes
    from seatrial.util.files import atomic_write
    from seatrial.util.input_files import MAX_CONFIG_BYTES, MAX_RECORD_BYTES, read_text
    from seatrial.util.text import plural

    try:
        text = read_text(file, MAX_RECORD_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    if text.lstrip().startswith("{"):  # a trial.json
        new = load_trial(file).model_dump_json(indent=2) + "\n"
        changes = upgrade_changes(text)
    elif len(text) > MAX_CONFIG_BYTES:
        raise UsageError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes, the limit of a YAML file")
    else:
        new, changes = renames.migrated(text, str(file))
    for change in changes:
        print(f"{file}: {change}")
    if not changes:
        print(f"{file}: no old names")
    elif not dry_run:
        backup = file.with_name(f"{file.name}.bak")
        if backup.exists():
            raise UsageError(f"{backup} exists: move it away, then run `seatrial migrate {file}` again")
        try:
            atomic_write(backup, text.encode())
            atomic_write(file, new.encode())
        except OSError as error:
            raise UsageError(f"cannot write {file} or {backup}: {error.strerror or error}") from error
        print(f"{file}: {plural(len(changes), 'change')}; old content in {backup}")
