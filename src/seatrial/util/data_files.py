"""The facts that ship with seatrial: the YAML files in data/."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

# libyaml's, where PyYAML has it, as its wheels do: it makes the same of our files, in a tenth of the time
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse(text: str) -> Any:
    """What YAML of our own says. Raises YAMLError."""
    return yaml.load(text, Loader=_LOADER)


def read(name: str) -> Any:
    """What the file ``name`` in data/ holds."""
    return parse((resources.files("seatrial") / "data" / name).read_text(encoding="utf-8"))


def read_all(folder: str) -> list[Any]:
    """What each file of this folder in data/ holds, in the order of their names."""
    entries = (resources.files("seatrial") / "data" / folder).iterdir()
    names = sorted(entry.name for entry in entries if entry.name.endswith(".yaml"))
    return [read(f"{folder}/{name}") for name in names]
