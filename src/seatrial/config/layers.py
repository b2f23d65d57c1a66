"""Trial file, environment and flags → one validated config that knows where every value came from.

Later layers win: the trial file, ``SEATRIAL_SET_<KEY>`` variables (``__`` between levels, lower-cased but for what
stands under ``ENV__``), then ``--set`` and the other flags. A key that nobody declared is an error that names the
nearest valid one.
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

from seatrial.config.expect import declared_unit, limit_error, metric_error, nearest
from seatrial.config.schema import CheckSettings, Config
from seatrial.config.strict_yaml import parse_yaml
from seatrial.model import UsageError, format_bytes

ENV_PREFIX = "SEATRIAL_SET_"
MOST_BYTES = 2**20  # of a trial file, which is a page of text: more is another file, and takes PyYAML minutes
# What no name, path or variable may hold: a line of a job script would end there, and UTF-8 has no surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff]")
Tree = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class CheckSchema:
    """What config must know of a check to validate its settings; the catalog above hands it in."""

    options: type[BaseModel]
    metrics: Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """Who set what: the trial file, and what came over it."""

    file: str
    origins: Mapping[str, str]

    def origin(self, path: Iterable[str]) -> str:
        """Who set the value at ``path``, the group around it, or something in it; the file where nobody else did."""
        parts = list(path)
        around = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        inside = [key for key in self.origins if parts and key.startswith(f"{around[0]}.")]
        overridden = (self.origins[key] for key in [*around, *inside] if key in self.origins)
        return next((origin for origin in overridden if origin != self.file), self.file)


@dataclass(frozen=True)
class Resolved:
    config: Config
    origins: dict[str, str]


def resolve(
    trial: str,
    *,
    overrides: Iterable[tuple[str, str, Any]] = (),
    environ: Mapping[str, str],
    known: Mapping[str, CheckSchema],
) -> Resolved:
    """Resolve the trial called ``trial`` (a shipped name or a file).

    ``overrides`` are (origin, dotted key, value) in rising priority. Raises UsageError, naming file and key.
    """
    tree, source = _load(trial)
    origins: dict[str, str] = {}
    _record(tree, source, (), origins)
    # what a scheduler gave is a promise only where nobody made one: it may have given less
    offers = [offer for offer in _from_scheduler(environ) if offer[1] not in origins]
    for origin, key, value in [*offers, *_from_environment(environ), *overrides]:
        path = _split(key, known)
        _assign(tree, path, value, origin)
        _record(value, origin, path, origins)
    config = _validate(tree, Source(source, origins), known)
    return Resolved(config, {**_defaults(config, origins), **origins})


def load_as(model: type[Model], path: str, overrides: Iterable[tuple[str, str, Any]] = ()) -> Model:
    """The YAML file at ``path`` as a ``model``, with (origin, dotted key, value) ``overrides`` in rising priority.

    Raises UsageError, naming file and key.
    """
    tree = parse_yaml(_read_file(path), path)
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: expected a mapping with the keys {', '.join(model.model_fields)}")
    origins: dict[str, str] = {}
    for origin, key, value in overrides:
        _assign(tree, tuple(key.split(".")), value, origin)
        _record(value, origin, tuple(key.split(".")), origins)
    source = Source(path, origins)
    _refuse_harmful(tree, source, ())
    _refuse_unknown(tree, model, source, ())
    return _build(model, tree, source, ())


def parse_assignment(text: str) -> tuple[str, Any]:
    """``a.b=c`` → key and YAML value. Raises UsageError without an equals sign, or anything behind it."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise UsageError(f"--set {text}: expected key=value, such as cluster.nodes=2")
    if not value.strip() and not key.strip().startswith("env."):  # such as data.path=$UNSET, which is no wish
        raise UsageError(f"--set {text}: nothing stands behind the equals sign; null takes a value away")
    return key.strip(), _value(key.strip(), value, f"--set {text}")


def _value(key: str, text: str, source: str) -> Any:
    """What stands behind an equals sign, read as YAML."""
    if text.lstrip().startswith((">", "<")):  # a threshold; YAML would take the sign for a block of text
        return text.strip()
    value = parse_yaml(text, source)
    # a variable for the workers is text, whatever YAML makes of 1 or on
    return text if key.startswith("env.") and not isinstance(value, str) else value


def trial_names() -> list[str]:
    """The trials that ship with seatrial."""
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
        raise UsageError(f"no trial called {trial!r}{near}; there are {', '.join(trial_names())}, or name a .yaml file")
    try:
        with Path(trial).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UsageError(f"{trial} is no trial file: it is larger than {format_bytes(MOST_BYTES)}")
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {trial}: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    found = []
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX):
            key = _dotted(name.removeprefix(ENV_PREFIX))
            found.append((f"${name}", key, _value(key, text, f"${name}")))
    return found


def _dotted(name: str) -> str:
    """``LIMITS__SILENCE_S`` → ``limits.heartbeat_timeout_s``; what stands under ``ENV__`` names a variable and stays as it is."""
    group, separator, variable = name.partition("__")
    if separator and group.lower() == "env":
        return f"env.{variable}"
    return name.lower().replace("__", ".")


