"""Prepared data on disk: one folder per key. A key is everything that determines the tokens; its hash names the folder.

``key.json`` in the folder holds the key (SHA-256 of data and tokenizer, and the options), and size and SHA-256 of each
other file. A folder gets its name when it is complete, so that no process reads a partial folder. If a cache is
configured, a training run compares the sizes of the files with key.json; `seatrial train preprocess` compares the
SHA-256 too. This module does not import torch, which a login node may not have.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from seatrial.model import SeatrialError, UsageError
from seatrial.train.disk import atomic_write_folder
from seatrial.train.train_config import TrainConfig
from seatrial.util.files import write_json
from seatrial.util.input_files import open_file, read_json

# The environment variable with the cache folder, used if data.cache is not set. `seatrial train preprocess` writes to
# this folder; training runs only read it
CACHE_VARIABLE = "SEATRIAL_DATA_CACHE"
KEY_FILE = "key.json"
FORMAT = 2  # part of every key; increase it if seatrial computes other tokens from the same rows, or writes other files
_FILES = "files"  # field of key.json with size and SHA-256 of each file; not part of the key
# The files of a tokenizer's folder that determine the tokens; the folder may also hold the weights of a model
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")

Key = Mapping[str, Any]  # JSON values


class Prepared(NamedTuple):
    """A folder of prepared data. ``hit``: whether it existed already.

    ``message``: a line about the hit, or the miss with its reason; empty if no cache is configured.
    """

    folder: Path
    hit: bool
    message: str


def common_key(config: TrainConfig, *packages: str) -> dict[str, Any]:
    """The part of a key that both stacks share; ``packages``: packages whose version may change the tokens."""
    return {
        "format": FORMAT,
        "seq_len": config.seq_len,
        "vocabulary": config.model.architecture().vocab_size,
        **{package: metadata.version(package) for package in packages},
    }


def content_hashes(path: Path, description: str) -> dict[str, str]:
    """{suffix: SHA-256} of a file, or {name: SHA-256} of the tokenizer files in a folder. Raises UsageError."""
    try:
        if not path.is_dir():
            return {path.suffix: _sha256(path)}
        files = {file for pattern in _TOKENIZER_FILES for file in path.glob(pattern)}
        return {file.name: _sha256(file) for file in sorted(files)}
    except OSError as error:
        raise UsageError(f"cannot read {description} {path}: {error.strerror or error}") from error


def folder_name(prefix: str, key: Key | list[Any]) -> str:
    """The name of the folder with the prepared data of ``key``."""
    return f"{prefix}-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}"


def prepare(
    config: TrainConfig,
    folder: Path,
    prefix: str,
    inputs: Iterable[Path],
    read_key: Callable[[], Key],
    write_files: Callable[[Path], None],
) -> Prepared:
    """The prepared data in ``folder`` or SEATRIAL_DATA_CACHE; if there is none, ``write_files`` writes it.

    ``folder``: data.cache, or a folder of the run; missing data is written to a subfolder of it. ``read_key`` returns
    the key from the ``inputs``. Raises DiskFullError, OSError, UsageError if an input changed meanwhile, and UsageError
    if a cache is configured and the data is damaged: it has another key, or a file is missing or has another size.
    """
    versions = {path: version(path) for path in inputs}
    key = read_key()
    prepared = _locate(config, folder, prefix, key)
    if prepared.hit:
        return prepared
    with atomic_write_folder(prepared.folder) as temporary:  # another process may finish the folder meanwhile
        write_files(temporary)
        for path, before in versions.items():
            if version(path) != before:
                raise UsageError(f"{path} changed while it was read; nothing was written. Repeat when it is complete")
        files = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
        properties = {str(path.relative_to(temporary)): file_properties(path) for path in files}
        write_json(temporary / KEY_FILE, {**key, _FILES: properties})
    return prepared


def prepare_generated(folder: Path, prefix: str, key: list[Any], write_files: Callable[[Path], None]) -> Prepared:
    """The generated data of ``key`` in ``folder``; if there is none, ``write_files`` writes it."""
    path = folder / folder_name(prefix, key)
    if not path.is_dir():
        with atomic_write_folder(path) as temporary:
            write_files(temporary)
    return Prepared(path, hit=False, message="")


def _locate(config: TrainConfig, folder: Path, prefix: str, key: Key) -> Prepared:
    """The prepared data of ``key``; if there is none, where to write it."""
    environment_cache = os.environ.get(CACHE_VARIABLE)
    name = folder_name(prefix, key)
    parents = [folder]
    if environment_cache and not config.data.cache:
        parents.append(Path(environment_cache))
    hit = next((parent / name for parent in parents if (parent / name).is_dir()), None)
    if not (config.data.cache or environment_cache):
        return Prepared(hit or folder / name, hit is not None, "")
    if hit:
        if _key_differences(hit, key) != []:
            raise _damage_error(hit, f"{KEY_FILE} is missing or differs")
        require_intact(hit, sizes_only=True)
        return Prepared(hit, True, f"prepared data: hit, {hit}")
    reason = _miss_reason(parents[-1], prefix, key)
    return Prepared(folder / name, False, f"prepared data: miss in {parents[-1]}: {reason}; writing {folder / name}")


def require_intact(folder: Path, sizes_only: bool = False) -> None:
    """Compare size and SHA-256 of each file in ``folder`` with key.json. Raises UsageError if they differ."""
    try:
        recorded = read_json(folder / KEY_FILE)[_FILES]
        for name, expected in recorded.items():
            if difference := file_difference(folder / name, expected, sizes_only):
                raise _damage_error(folder, difference)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise _damage_error(folder, f"its files cannot be compared with {KEY_FILE}: {error}") from error


def _damage_error(folder: Path, problem: str) -> UsageError:
    return UsageError(f"{folder} is damaged: {problem}. Remove this directory; the next call writes it again")


def file_properties(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file. Raises OSError."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def file_difference(path: Path, recorded: Mapping[str, Any], sizes_only: bool = False) -> str:
    """How the file differs from its ``recorded`` properties, or why it cannot be read; empty if it does not differ."""
    try:
        properties = {"bytes": path.stat().st_size} if sizes_only else file_properties(path)
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    differing = (name for name, value in properties.items() if value != recorded[name])
    if not (name := next(differing, "")):
        return ""
    label = {"bytes": "size", "sha256": "SHA-256"}[name]
    return f"{path.name} has {label} {properties[name]}, written with {recorded[name]}"


def _miss_reason(cache: Path, prefix: str, key: Key) -> str:
    """The differences to the most similar key in ``cache``."""
    by_folder = {path.name: _key_differences(path, key) for path in cache.glob(f"{prefix}-*")}
    readable = {name: texts for name, texts in by_folder.items() if texts is not None}
    if not readable:
        return "no prepared data of this kind (written by `seatrial train preprocess CONFIG`)"
    name, texts = min(readable.items(), key=lambda item: len(item[1]))
    return f"{name} differs in {', '.join(texts)}"


def _key_differences(folder: Path, key: Key) -> list[str] | None:
    """A text for each field in which the key of ``folder`` differs from ``key``; None if it cannot be read."""
    try:
        cached = read_json(folder / KEY_FILE)
        fields = [name for name in {**cached, **key} if name != _FILES and cached.get(name) != key.get(name)]
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    texts = []
    for name in fields:
        old, new = cached.get(name), key.get(name)
        is_content = isinstance(old, dict) or isinstance(new, dict)
        texts.append(f"{name} (content)" if is_content else f"{name} ({old} in the cache, {new} needed)")
    return texts


@contextmanager
def convert_read_errors(folder: Path) -> Iterator[None]:
    """Context manager: an error while the prepared data in ``folder`` are read becomes a SeatrialError."""
    try:
        yield
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise SeatrialError(
            f"cannot read the prepared data in {folder}: {error}. Remove this directory; it is written again"
        ) from error


def version(path: Path) -> tuple[int, int, int] | None:
    """Inode, size and modification time of a file or folder; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
