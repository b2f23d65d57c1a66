"""Readers of the YAML files that ship with seatrial, in data/."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

# libyaml's loader, which PyYAML's wheels include: the same result in a tenth of the time
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse(yaml_text: str) -> Any:
    """Return the content of a YAML text that ships with seatrial. Raises YAMLError."""
    return yaml.load(yaml_text, Loader=_LOADER)


def read(name: str) -> Any:
    """Return the content of the file ``name`` in data/."""
    return parse(text(name))


def text(name: str) -> str:
    """Return the text of the file ``name`` in data/."""
    return (resources.files("seatrial") / "data" / name).read_text(encoding="utf-8")


def read_all(folder: str) -> list[Any]:
    """Return the content of each YAML file in this folder of data/, sorted by file name."""
    return [parse(each) for each in texts(folder)]


def texts(folder: str) -> list[str]:
    """Return the text of each YAML file in this folder of data/, sorted by file name."""
    entries = (resources.files("seatrial") / "data" / folder).iterdir()
    files = sorted((entry for entry in entries if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return [file.read_text(encoding="utf-8") for file in files]
