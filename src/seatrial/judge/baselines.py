"""What hardware is known to do: data/skus/*.yaml, every number with its source. Unknown is unknown, never a guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources

import yaml
from pydantic import FiniteFloat, JsonValue

from seatrial.model import Frozen


class Expected(Frozen):
    """A value that good hardware reaches, for one shape of cluster."""

    gpus: int  # in the whole measurement, over all nodes
    nodes: int
    value: FiniteFloat
    unit: str
    source: str


class Sku(Frozen):
    """One GPU model. ``nvml_names`` are matched exactly: a near miss is another GPU."""

    name: str
    nvml_names: tuple[str, ...]
    expected: Mapping[str, tuple[Expected, ...]]


@cache
def skus() -> tuple[Sku, ...]:
    """Every SKU that ships with seatrial. Raises ValueError when two claim the same NVML name."""
    folder = resources.files("seatrial") / "data" / "skus"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    found = tuple(Sku.model_validate(yaml.safe_load(entry.read_text(encoding="utf-8"))) for entry in files)
    names = [name for sku in found for name in sku.nvml_names]
    if len(names) != len(set(names)):
        raise ValueError(f"two SKU files claim one NVML name: {sorted(names)}")
    return found


def find(key: str, facts: Mapping[str, JsonValue], known: Sequence[Sku]) -> tuple[Sku, Expected] | str:
    """The expected value of ``key`` for the GPU and shape that ``facts`` name, or a sentence on what is not known.

    The facts read are ``gpu`` (NVML name), ``world_size`` and ``nodes``, as the check recorded them.
    """
    sku = next((sku for sku in known if facts.get("gpu") in sku.nvml_names), None)
    if sku is None:
        return f"no SKU data for {facts.get('gpu') or 'an unnamed device'}"
    for expected in sku.expected.get(key, ()):
        if (expected.gpus, expected.nodes) == (facts.get("world_size"), facts.get("nodes")):
            return sku, expected
    return f"{sku.name} has no known {key} for {facts.get('world_size')} GPUs on {facts.get('nodes')} nodes"
