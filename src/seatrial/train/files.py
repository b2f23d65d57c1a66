"""Files and folders that are whole or not there at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from seatrial.train import disk


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill ``path``. A crash or a full disk leaves ``path`` as it was, never half of the new one.

    Raises OSError when the folder cannot be written or the disk is full.
    """
    incomplete = path.with_name(f"{path.name}.incomplete")
    with incomplete.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    incomplete.replace(path)


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write ``record`` as indented JSON. Raises ValueError on a number that JSON does not know (NaN)."""
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    write_whole(path, lambda file: file.write(text.encode()))


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which is ``path`` from then on. Of a failure nothing is left.

    Where another process has made ``path`` meanwhile, that one stays. Raises OSError, and NoRoom on a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f"{path.name}.incomplete-", dir=path.parent))
    try:
        making.chmod(0o755)  # mkdtemp makes it ours alone
        yield making
        try:
            making.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    except Exception as error:
        if full := disk.no_room(error, path):  # it tells what is free before that is given back
            raise full from error
        raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
