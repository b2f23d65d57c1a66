"""Which algorithm and protocol NCCL chose for an operation at a size, as the checks read it from its log.

What it chose for another operation, another type or other buffers says nothing: each is looked up as it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from seatrial.hardware.links import FactRole, HasFactRoles, measurements_with_roles, role_facts
from seatrial.model import Measurement, format_bytes, parse_bytes

AlgorithmProtocol = tuple[str, str]  # algorithm and protocol; empty where the log does not say
OperationKey = tuple[str, str, str]  # operation, type, buffers
Choices = Mapping[OperationKey, Mapping[str, AlgorithmProtocol]]  # … → size label → way

# NCCL's log has them in capitals; the variable by which a person forces one, as here
_AS_NCCL_ALGO = {
    "RING": "Ring",
    "TREE": "Tree",
    "NVLS_TREE": "NVLSTree",
    "COLLNET_CHAIN": "CollNetChain",
    "COLLNET_DIRECT": "CollNetDirect",
}
_NONE = ("not told", "not measured", "point to point")  # what these checks say where there is none
_CONTRASTED: OperationKey = ("all_reduce", "float32", "torch's allocator")  # what a contrast measures, and no other


def read_choices(measurements: Sequence[Measurement], checks: Mapping[str, HasFactRoles]) -> Choices:
    """Of every operation that a check asked NCCL for; a contrast knows of one, and is all that older runs have."""
    telling = measurements_with_roles(measurements, checks)
    chosen: dict[OperationKey, dict[str, AlgorithmProtocol]] = {}
    for by_case in _distinct("algorithms_by_setting", telling, checks):
        chosen.setdefault(_CONTRASTED, {}).update(_ways(_mapping(by_case.get("default"))))
    for by_operation in _distinct("algorithms", telling, checks):
        for operation, choice in by_operation.items():
            shape = operation, str(_mapping(choice).get("dtype")), str(_mapping(choice).get("buffers"))
            chosen.setdefault(shape, {}).update(_ways(_mapping(_mapping(choice).get("by_size"))))
    return chosen


def _distinct(
    role: FactRole, measurements: Sequence[Measurement], checks: Mapping[str, HasFactRoles]
) -> Iterator[Mapping[str, Any]]:
    """The facts of this role, once where one node after the other has the same; most ranks have none."""
    every = (_mapping(value) for _, value in role_facts(role, measurements, checks))
    return (value for value, _ in groupby(filter(None, every)))


def choices_for(chosen: Choices, operation: str, facts: Mapping[str, Any]) -> Mapping[str, AlgorithmProtocol]:
    """Those of one measurement, by the type and the buffers that its ``facts`` name."""
    return chosen.get((operation, str(facts.get("dtype")), str(facts.get("buffers"))), {})


@lru_cache  # of the same sizes each of a thousand nodes tells
def size_label(size: float) -> str:
    """As checks name a size in their metrics."""
    short = format_bytes(size)
    return f"{int(size)}B" if "." in short or parse_bytes(short) != int(size) else short


def _ways(by_size: Mapping[str, Any]) -> Iterator[tuple[str, AlgorithmProtocol]]:
    """Under the size that was asked for, and under the exact one."""
    for name, choice in by_size.items():
        algorithm = str(_mapping(choice).get("algorithm") or _NONE[0])
        if algorithm.startswith(_NONE):
            continue
        protocol = str(choice.get("protocol") or "")
        way = _AS_NCCL_ALGO.get(algorithm, algorithm), "" if protocol in _NONE else protocol
        yield name, way
        if isinstance(size := choice.get("bytes"), int):
            yield size_label(size), way


def _mapping(value: Any) -> Mapping[str, Any]:
    """Empty where a fact is of another shape, as in a record that was edited: not known."""
    return value if isinstance(value, Mapping) else {}