def _from_scheduler(environ: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    """What a scheduler has promised to the job that we run in."""
    gpus = environ.get("SLURM_GPUS_ON_NODE")
    # none given is no wish for a rehearsal: that is asked for by --gpus-per-node 0
    return [("$SLURM_GPUS_ON_NODE", "cluster.gpus_per_node", gpus)] if gpus and gpus.strip("0") else []


def _split(key: str, known: Mapping[str, CheckSchema]) -> tuple[str, ...]:
    """A dotted key as a path. Check names and metric names hold dots themselves, so they are matched whole."""
    if not key.startswith("checks."):
        return tuple(key.split("."))
    rest = key.removeprefix("checks.")
    name = next((name for name in known if rest == name or rest.startswith(f"{name}.")), None)
    if name is None:
        raise UsageError(f"{key}: no such check{nearest('.'.join(rest.split('.')[:2]), known)}")
    setting = rest.removeprefix(name).removeprefix(".")
    parts = setting.split(".", 1) if setting.startswith(("expect.", "options.")) else [setting]
    return ("checks", name, *(part for part in parts if part))


def _assign(tree: Tree, path: tuple[str, ...], value: Any, origin: str) -> None:
    for depth, part in enumerate(path[:-1]):
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            raise UsageError(f"{origin}: {'.'.join(path[: depth + 1])} holds a value, not a group of keys")
    tree[path[-1]] = value


def _record(value: Any, origin: str, path: tuple[str, ...], origins: dict[str, str]) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _record(inner, origin, (*path, str(key)), origins)
    elif path:
        origins[".".join(path)] = origin


def _defaults(config: Config, origins: dict[str, str]) -> dict[str, str]:
    every: dict[str, str] = {}
    _record(config.model_dump(mode="json"), "default", (), every)
    return {key: origin for key, origin in every.items() if key not in origins}


def _validate(tree: Tree, source: Source, known: Mapping[str, CheckSchema]) -> Config:
    _refuse_harmful(tree, source, ())
    _refuse_unknown(tree, Config, source, ())
    checks = tree.get("checks")
    if not isinstance(checks, dict) or not checks:
        raise UsageError(
            f"{source.origin(['checks'])}: 'checks' must name at least one check, as a mapping of names to settings"
        )
    for name, settings in checks.items():
        checks[name] = _validated_check(name, {} if settings is None else settings, source, known)
    return _build(Config, tree, source, ())


def _validated_check(name: str, settings: Any, source: Source, known: Mapping[str, CheckSchema]) -> Tree:
    if name not in known:
        near = nearest(name, known)
        who = source.origin(["checks", name])
        raise UsageError(f"{who}: unknown check {name!r}{near}; `seatrial checks` lists them all")
    path = ("checks", name)
    if not isinstance(settings, dict):
        valid = ", ".join(CheckSettings.model_fields)
        raise UsageError(
            f"{source.origin(path)}: {'.'.join(path)} must be a mapping with {valid}, or empty (got {settings!r:.80})"
        )
    _refuse_unknown(settings, CheckSettings, source, path)
    checked = _build(CheckSettings, settings, source, path)
    options = known[name].options
    _refuse_unknown(checked.options, options, source, (*path, "options"))
    chosen = _build(options, checked.options, source, (*path, "options"))
    _refuse_harmful(chosen.model_dump(), source, (*path, "options"))  # "inf" is a number only now
    for metric, limit in checked.expect.items():
        where = ".".join((*path, "expect", metric))
        if wrong := metric_error(metric, chosen, known[name].metrics) or limit_error(
            limit, declared_unit(metric, known[name].metrics)
        ):
            raise UsageError(f"{source.origin([*path, 'expect', metric])}: {where}: {wrong}")
    return settings


def _refuse_harmful(value: Any, source: Source, path: tuple[str, ...]) -> None:
    """No number without end and no control character, wherever it stands; a description may have several lines."""
    problem = ""
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_harmful(str(key), source, path)
            _refuse_harmful(inner, source, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_harmful(inner, source, path)
    elif isinstance(value, float) and not math.isfinite(value):
        problem = f"expected a finite number (got {value})"
    elif isinstance(value, int) and value.bit_length() > 63:
        problem = f"expected a number of a sane size (got one of {value.bit_length()} bits)"
    elif isinstance(value, str) and path != ("description",) and _UNPRINTABLE.search(value):
        problem = f"control characters and line breaks have no place here (got {value[:80]!r})"
    if problem:
        raise UsageError(f"{source.origin(path)}: {'.'.join(path) or 'trial'}: {problem}")


def _refuse_unknown(tree: Mapping[str, Any], model: type[BaseModel], source: Source, path: tuple[str, ...]) -> None:
    for key, value in tree.items():
        field = model.model_fields.get(key)
        if field is None:
            where = ".".join((*path, key))
            near, valid = nearest(key, model.model_fields), ", ".join(model.model_fields) or "none"
            raise UsageError(f"{source.origin([*path, key])}: unknown key {where!r}{near} (valid: {valid})")
        inner = field.annotation
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, BaseModel):
            _refuse_unknown(value, inner, source, (*path, key))


def _build(model: type[Model], tree: Any, source: Source, path: tuple[str, ...]) -> Model:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = (*path, *(str(part) for part in first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        # of the whole, what it holds says nothing
        told = f"{'.'.join(where)}: {said} (got {str(first['input'])[:80]!r})" if where else said
        raise UsageError(f"{source.origin(where)}: {told}") from error
    except OverflowError as error:
        raise UsageError(
            f"{source.origin(path)}: {'.'.join(path) or 'trial'}: a number is too large: {error}"
        ) from error
