"""Names that changed since schema version 1, and the rewriting of YAML files of earlier versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

import yaml

from seatrial.config.expect import declared_unit
from seatrial.config.strict_yaml import StrictLoader, error_text
from seatrial.model import Threshold, UsageError, has_scale
from seatrial.util import data_files

Names = Mapping[str, str]  # old name → new name
_REFERENCE_FIELDS: Names = {"floor": "required"}  # of a reference value in a baseline


@cache
def table() -> dict[str, Any]:
    """Return the sections of data/renames.yaml."""
    content: dict[str, Any] = data_files.read("renames.yaml")
    return content


def new_check(name: str) -> str:
    """Return the current name of a check."""
    return str(table()["checks"].get(name, name))


def new_metric(check: str, name: str) -> str:
    """Return the current name of a metric; ``check``: the old or the new name of its check."""
    return _renamed(name, _names("metrics", check))


def new_series(check: str, name: str) -> str:
    """Return the current name of a series.

    Without an entry of its own in the table, a series is renamed as the metric or metric family of the same name.
    """
    if name in (names := _names("series", check)):
        return names[name]
    family = new_metric(check, f"{name}.*").removesuffix(".*")
    return family if family != name else new_metric(check, name)


def new_fact(check: str, name: str) -> str:
    """Return the current name of a fact."""
    return _renamed(name, _names("facts", check))


def new_option(check: str, name: str) -> str:
    """Return the current name of an option of ``check``."""
    return _renamed(name, _names("options", check))


def new_option_value(check: str, option: str, value: Any) -> Any:
    """Return ``value``, a name, a KEY=VALUE text or a list of these, with current names.

    ``option``: the new name of the option that has this value.
    """
    if isinstance(value, list):
        return [new_option_value(check, option, item) for item in value]
    if option == "overrides" and isinstance(value, str) and "=" in value:
        return new_override(value)
    for pattern, options in table()["option_values"].items():
        if isinstance(value, str) and _matches(pattern, check) and value in options.get(option, {}):
            return options[option][value]
    return value


def new_override(text: str) -> str:
    """Return ``KEY=VALUE`` of a training config with current names."""
    key, _, value = text.partition("=")
    new = table()["training"].get(key, key)
    return f"{new}={table()['training_values'].get(new, {}).get(value, value)}"


def hint(section: str, name: str, check: str = "") -> str:
    """Return the end of an error message with the current name of ``name``; empty if the name did not change.

    ``section`` is a section of data/renames.yaml.
    """
    new = _renamed(name, _names(section, check) if check else table()[section])
    return "" if new == name else f"; it is now called {new!r}, and `seatrial migrate FILE` rewrites a file"


def migrated(text: str, source: str, units: Mapping[str, Mapping[str, str]]) -> tuple[str, list[str]]:
    """Return a trial file, training config or baseline as this version reads it, and a line per change.

    Names become the current ones, and thresholds get the unit of their metric. Comments stay.
    ``units``: check → metric → unit. Raises UsageError if ``text`` is none of these files.
    """
    try:
        root = yaml.compose(text, Loader=StrictLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"cannot read {source}: not valid YAML: {error_text(error)}") from error
    keys = {key.value for key, _ in root.value} if isinstance(root, yaml.MappingNode) else set()
    if "checks" in keys:
        edits = list(_trial_edits(root, units))
    elif "run_name" in keys:
        edits = list(_training_edits(root))
    elif "expected" in keys:
        edits = list(_baseline_edits(root))
    else:
        raise UsageError(
            f"{source}: expected a trial (key checks), a training config (key run_name), a baseline (key expected) "
            "or a trial.json"
        )
    changes = [f"line {node.start_mark.line + 1}: {node.value} -> {new}" for node, new in edits]
    # from the end of the text, so that the positions of the other edits stay valid
    for node, new in sorted(edits, key=lambda edit: edit.node.start_mark.index, reverse=True):
        old = text[node.start_mark.index : node.end_mark.index]
        text = text[: node.start_mark.index] + old.replace(node.value, new) + text[node.end_mark.index :]
    return text, changes


class _Edit(NamedTuple):
    node: yaml.ScalarNode  # a key or value of the file
    new: str  # its new text


def _trial_edits(root: yaml.Node | None, units: Mapping[str, Mapping[str, str]]) -> Iterator[_Edit]:
    yield from _key_edits(root, table()["trial"])
    for check, settings in _items(_child(root, "checks")):
        yield from _edit(check, new_check(check.value))
        for metric, threshold in _items(_child(settings, "expect")):
            name = new_metric(check.value, metric.value)
            yield from _edit(metric, name)
            for scalar in _scalars(threshold):
                unit = declared_unit(name, units.get(new_check(check.value), {})) or ""
                yield from _edit(scalar, _with_unit(scalar.value, unit))
        for option, value in _items(_child(settings, "options")):
            name = new_option(check.value, option.value)
            yield from _edit(option, name)
            for scalar in _scalars(value):
                yield from _edit(scalar, new_option_value(check.value, name, scalar.value))


def _with_unit(threshold: str, unit: str) -> str:
    """Return a threshold with the unit that earlier versions assumed.

    No % is added: earlier versions rejected a percentage without its unit.
    """
    try:
        parsed = Threshold.parse(threshold)
    except ValueError:  # reported when the trial is loaded
        return threshold
    return f"{threshold.rstrip()} {unit}" if not parsed.unit and unit != "%" and has_scale(unit) else threshold


def _training_edits(root: yaml.Node | None) -> Iterator[_Edit]:
    yield from _key_edits(root, table()["training"])
    for dotted_key, new_values in table()["training_values"].items():
        group, _, key = dotted_key.partition(".")
        for scalar in _scalars(_child(_child(root, group), key)):
            yield from _edit(scalar, new_values.get(scalar.value, scalar.value))


def _baseline_edits(root: yaml.Node | None) -> Iterator[_Edit]:
    for reference, values in _items(_child(root, "expected")):
        yield from _edit(reference, table()["references"].get(reference.value, reference.value))
        for entry in values.value if isinstance(values, yaml.SequenceNode) else ():
            for field, _ in _items(entry):
                yield from _edit(field, _REFERENCE_FIELDS.get(field.value, field.value))


def _key_edits(root: yaml.Node | None, renamed: Names) -> Iterator[_Edit]:
    """Yield edits of keys and of keys one level below, which ``renamed`` lists as ``group.key``."""
    for key, value in _items(root):
        yield from _edit(key, renamed.get(key.value, key.value))
        for inner_key, _ in _items(value):
            if new := renamed.get(f"{key.value}.{inner_key.value}"):
                yield from _edit(inner_key, new.rpartition(".")[2])


def _edit(node: yaml.ScalarNode, new: str | None) -> Iterator[_Edit]:
    """Yield the edit of ``node``; nothing if its text is ``new`` already, or ``new`` is empty."""
    if new and node.value != new:
        yield _Edit(node, new)


def _child(node: yaml.Node | None, name: str) -> yaml.Node | None:
    """Return the value of the key ``name``; None if the node is no mapping with this key."""
    return next((value for key, value in _items(node) if key.value == name), None)


def _items(node: yaml.Node | None) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """Return keys and values of a mapping; empty for any other node."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return [(key, value) for key, value in pairs if isinstance(key, yaml.ScalarNode)]


