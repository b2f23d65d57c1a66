"""Merge trial file, environment and flags into one validated config with the origin of every value.

Sources, lowest priority first:

1. ``SLURM_GPUS_ON_NODE``, if the trial file sets no ``cluster.gpus_per_node``
2. the trial file
3. ``SEATRIAL_SET_<KEY>`` variables: ``__`` separates levels; keys are lower-cased, except names after ``ENV__``
4. ``--set`` and the other flags

An unknown key is an error that suggests the nearest valid key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from seatrial.config import renames
from seatrial.config.expect import declared_unit, limit_error, metric_error, nearest
from seatrial.config.schema import CheckSettings, Config
from seatrial.config.strict_yaml import parse_yaml
from seatrial.model import Threshold, UsageError, format_bytes

ENV_PREFIX = "SEATRIAL_SET_"
MAX_BYTES = 2**20  # of a trial file. Trial files are a page long; PyYAML needs minutes for a file above this size
# Characters that names, paths and variables must not contain: they end a line of a job script, or are not UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff]")
Tree = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class CheckSchema:
    """The options and metrics of a check, against which its settings are validated."""

    options: type[BaseModel]
    metrics: Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """The file, and the origin of each value by dotted key."""

    file: str
    origins: Mapping[str, str]

    def origin(self, path: Iterable[str]) -> str:
        """The origin of the nearest override at, above or below ``path``; the trial file if there is none."""
        parts = list(path)
        parents = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        children = [key for key in self.origins if parts and key.startswith(f"{parents[0]}.")]
        origins = (self.origins[key] for key in [*parents, *children] if key in self.origins)
        return next((origin for origin in origins if origin != self.file), self.file)


@dataclass(frozen=True)
class Resolved:
    config: Config
    origins: dict[str, str]


def resolve(
    trial: str,
    *,
    overrides: Iterable[tuple[str, str, Any]] = (),
    environ: Mapping[str, str],
    schemas: Mapping[str, CheckSchema],
) -> Resolved:
    """Resolve ``trial`` (the name of a shipped trial, or a file).

    ``overrides`` are (origin, dotted key, value) in rising priority. Raises UsageError with file and key.
    """
    tree, source = _load(trial)
    origins: dict[str, str] = {}
    _record(tree, source, (), origins)
    # Slurm may allocate fewer GPUs than the trial expects, so its number never replaces the trial's
    from_scheduler = [entry for entry in _from_scheduler(environ) if entry[1] not in origins]
    for origin, key, value in [*from_scheduler, *_from_environment(environ), *overrides]:
        path = _split(key, schemas)
        _require_no_contradiction(tree, path, value, origin, origins)
        _assign(tree, path, value, origin)
        _record(value, origin, path, origins)
    config = _validate(tree, Source(source, origins), schemas)
    return Resolved(config, {**_defaults(config, origins), **origins})


def load_as(model: type[Model], path: str, overrides: Iterable[tuple[str, str, Any]] = ()) -> Model:
    """Load the YAML file at ``path`` as a ``model``, with (origin, dotted key, value) ``overrides`` in rising priority.

    Raises UsageError with file and key.
    """
    tree = parse_yaml(_read_file(path), path)
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: expected a mapping with the keys {', '.join(model.model_fields)}")
    origins: dict[str, str] = {}
    for origin, key, value in overrides:
        _assign(tree, tuple(key.split(".")), value, origin)
        _record(value, origin, tuple(key.split(".")), origins)
    source = Source(path, origins)
    _check_values(tree, source, ())
    _check_keys(tree, model, source, ())
    return _build(model, tree, source, ())


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split ``a.b=c`` into key and YAML value. Raises UsageError for a missing equals sign, key or value."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise UsageError(f"--set {text}: expected key=value, such as cluster.nodes=2")
    if not value.strip() and not key.strip().startswith("env."):  # such as data.path=$UNSET
        raise UsageError(f"--set {text}: empty value; use null to unset")
    return key.strip(), _value(key.strip(), value, f"--set {text}")


def _value(key: str, text: str, source: str) -> Any:
    """Parse the text after an equals sign as YAML."""
    if text.lstrip().startswith((">", "<")):  # a threshold; in YAML these signs start a block of text
        return text.strip()
    value = parse_yaml(text, source)
    # environment variables of workers are text, also where YAML reads a number or a boolean
    return text if key.startswith("env.") and not isinstance(value, str) else value


def trial_names() -> list[str]:
    """The names of the shipped trials."""
    return sorted(Path(entry.name).stem for entry in _shipped().iterdir() if entry.name.endswith(".yaml"))


def _shipped() -> Any:
    return resources.files("seatrial") / "data" / "trials"


def _load(trial: str) -> tuple[Tree, str]:
    if trial in trial_names():
        text, source = (_shipped() / f"{trial}.yaml").read_text(encoding="utf-8"), f"trial {trial}"
    else:
        text, source = _read_file(trial), trial
    tree = parse_yaml(text, source)
    if not isinstance(tree, dict):
        raise UsageError(f"{source}: expected a mapping with the keys {', '.join(Config.model_fields)}")
    return {"name": _UNPRINTABLE.sub("\ufffd", Path(trial).stem), **tree}, source


def _read_file(trial: str) -> str:
    if not trial.endswith((".yaml", ".yml")):
        near = nearest(trial, trial_names())
        raise UsageError(f"unknown trial {trial!r}{near}; expected {', '.join(trial_names())} or a .yaml file")
    try:
        with Path(trial).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UsageError(f"{trial} is larger than the limit of {format_bytes(MAX_BYTES)}")
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {trial}: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    overrides = []
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX):
            key = _dotted(name.removeprefix(ENV_PREFIX))
            overrides.append((f"${name}", key, _value(key, text, f"${name}")))
    return overrides


def _dotted(name: str) -> str:
    """``LIMITS__STARTUP_S`` → ``limits.startup_s``; names of variables below ``ENV__`` keep their case."""
    group, separator, variable = name.partition("__")
    if separator and group.lower() == "env":
        return f"env.{variable}"
    return name.lower().replace("__", ".")


def _from_scheduler(environ: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    """The number of GPUs per node that Slurm allocated to the job around this process."""
    gpus = environ.get("SLURM_GPUS_ON_NODE")
    # An allocation without GPUs does not select a CPU-only run; --gpus-per-node 0 does
    return [("$SLURM_GPUS_ON_NODE", "cluster.gpus_per_node", gpus)] if gpus and gpus.strip("0") else []


def _split(key: str, schemas: Mapping[str, CheckSchema]) -> tuple[str, ...]:
    """A dotted key as a path. Names of checks and metrics contain dots and are matched as a whole."""
    if not key.startswith("checks."):
        return tuple(key.split("."))
    rest = key.removeprefix("checks.")
    name = next((name for name in schemas if rest == name or rest.startswith(f"{name}.")), None)
    if name is None:
        given = ".".join(rest.split(".")[:2])
        raise UsageError(f"{key}: unknown check{renames.hint('checks', given) or nearest(given, schemas)}")
    setting = rest.removeprefix(name).removeprefix(".")
    parts = setting.split(".", 1) if setting.startswith(("expect.", "options.")) else [setting]
    return ("checks", name, *(part for part in parts if part))


def _assign(tree: Tree, path: tuple[str, ...], value: Any, origin: str) -> None:
    for depth, part in enumerate(path[:-1]):
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            raise UsageError(f"{origin}: {'.'.join(path[: depth + 1])} is a value, not a group of keys")
    tree[path[-1]] = value


def _require_no_contradiction(
    tree: Tree, path: tuple[str, ...], value: Any, origin: str, origins: Mapping[str, str]
) -> None:
    """Raise UsageError if ``value`` replaces a threshold of an earlier source and no value meets both bounds."""
    if len(path) != 4 or path[2] != "expect":  # checks, NAME, expect, METRIC
        return
    replaced: Any = tree
    for part in path:
        replaced = replaced.get(part) if isinstance(replaced, dict) else None
    try:
        earlier, later = Threshold.parse(replaced), Threshold.parse(value)
    except ValueError:  # no threshold there yet, or an invalid one, which is refused later
        return
    if "==" not in (earlier.op, later.op) and later.excludes(earlier):
        key = ".".join(path)
        raise UsageError(f"{origin}: {key}: {later} contradicts {earlier} of {origins[key]}: no value meets both")


def _record(value: Any, origin: str, path: tuple[str, ...], origins: dict[str, str]) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _record(inner, origin, (*path, str(key)), origins)
    elif path:
        origins[".".join(path)] = origin


def _defaults(config: Config, origins: dict[str, str]) -> dict[str, str]:
    defaults: dict[str, str] = {}
    _record(config.model_dump(mode="json"), "default", (), defaults)
    return {key: origin for key, origin in defaults.items() if key not in origins}


def _validate(tree: Tree, source: Source, schemas: Mapping[str, CheckSchema]) -> Config:
    _check_values(tree, source, ())
    _check_keys(tree, Config, source, ())
    checks = tree.get("checks")
    if not isinstance(checks, dict) or not checks:
        raise UsageError(
            f"{source.origin(['checks'])}: 'checks' must name at least one check, as a mapping of names to settings"
        )
    for name, settings in checks.items():
        checks[name] = _validated_check(name, {} if settings is None else settings, source, schemas)
    return _build(Config, tree, source, ())


def _validated_check(name: str, settings: Any, source: Source, schemas: Mapping[str, CheckSchema]) -> Tree:
    if name not in schemas:
        near = renames.hint("checks", name) or f"{nearest(name, schemas)}; `seatrial checks` lists all checks"
        raise UsageError(f"{source.origin(['checks', name])}: unknown check {name!r}{near}")
    path = ("checks", name)
    if not isinstance(settings, dict):
        valid = ", ".join(CheckSettings.model_fields)
        raise UsageError(
            f"{source.origin(path)}: {'.'.join(path)} must be a mapping with {valid}, or empty (got {settings!r:.80})"
        )
    _check_keys(settings, CheckSettings, source, path)
    checked = _build(CheckSettings, settings, source, path)
    options = schemas[name].options
    _check_keys(checked.options, options, source, (*path, "options"))
    chosen = _build(options, checked.options, source, (*path, "options"))
    _check_values(
        chosen.model_dump(), source, (*path, "options")
    )  # again, since pydantic converts the text "inf" to a float
    for metric, limit in checked.expect.items():
        key = ".".join((*path, "expect", metric))
        unit = declared_unit(metric, schemas[name].metrics)
        problem = metric_error(metric, chosen, schemas[name].metrics) or limit_error(limit, unit)
        if problem:
            problem += renames.hint("metrics", metric, name)
            raise UsageError(f"{source.origin([*path, 'expect', metric])}: {key}: {problem}")
    return settings


def _check_values(value: Any, source: Source, path: tuple[str, ...]) -> None:
    """Raise UsageError for infinite or oversized numbers and control characters (a description may have lines)."""
    problem = ""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_values(str(key), source, path)
            _check_values(inner, source, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_values(inner, source, path)
    elif isinstance(value, float) and not math.isfinite(value):
        problem = f"expected a finite number (got {value})"
    elif isinstance(value, int) and value.bit_length() > 63:
        problem = f"expected an integer of at most 63 bits (got {value.bit_length()} bits)"
    elif isinstance(value, str) and path != ("description",) and _UNPRINTABLE.search(value):
        problem = f"control characters and line breaks are not allowed (got {value[:80]!r})"
    if problem:
        raise UsageError(f"{source.origin(path)}: {'.'.join(path) or 'trial'}: {problem}")


def _check_keys(tree: Mapping[str, Any], model: type[BaseModel], source: Source, path: tuple[str, ...]) -> None:
    for key, value in tree.items():
        field = model.model_fields.get(key)
        if field is None:
            name = ".".join((*path, key))
            valid = ", ".join(model.model_fields) or "none"
            near = _rename_hint(model, path, key) or nearest(key, model.model_fields)
            raise UsageError(f"{source.origin([*path, key])}: unknown key {name!r}{near} (valid: {valid})")
        inner = field.annotation
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, BaseModel):
            _check_keys(value, inner, source, (*path, key))


def _rename_hint(model: type[BaseModel], path: tuple[str, ...], key: str) -> str:
    """The end of an error message with the new name of a renamed key; empty if it was not renamed."""
    if path and path[0] == "checks":
        return renames.hint("options", key, path[1])
    section = (
        "training" if "run_name" in model.model_fields or (path and path[0] in ("data", "learning_rate")) else "trial"
    )
    return renames.hint(section, ".".join((*path, key)))


def _build(model: type[Model], tree: Any, source: Source, path: tuple[str, ...]) -> Model:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        location = (*path, *(str(part) for part in first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        if location:  # without one, the input is the whole file
            message = f"{'.'.join(location)}: {message} (got {str(first['input'])[:80]!r})"
        raise UsageError(f"{source.origin(location)}: {message}") from error
    except OverflowError as error:
        raise UsageError(
            f"{source.origin(path)}: {'.'.join(path) or 'trial'}: a number is too large: {error}"
        ) from error
