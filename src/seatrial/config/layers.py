"""Merges trial file, environment and flags into one validated config with the origin of every value.

Sources, lowest priority first:

1. ``SLURM_GPUS_ON_NODE``, if the trial file sets no ``cluster.gpus_per_node``
2. the trial file
3. ``SEATRIAL_SET_<KEY>`` variables: ``__`` separates levels; keys are lower-cased, except names after ``ENV__``
4. ``--set`` and the other flags
5. ``SBATCH_PARTITION`` and the other variables by which sbatch overrides the options of a job script

An unknown key is an error that suggests the nearest valid key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from seatrial.config import node_selection, slurm_options
from seatrial.config.argument_paths import is_folder
from seatrial.config.expect import declared_unit, metric_error, nearest, threshold_unit_error
from seatrial.config.schema import CheckSettings, Config, Override
from seatrial.config.strict_yaml import parse_yaml
from seatrial.model import Threshold, UsageError, validation_message
from seatrial.util import data_files
from seatrial.util.input_files import MAX_CONFIG_BYTES, read_text
from seatrial.util.secrets import redacted

ENV_PREFIX = "SEATRIAL_SET_"
_YAML_SUFFIXES = (".yaml", ".yml")
# Characters that no value may contain: control characters except the tab, since some end a line of a job script, and
# surrogates, which cannot be encoded in UTF-8
_UNPRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff]")
Tree = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)


class CheckSchema(Protocol):
    """The parts of a check that validate its settings in a trial: its options, and metric name → unit."""

    @property
    def options(self) -> type[BaseModel]: ...

    @property
    def units(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Source:
    """Where values come from. ``origins``: dotted key → flag, variable or file; other values are from ``file``."""

    file: str
    origins: Mapping[str, str]

    def origin(self, path: Iterable[str]) -> str:
        """Return the flag or variable that set the key ``path``, else the one that set the nearest key above it.

        Else return the one that set a key below it. If no flag or variable set any of these keys, return the file.
        """
        parts = list(path)
        parents = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        children = [key for key in self.origins if parts and key.startswith(f"{parents[0]}.")]
        origins = (self.origins[key] for key in [*parents, *children] if key in self.origins)
        return next((origin for origin in origins if origin != self.file), self.file)

    def place(self, path: Iterable[str]) -> str:
        """Return the name of ``path`` in a message: its origin and dotted key.

        If an option such as --nodes set exactly this key, the option alone is the name.
        """
        key, origin = ".".join(path), self.origin(path)
        is_option = origin.startswith("--") and origin != "--set" and self.origins.get(key) == origin
        return origin if is_option else f"{origin}: {key or 'trial'}"

    def with_value(self, message: str, path: Iterable[str], value: object) -> str:
        """Return an error message with the rejected value, but without the value of a variable.

        Such a value may be a secret, and the name of the variable is in the message. Mappings may contain variables.
        """
        parts = list(path)
        if "env" in parts or self.origin(parts).startswith("$"):
            return message.replace(repr(value), "the value")
        return message if isinstance(value, Mapping) else f"{message} (got {str(redacted(value))[:80]!r})"


@dataclass(frozen=True)
class ResolvedTrial:
    """The config of a trial, and dotted key → origin of its value: a flag, a variable, the file or ``default``."""

    config: Config
    origins: dict[str, str]


def resolve(
    trial: str | Tree,
    *,
    overrides: Iterable[Override] = (),
    environ: Mapping[str, str],
    schemas: Mapping[str, CheckSchema],
) -> ResolvedTrial:
    """Return the config of ``trial``: the name of a shipped trial, a file, or the config of a record.

    ``overrides``: in rising priority. Raises UsageError, with origin and key, for an
    invalid trial.
    """
    tree, file = _read_trial(trial) if isinstance(trial, str) else (trial, "the record")
    origins: dict[str, str] = {}
    _record_origins(tree, file, (), origins)
    # Slurm may have allocated fewer GPUs than the trial expects: the number of the trial stays
    from_scheduler = [(origin, key, gpus) for origin, key, gpus in _scheduler_overrides(environ) if key not in origins]
    from_sbatch = slurm_options.environment_overrides(environ)
    for origin, key, value in [*from_scheduler, *_environment_overrides(environ), *overrides, *from_sbatch]:
        path = _split_key(key, schemas)
        _require_no_contradiction(tree, path, value, origin, origins)
        _assign(tree, path, value, origin)
        _record_origins(value, origin, path, origins)
    if "cluster.nodes" not in origins and (count := node_selection.node_count(tree)):
        _assign(tree, ("cluster", "nodes"), count, file)
        origins["cluster.nodes"] = origins["slurm.nodelist"]
    source = Source(file, origins)
    config = _validate_trial(tree, source, schemas)
    node_selection.validate(config, source.origin)
    defaults: dict[str, str] = {}
    _record_origins(config.model_dump(mode="json"), "default", (), defaults)
    return ResolvedTrial(config, defaults | origins)


def load_as(model: type[Model], path: str, overrides: Iterable[Override] = ()) -> Model:
    """Load the YAML file at ``path`` as a ``model``, with ``overrides`` in rising priority.

    Raises UsageError for an invalid file or override; the message has its origin and the key.
    """
    if not path.endswith(_YAML_SUFFIXES):
        raise UsageError(f"{path}: expected a .yaml file")
    tree = _parse_mapping(_read_file(path), path, model)
    origins: dict[str, str] = {}
    for origin, key, value in overrides:
        _assign(tree, tuple(key.split(".")), value, origin)
        _record_origins(value, origin, tuple(key.split(".")), origins)
    source = Source(path, origins)
    _validate_values(tree, source, ())
    _validate_keys(tree, model, source, ())
    return _build(model, tree, source, ())


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split ``a.b=c`` into key and YAML value. Raises UsageError for a missing equals sign, key or value."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise UsageError(f"--set {text}: expected key=value, such as cluster.nodes=2")
    key = key.strip()
    if not value.strip() and not key.startswith("env."):  # such as data.path=$UNSET
        raise UsageError(f"--set {text}: empty value; use null to unset")
    return key, _parse_value(key, value, f"--set {key}" if ".env." in f".{key}" else f"--set {text}")


def _parse_value(key: str, text: str, source: str) -> Any:
    """Return the text after an equals sign, parsed as YAML."""
    if text.lstrip().startswith((">", "<")):  # a threshold; in YAML these signs start a block of text
        return text.strip()
    try:
        value = parse_yaml(text, source)
    except UsageError:
        if ".env." in f".{key}" or source.startswith("$"):  # the problem may quote the value
            raise UsageError(f"{source}: not valid YAML: put the value in quotes") from None
        raise
    # environment variables of workers are text, even where YAML reads a number or a boolean
    return text if key.startswith("env.") and not isinstance(value, str) else value


def trial_names() -> list[str]:
    """Return the names of the shipped trials."""
    folder = resources.files("seatrial") / "data" / "trials"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _read_trial(trial: str) -> tuple[Tree, str]:
    """Return the content of a shipped trial or of a trial file, and its name for messages.

    Raises UsageError if there is no such trial, or if the file cannot be read or is invalid.
    """
    names = trial_names()
    if trial in names:
        tree, source = data_files.read(f"trials/{trial}.yaml"), f"trial {trial}"
    elif trial.endswith(_YAML_SUFFIXES):
        tree, source = _parse_mapping(_read_file(trial), trial, Config), trial
    elif is_folder(Path(trial)):
        raise UsageError(
            f"{trial} is a directory: give a trial, {', '.join(names)} or a .yaml file; "
            f"to continue a run: --resume {trial}"
        )
    else:
        hint = nearest(trial, names)
        raise UsageError(f"unknown trial {trial!r}{hint}; expected {', '.join(names)} or a .yaml file")
    return {"name": _UNPRINTABLE.sub("\ufffd", Path(trial).stem), **tree}, source


def _parse_mapping(text: str, source: str, model: type[BaseModel]) -> Tree:
    tree = parse_yaml(text, source)
    if isinstance(tree, dict):
        return tree
    problem = f"{source} is empty" if tree is None else source
    raise UsageError(f"{problem}: expected a mapping with the keys {', '.join(model.model_fields)}")


def _read_file(path: str) -> str:
    try:
        return read_text(Path(path), MAX_CONFIG_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or a path with a null character
        raise UsageError(f"cannot read {path}: {error}") from error


def _environment_overrides(environ: Mapping[str, str]) -> list[Override]:
    names = sorted(name for name in environ if name.startswith(ENV_PREFIX))
    keys = {name: _dotted_key(name.removeprefix(ENV_PREFIX)) for name in names}
    return [(f"${name}", key, _parse_value(key, environ[name], f"${name}")) for name, key in keys.items()]


def _dotted_key(name: str) -> str:
    """Return the key of a variable: ``LIMITS__STARTUP_S`` → ``limits.startup_s``; names after ``ENV__`` keep case."""
    group, separator, variable = name.partition("__")
    if separator and group.lower() == "env":
        return f"env.{variable}"
    return name.lower().replace("__", ".")


def _scheduler_overrides(environ: Mapping[str, str]) -> list[Override]:
    """Return the override of cluster.gpus_per_node by the GPUs that Slurm allocated to this process' job, if any."""
    gpus = environ.get("SLURM_GPUS_ON_NODE")
    # an allocation without GPUs does not select a CPU-only run; only --gpus-per-node 0 does
    return [("$SLURM_GPUS_ON_NODE", "cluster.gpus_per_node", gpus)] if gpus and gpus.strip("0") else []


