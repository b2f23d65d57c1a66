"""Arguments of other training scripts for ``seatrial train run``: ``--seq_len 512``, or a run_args.json file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_origin

from seatrial.model import UsageError
from seatrial.train.train_config import TrainConfig
from seatrial.util import data_files
from seatrial.util.files import write_json
from seatrial.util.input_files import read_json

RUN_ARGS_FILE = "run_args.json"
_SCALARS = (bool, int, float, str)
_OPTIONS = ("set", "out", "run_args", "json")  # options of seatrial train run that are not config keys
_HELP = "other keys are set with --set KEY=VALUE; docs/training.md has a table of names"


def accepted_flags() -> dict[str, Any]:
    """Flag → type: the keys of TrainConfig whose value is a number, a text or a truth value."""
    types = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
    return {name: type_ for name, type_ in types.items() if type_ in _SCALARS or get_origin(type_) is Literal}


def overrides_from_flags(arguments: Sequence[str]) -> list[str]:
    """``--name value``, ``--name=value`` or, for a truth value, ``--name`` → overrides ``name=value``.

    Raises UsageError for a missing value, and for unknown names; the message says which names to use instead, if any.
    """
    overrides, unknown, remaining, types = list[str](), list[str](), list(arguments), accepted_flags()
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--"):
            raise UsageError(f"unexpected argument {argument!r}: expected seatrial train run CONFIG [--NAME VALUE]...")
        name, separator, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not separator and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        elif not separator and types.get(name) is bool:
            value = "true"
        if name not in types:
            unknown.append(name)
        elif not value:
            raise UsageError(f"--{name}: expected a value, such as --{name} VALUE")
        overrides.append(f"{name}={value}")
    if unknown:
        raise UsageError(_unknown_message({f"--{name}": name for name in unknown}))
    return overrides


def overrides_from_run_args(path: Path) -> list[str]:
    """The overrides in a run_args.json of seatrial or of a script: a JSON object whose keys are config keys.

    Nested keys may be dotted (``parallel.strategy``). Raises UsageError if the file cannot be read, or if a key is no
    config key.
    """
    try:
        arguments = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read --run_args {path}: {error}") from error
    if not isinstance(arguments, dict):
        raise UsageError(f"--run_args {path}: expected a JSON object with keys such as max_steps and seq_len")
    is_known = {name: name.partition(".")[0] in TrainConfig.model_fields for name in arguments}
    unknown = [name for name, known in is_known.items() if name in _replacements() or not known]
    if unknown:
        raise UsageError(_unknown_message({f"{path}: {name}": name for name in unknown}))
    return [f"{name}={json.dumps(value)}" for name, value in arguments.items()]


def write_run_args(config: TrainConfig, out: Path) -> None:
    """Writes ``out``/run_args.json: every key of ``config`` with its value; nested keys are dotted."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        flat |= {f"{name}.{key}": nested for key, nested in value.items()} if isinstance(value, dict) else {name: value}
    write_json(out / RUN_ARGS_FILE, flat)


def _unknown_message(unknown: dict[str, str]) -> str:
    """The message for unknown arguments (place → name), each with its replacement or a similar name."""
    texts, names = [], [*accepted_flags(), *_OPTIONS]
    for where, name in unknown.items():
        similar = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean --{similar[0]}?" if similar else ""
        replacement = _replacements().get(name)
        texts.append(f"{where}: unknown argument; {f'use {replacement}' if replacement else hint}".rstrip("; "))
    if any(name not in _replacements() for name in unknown.values()):
        texts.append(f"Accepted: --{', --'.join(accepted_flags())}; {_HELP}")
    return "; ".join(texts)


def _replacements() -> dict[str, str]:
    """Argument of a training script that is no config key → the config key or option to use instead."""
    replacements: dict[str, str] = data_files.read("training_flags.yaml")
    return replacements