def _scalars(node: yaml.Node | None) -> list[yaml.ScalarNode]:
    """Return a scalar, or the scalars of a list; empty for any other node."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return [scalar for scalar in nodes if isinstance(scalar, yaml.ScalarNode)]


def _names(section: str, check: str) -> dict[str, str]:
    """Return old name → new name for a check; entries of the check itself take precedence over those of patterns."""
    names: dict[str, str] = {}
    for exact in (False, True):
        for pattern, renamed in table()[section].items():
            if _matches(pattern, check) and (pattern == check) is exact:
                names |= renamed
    return names


def _matches(pattern: str, check: str) -> bool:
    """Return whether ``pattern`` matches the name of the check, or is its old name."""
    return fnmatchcase(check, pattern) or check == table()["checks"].get(pattern)


def _renamed(name: str, names: Names) -> str:
    """Return ``name`` with its current parts.

    The table has the whole name, or its family (``busbw.*`` for ``busbw.1GiB``). A last part that is the name of a
    training run is replaced too.
    """
    if name in names:
        new = names[name]
    else:
        family, dot, member = name.partition(".")
        new = names[f"{family}.*"].removesuffix("*") + member if dot and f"{family}.*" in names else name
    head, dot, run = new.rpartition(".")
    return f"{head}.{table()['runs'].get(run, run)}" if dot else new
