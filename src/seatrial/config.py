"""Trial file, environment and flags → one validated config that knows where every value came from.

Later layers win: the trial file, ``SEATRIAL_<KEY>`` variables (``__`` between levels, lower-cased), then ``--set`` and
the other flags. A key that nobody declared is an error that names the nearest valid one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from seatrial.model import UsageError
from seatrial.settings import CheckSettings, Config

ENV_PREFIX = "SEATRIAL_SET_"
Tree = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class CheckSchema:
    """What config must know of a check to validate its settings; the catalog above hands it in."""

    options: type[BaseModel]
    metrics: Mapping[str, str]


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
    config = _validate(tree, source, known)
    return Resolved(config, {**_defaults(config, origins), **origins})


def parse_assignment(text: str) -> tuple[str, Any]:
    """``a.b=c`` → key and YAML value. Raises UsageError without an equals sign."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise UsageError(f"--set {text}: expected key=value, such as cluster.nodes=2")
    if value.lstrip().startswith((">", "<")):  # a threshold; YAML would take the sign for a block of text
        return key.strip(), value.strip()
    return key.strip(), _parse_yaml(value, f"--set {text}")


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
    tree = _parse_yaml(text, source)
    if not isinstance(tree, dict):
        raise UsageError(f"{source}: expected a mapping with the keys {', '.join(Config.model_fields)}")
    return {"name": Path(trial).stem, **tree}, source


def _read_file(trial: str) -> str:
    if not trial.endswith((".yaml", ".yml")):
        near = _nearest(trial, trial_names())
        raise UsageError(f"no trial called {trial!r}{near}; there are {', '.join(trial_names())}, or name a .yaml file")
    try:
        return Path(trial).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the trial file {trial}: {error}") from error


class _StrictLoader(yaml.SafeLoader):
    """YAML as PyYAML's safe loader reads it, but a key that stands twice is an error: the first would silently go."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"{source}: not valid YAML: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    return [
        (f"${name}", name.removeprefix(ENV_PREFIX).lower().replace("__", "."), _parse_yaml(value, f"${name}"))
        for name, value in sorted(environ.items())
        if name.startswith(ENV_PREFIX)
    ]


def _from_scheduler(environ: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    """What a scheduler has promised to the job that we run in."""
    gpus = environ.get("SLURM_GPUS_ON_NODE")
    return [("$SLURM_GPUS_ON_NODE", "cluster.gpus_per_node", gpus)] if gpus else []


def _split(key: str, known: Mapping[str, CheckSchema]) -> tuple[str, ...]:
    """A dotted key as a path. Check names and metric names hold dots themselves, so they are matched whole."""
    if not key.startswith("checks."):
        return tuple(key.split("."))
    rest = key.removeprefix("checks.")
    name = next((name for name in known if rest == name or rest.startswith(f"{name}.")), None)
    if name is None:
        raise UsageError(f"{key}: no such check{_nearest('.'.join(rest.split('.')[:2]), known)}")
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


def _validate(tree: Tree, source: str, known: Mapping[str, CheckSchema]) -> Config:
    _refuse_unknown(tree, Config, source, ())
    checks = tree.get("checks")
    if not isinstance(checks, dict) or not checks:
        raise UsageError(f"{source}: 'checks' must name at least one check, as a mapping of names to settings")
    for name, settings in checks.items():
        checks[name] = _validated_check(str(name), settings or {}, source, known)
    return _build(Config, tree, source, ())


def _validated_check(name: str, settings: Any, source: str, known: Mapping[str, CheckSchema]) -> Tree:
    if name not in known:
        raise UsageError(f"{source}: unknown check {name!r}{_nearest(name, known)}; `seatrial checks` lists them all")
    path = ("checks", name)
    if not isinstance(settings, dict):
        raise UsageError(f"{source}: {'.'.join(path)} must be a mapping with {', '.join(CheckSettings.model_fields)}")
    _refuse_unknown(settings, CheckSettings, source, path)
    checked = _build(CheckSettings, settings, source, path)
    options = known[name].options
    _refuse_unknown(checked.options, options, source, (*path, "options"))
    _build(options, checked.options, source, (*path, "options"))
    for metric, limit in checked.expect.items():
        _refuse_wrong_metric(metric, limit.unit, known[name].metrics, source, (*path, "expect"))
    return settings


def _refuse_wrong_metric(
    metric: str, unit: str, metrics: Mapping[str, str], source: str, path: tuple[str, ...]
) -> None:
    """A threshold must name a metric that the check measures, in the unit it is measured in."""
    where = ".".join((*path, metric))
    declared = declared_unit(metric, metrics)
    if declared is None:
        raise UsageError(f"{source}: {where}: this check measures no such metric{_nearest(metric, metrics)}")
    if unit and unit != declared:
        raise UsageError(f"{source}: {where}: the threshold is in {unit!r}, but the metric is measured in {declared!r}")


def declared_unit(metric: str, metrics: Mapping[str, str]) -> str | None:
    """The unit of a metric by its name, or by a declared pattern such as ``busbw.*``; None when there is none."""
    if metric in metrics:
        return metrics[metric]
    family = f"{metric.partition('.')[0]}.*"
    return metrics.get(family) if "." in metric else None


def _refuse_unknown(tree: Mapping[str, Any], model: type[BaseModel], source: str, path: tuple[str, ...]) -> None:
    for key, value in tree.items():
        field = model.model_fields.get(str(key))
        if field is None:
            where = ".".join((*path, str(key)))
            near, valid = _nearest(str(key), model.model_fields), ", ".join(model.model_fields) or "none"
            raise UsageError(f"{source}: unknown key {where!r}{near} (valid: {valid})")
        inner = field.annotation
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, BaseModel):
            _refuse_unknown(value, inner, source, (*path, str(key)))


def _build(model: type[Model], tree: Any, source: str, path: tuple[str, ...]) -> Model:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join((*path, *(str(part) for part in first["loc"])))
        raise UsageError(f"{source}: {where or 'trial'}: {first['msg']} (got {str(first['input'])[:80]!r})") from error


def _nearest(word: str, valid: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""
