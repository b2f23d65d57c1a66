"""Trial file, environment and flags → one validated config that knows where every value came from.

Later layers win: the trial file, ``SEATRIAL_SET_<KEY>`` variables (``__`` between levels, lower-cased but for what
stands under ``ENV__``), then ``--set`` and the other flags. A key that nobody declared is an error that names the
nearest valid one.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from seatrial.config.schema import CheckSettings, Config
from seatrial.model import Limit, UsageError, format_bytes, parse_bytes

ENV_PREFIX = "SEATRIAL_SET_"
MOST_BYTES = 2**20  # of a trial file, which is a page of text: more is another file, and takes PyYAML minutes
MOST_LEVELS = 32  # of nesting; a trial needs five
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

    def of(self, path: Iterable[str]) -> str:
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
    tree = _parse_yaml(_read_file(path), path)
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
    value = _parse_yaml(text, source)
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
    tree = _parse_yaml(text, source)
    if not isinstance(tree, dict):
        raise UsageError(f"{source}: expected a mapping with the keys {', '.join(Config.model_fields)}")
    return {"name": _UNPRINTABLE.sub("\ufffd", Path(trial).stem), **tree}, source


def _read_file(trial: str) -> str:
    if not trial.endswith((".yaml", ".yml")):
        near = _nearest(trial, trial_names())
        raise UsageError(f"no trial called {trial!r}{near}; there are {', '.join(trial_names())}, or name a .yaml file")
    try:
        with Path(trial).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UsageError(f"{trial} is no trial file: it is larger than {format_bytes(MOST_BYTES)}")
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {trial}: {error}") from error


class _StrictLoader(yaml.SafeLoader):
    """YAML as PyYAML's safe loader reads it, without what a trial file does not need and what would harm us.

    A key that stands twice is an error: the first would silently go. So is a key that is no text, an anchor or alias
    (a few of them make a billion nodes, or a circle), and nesting beyond MOST_LEVELS.
    """

    _level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            raise yaml.composer.ComposerError(
                None, None, f"anchors and aliases are not read here (got {event.anchor!r})", event.start_mark
            )
        self._level += 1
        if self._level > MOST_LEVELS:
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {MOST_LEVELS} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is no text", key.start_mark)
            if key.value in seen:
                problem = f"the key {key.value!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: a date or number that is none
        raise UsageError(f"{source}: not valid YAML: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    found = []
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX):
            key = _dotted(name.removeprefix(ENV_PREFIX))
            found.append((f"${name}", key, _value(key, text, f"${name}")))
    return found


def _dotted(name: str) -> str:
    """``LIMITS__SILENCE_S`` → ``limits.silence_s``; what stands under ``ENV__`` names a variable and stays as it is."""
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


def _validate(tree: Tree, source: Source, known: Mapping[str, CheckSchema]) -> Config:
    _refuse_harmful(tree, source, ())
    _refuse_unknown(tree, Config, source, ())
    checks = tree.get("checks")
    if not isinstance(checks, dict) or not checks:
        raise UsageError(
            f"{source.of(['checks'])}: 'checks' must name at least one check, as a mapping of names to settings"
        )
    for name, settings in checks.items():
        checks[name] = _validated_check(name, {} if settings is None else settings, source, known)
    return _build(Config, tree, source, ())


def _validated_check(name: str, settings: Any, source: Source, known: Mapping[str, CheckSchema]) -> Tree:
    if name not in known:
        near = _nearest(name, known)
        who = source.of(["checks", name])
        raise UsageError(f"{who}: unknown check {name!r}{near}; `seatrial checks` lists them all")
    path = ("checks", name)
    if not isinstance(settings, dict):
        valid = ", ".join(CheckSettings.model_fields)
        raise UsageError(
            f"{source.of(path)}: {'.'.join(path)} must be a mapping with {valid}, or empty (got {settings!r:.80})"
        )
    _refuse_unknown(settings, CheckSettings, source, path)
    checked = _build(CheckSettings, settings, source, path)
    options = known[name].options
    _refuse_unknown(checked.options, options, source, (*path, "options"))
    chosen = _build(options, checked.options, source, (*path, "options"))
    _refuse_harmful(chosen.model_dump(), source, (*path, "options"))  # "inf" is a number only now
    for metric, limit in checked.expect.items():
        where = ".".join((*path, "expect", metric))
        if wrong := _wrong_metric(metric, chosen, known[name].metrics) or _wrong_limit(
            limit, declared_unit(metric, known[name].metrics)
        ):
            raise UsageError(f"{source.of([*path, 'expect', metric])}: {where}: {wrong}")
    return settings


def _wrong_metric(metric: str, options: BaseModel, metrics: Mapping[str, str]) -> str:
    """Why this check, with these options, will not measure a metric of that name; empty when it will."""
    name, _, member = metric.partition(".")
    if member in ("", "*") and f"{name}.*" in metrics:
        return f"name one of {name}.*, such as {name}.{next(iter(_members(options, name) or ['1GiB']))}"
    if declared_unit(metric, metrics) is None:
        return f"this check measures no such metric{_nearest(metric, metrics)}"
    if metric in metrics:
        return ""
    members = _members(options, name)
    if members is not None and member not in members:
        return f"{member!r} is not measured with these options, which is {', '.join(members)}"
    return _wrong_size(member) if members is None and "sizes" in type(options).model_fields else ""


def _members(options: BaseModel, metric: str) -> list[str] | None:
    """What stands for the star of metrics such as ``busbw.*``: by convention, what the options list as ``sizes`` (or
    in the option that their ``listed_in`` names for the metric) or as ``paths``. None where they leave it open.
    """
    if "paths" in type(options).model_fields:
        return list(getattr(options, "paths", ())) or ["run_directory"]
    sizes = getattr(options, getattr(options, "listed_in", {}).get(metric, "sizes"), None)
    return None if sizes is None else [_exact(size) for size in sizes]


def _exact(size: int) -> str:
    """A size as metrics are named after it: the short form only where it is exact."""
    short = format_bytes(size)
    return f"{size}B" if "." in short else short


def _wrong_size(member: str) -> str:
    try:
        spelling = _exact(parse_bytes(member))
    except (ValueError, OverflowError) as error:
        return str(error)
    return "" if member == spelling else f"{member!r} is written {spelling!r} in the name of a metric"


def _wrong_limit(limit: Limit, declared: str | None) -> str:
    """Why a threshold cannot be meant for a metric in the unit ``declared``; empty when it can."""
    if limit.unit != declared and (limit.unit or declared == "%"):  # 0.9 alone could be a share, or under one percent
        return f"the threshold is in {limit.unit!r}, but the metric is measured in {declared!r}"
    if declared == "%" and not 0 <= limit.value <= 100:
        return f"{limit.value:g} % is not between 0 and 100 %"
    if declared == "%" and limit.op in (">", ">=") and 0 < limit.value < 1:
        return f"{limit.value:g} % is less than one in a hundred; did you mean {limit.value * 100:g} %?"
    return ""


def declared_unit(metric: str, metrics: Mapping[str, str]) -> str | None:
    """The unit of a metric by its name, or by a declared pattern such as ``busbw.*``; None when there is none."""
    if metric in metrics:
        return metrics[metric]
    family = f"{metric.partition('.')[0]}.*"
    return metrics.get(family) if "." in metric else None


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
        raise UsageError(f"{source.of(path)}: {'.'.join(path) or 'trial'}: {problem}")


def _refuse_unknown(tree: Mapping[str, Any], model: type[BaseModel], source: Source, path: tuple[str, ...]) -> None:
    for key, value in tree.items():
        field = model.model_fields.get(key)
        if field is None:
            where = ".".join((*path, key))
            near, valid = _nearest(key, model.model_fields), ", ".join(model.model_fields) or "none"
            raise UsageError(f"{source.of([*path, key])}: unknown key {where!r}{near} (valid: {valid})")
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
        raise UsageError(f"{source.of(where)}: {told}") from error
    except OverflowError as error:
        raise UsageError(f"{source.of(path)}: {'.'.join(path) or 'trial'}: a number is too large: {error}") from error


def _nearest(word: str, valid: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""
