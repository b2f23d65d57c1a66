"""Writes the files of hooks to one folder, and removes exactly these files again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from seatrial.config.argument_paths import path_exists
from seatrial.model import Frozen, UsageError
from seatrial.util.files import atomic_folder, write_json
from seatrial.util.input_files import read_bytes
from seatrial.util.text import printable

MANIFEST = "installed.json"
_MAX_FILE_BYTES = 2**20


class Manifest(Frozen):
    """The files of an installation. ``files``: path in the folder → SHA-256. ``seatrial``: version that wrote them."""

    seatrial: str
    files: dict[str, str]


def install(folder: Path, files: Mapping[str, str], version: str) -> None:
    """Write ``files`` (path → content) to a new or empty folder.

    Raises UsageError if ``folder`` is a link or a file, has content, or cannot be written. Then no file is written.
    """
    exists = path_exists(folder)
    if folder.is_symlink() or (exists and (not folder.is_dir() or any(folder.iterdir()))):
        raise UsageError(
            f"{folder} exists: nothing was written. Remove an earlier installation: seatrial hook uninstall {folder}"
        )
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    try:
        with atomic_folder(folder) as staged:
            for name, text in files.items():
                path = staged / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
                path.chmod(0o755 if name.endswith(".sh") else 0o644)
            write_json(staged / MANIFEST, Manifest(seatrial=version, files=digests).model_dump())
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}; nothing was written") from error


def uninstall(folder: Path, dry_run: bool) -> list[Path]:
    """Remove the files that install wrote, and return their paths. ``dry_run``: remove nothing.

    Raises UsageError and removes nothing if a file was changed, or if install did not write the folder. If a file
    cannot be removed, raises UsageError after it has removed the files before this one. Files that install did not
    write stay, and so does the folder that has them.
    """
    manifest = _manifest(folder)
    changed = [name for name, digest in manifest.files.items() if not _is_unchanged(folder / name, digest)]
    if changed:
        raise UsageError(
            f"{folder}: changed since `seatrial hook install`: {', '.join(sorted(changed))}. Nothing was removed: copy "
            "your changes, and remove these files yourself"
        )
    paths = [*filter(Path.exists, (folder / name for name in manifest.files)), folder / MANIFEST]
    if not dry_run:
        try:
            for path in paths:  # the manifest is last, so that the same command can continue after an error
                path.unlink()
            for parent in sorted({folder, *(path.parent for path in paths)}, key=lambda each: -len(each.parts)):
                if not any(parent.iterdir()):
                    parent.rmdir()
        except OSError as error:
            raise UsageError(f"cannot remove {error.filename or folder}: {error.strerror}") from error
    return paths


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(read_bytes(path, _MAX_FILE_BYTES))
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a list of installed files"
        raise UsageError(f"{path}: {reason}; expected a directory of `seatrial hook install`") from error
    if outside := [name for name in manifest.files if not _is_below(folder, name)]:
        names = printable(", ".join(outside))
        raise UsageError(f"{path} lists files outside its folder: {names}; nothing was removed")
    return manifest


def _is_below(folder: Path, name: str) -> bool:
    """Return whether the file ``name`` is in the folder after all links to folders on its path are followed."""
    return "\0" not in name and (folder / name).parent.resolve().is_relative_to(folder.resolve())


def _is_unchanged(path: Path, digest: str) -> bool:
    """Return whether a file has the content that install wrote. A missing file counts: an earlier try removed it."""
    try:
        return hashlib.sha256(read_bytes(path, _MAX_FILE_BYTES)).hexdigest() == digest
    except FileNotFoundError:
        return True
    except OSError:  # not a regular file any more, or too large
        return False