def _split_key(key: str, schemas: Mapping[str, CheckSchema]) -> tuple[str, ...]:
    """Return a dotted key as a path. Names of checks and metrics contain dots; each is one element of the path."""
    if not key.startswith("checks."):
        return tuple(key.split("."))
    name_and_setting = key.removeprefix("checks.")
    name = ".".join(name_and_setting.split(".")[:2])  # a check name has two parts, such as device.gemm
    if name not in schemas:
        raise UsageError(f"{key}: unknown check{nearest(name, schemas)}")
    setting = name_and_setting.removeprefix(name).removeprefix(".")
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
    except ValueError:  # no threshold there yet, or an invalid one, which is reported later
        return
    if "==" not in (earlier.op, later.op) and later.excludes(earlier):
        key = ".".join(path)
        raise UsageError(f"{origin}: {key}: {later} contradicts {earlier} of {origins[key]}: no value meets both")


def _record_origins(value: Any, origin: str, path: tuple[str, ...], origins: dict[str, str]) -> None:
    """Add ``origin`` to ``origins`` for each value at or below ``path``."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _record_origins(inner, origin, (*path, str(key)), origins)
    elif path:
        origins[".".join(path)] = origin


def _validate_trial(tree: Tree, source: Source, schemas: Mapping[str, CheckSchema]) -> Config:
    _validate_values(tree, source, ())
    _validate_keys(tree, Config, source, ())
    checks = tree.get("checks")
    if not isinstance(checks, dict) or not checks:
        raise UsageError(
            f"{source.origin(['checks'])}: 'checks' must name at least one check, as a mapping of names to settings"
        )
    for name, settings in checks.items():
        checks[name] = _validate_check(name, {} if settings is None else settings, source, schemas)
    return _build(Config, tree, source, ())


def _validate_check(name: str, settings: Any, source: Source, schemas: Mapping[str, CheckSchema]) -> Tree:
    """Return the settings of a check unchanged. Raises UsageError if they do not fit the schema of the check."""
    if name not in schemas:
        hint = f"{nearest(name, schemas)}; `seatrial show checks` lists all checks"
        raise UsageError(f"{source.origin(['checks', name])}: unknown check {name!r}{hint}")
    path = ("checks", name)
    option_model, metrics = schemas[name].options, schemas[name].units
    if settings == {} and not any(field.is_required() for field in option_model.model_fields.values()):
        return {}  # defaults are valid, and building all option models of the trial acceptance would take 10 ms
    if not isinstance(settings, dict):
        valid = ", ".join(CheckSettings.model_fields)
        raise UsageError(
            f"{source.origin(path)}: {'.'.join(path)} must be a mapping with {valid}, or empty (got {settings!r:.80})"
        )
    _validate_keys(settings, CheckSettings, source, path)
    validated = _build(CheckSettings, settings, source, path)
    _validate_keys(validated.options, option_model, source, (*path, "options"))
    options = _build(option_model, validated.options, source, (*path, "options"))
    _validate_values(options.model_dump(), source, (*path, "options"))  # pydantic converts the text "inf"
    for metric, threshold in validated.expect.items():
        unit = declared_unit(metric, metrics)
        if problem := metric_error(metric, options, metrics) or threshold_unit_error(threshold, unit):
            key_path = (*path, "expect", metric)
            raise UsageError(f"{source.origin(key_path)}: {'.'.join(key_path)}: {problem}")
    return settings


def _validate_values(value: Any, source: Source, path: tuple[str, ...]) -> None:
    """Raise UsageError for numbers that are infinite, NaN or too large, and for control characters.

    Only ``description`` may contain control characters.
    """
    problem = ""
    if isinstance(value, dict):
        for key, inner in value.items():
            _validate_values(str(key), source, path)
            _validate_values(inner, source, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for inner in value:
            _validate_values(inner, source, path)
    elif isinstance(value, float) and not math.isfinite(value):
        problem = f"expected a finite number (got {value})"
    elif isinstance(value, int) and value.bit_length() > 63:
        problem = f"expected an integer of at most 63 bits (got {value.bit_length()} bits)"
    elif isinstance(value, str) and path != ("description",) and _UNPRINTABLE.search(value):
        problem = source.with_value("control characters and line breaks are not allowed", path, value)
    if problem:
        raise UsageError(f"{source.place(path)}: {problem}")


def _validate_keys(tree: Mapping[str, Any], model: type[BaseModel], source: Source, path: tuple[str, ...]) -> None:
    for key, value in tree.items():
        field = model.model_fields.get(key)
        if field is None:
            name = ".".join((*path, key))
            valid = ", ".join(model.model_fields) or "none"
            hint = nearest(key, model.model_fields)
            raise UsageError(f"{source.origin([*path, key])}: unknown key {name!r}{hint} (valid: {valid})")
        if inner := _nested_model(field.annotation):
            in_list = isinstance(value, list)
            for index, item in enumerate(value if in_list else [value]):
                if isinstance(item, dict):
                    _validate_keys(item, inner, source, (*path, key, str(index)) if in_list else (*path, key))


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model of ``Model``, ``Model | None`` or ``tuple[Model, ...]``; None for other types."""
    types = () if get_origin(annotation) is dict else (annotation, *get_args(annotation))
    models = [each for each in types if isinstance(each, type) and issubclass(each, BaseModel)]
    return models[0] if len(models) == 1 else None


def _build(model: type[Model], tree: Any, source: Source, path: tuple[str, ...]) -> Model:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        details = error.errors()[0]
        location = (*path, *(str(part) for part in details["loc"]))
        message = validation_message(details)
        # A missing key has no value: the input is the whole group. Some messages of validators show the value already
        if location and details["type"] != "missing" and "(got " not in message:
            message = source.with_value(message, location, details["input"])
        if location:  # without a location, the rejected input is the whole file
            raise UsageError(f"{source.place(location)}: {message}") from error
        raise UsageError(f"{source.origin(location)}: {message}") from error
    except OverflowError as error:
        raise UsageError(f"{source.place(path)}: a number is too large: {error}") from error
