"""The algorithm and protocol that NCCL selected for an operation at a size, from the facts of checks.

NCCL's choice depends on operation, dtype and buffers. A choice is used only for a measurement with the same three.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from seatrial.hardware.links import NCCL_ALGO_NAMES, FactRole, HasFactRoles, mapping, role_facts
from seatrial.model import Measurement, size_label


class AlgorithmProtocol(NamedTuple):
    """``algorithm``: a value of NCCL_ALGO. ``protocol``: its name in NCCL's log; empty if it was not logged."""

    algorithm: str
    protocol: str


OperationKey = tuple[str, str, str]  # operation, dtype, buffers
Choices = Mapping[OperationKey, Mapping[str, AlgorithmProtocol]]  # → size label → algorithm and protocol

# Values that the facts have in place of an algorithm. Records of schema version 1 use "not told"
_NO_ALGORITHM = ("not logged", "not told", "not measured", "point to point")
# The only operation that collectives.nccl_settings measures
_SETTINGS_KEY: OperationKey = ("all_reduce", "float32", "torch's allocator")


def read_choices(measurements: Sequence[Measurement], checks: Mapping[str, HasFactRoles]) -> Choices:
    """NCCL's choices by operation, dtype, buffers and size.

    Older records have choices only from the check of NCCL settings (role ``algorithms_by_setting``).
    """
    choices: dict[OperationKey, dict[str, AlgorithmProtocol]] = {}
    for by_setting in _distinct("algorithms_by_setting", measurements, checks):
        choices.setdefault(_SETTINGS_KEY, {}).update(_choices_by_size(mapping(by_setting.get("default"))))
    for by_operation in _distinct("algorithms", measurements, checks):
        for operation, choice in by_operation.items():
            key = operation, str(mapping(choice).get("dtype")), str(mapping(choice).get("buffers"))
            choices.setdefault(key, {}).update(_choices_by_size(mapping(mapping(choice).get("by_size"))))
    return choices


def _distinct(
    role: FactRole, measurements: Sequence[Measurement], checks: Mapping[str, HasFactRoles]
) -> Iterator[Mapping[str, Any]]:
    """Yield the facts with this role. Of consecutive nodes with equal facts, only the first node's fact is yielded."""
    values = (mapping(value) for _, value in role_facts(role, measurements, checks))
    return (value for value, _ in groupby(filter(None, values)))


def select_choices(choices: Choices, operation: str, facts: Mapping[str, Any]) -> Mapping[str, AlgorithmProtocol]:
    """Size label → choice, for the operation with the dtype and the buffers in the measurement's ``facts``."""
    return choices.get((operation, str(facts.get("dtype")), str(facts.get("buffers"))), {})


def _choices_by_size(by_size: Mapping[str, Any]) -> Iterator[tuple[str, AlgorithmProtocol]]:
    """Yield each choice twice: with the label of its requested size, and with the label of its exact size."""
    for name, choice in by_size.items():
        algorithm = str(mapping(choice).get("algorithm") or _NO_ALGORITHM[0])
        if algorithm.startswith(_NO_ALGORITHM):
            continue
        protocol = str(choice.get("protocol") or "")
        logged = AlgorithmProtocol(
            NCCL_ALGO_NAMES.get(algorithm, algorithm), "" if protocol in _NO_ALGORITHM else protocol
        )
        yield name, logged
        if isinstance(size := choice.get("bytes"), int):
            yield size_label(size), logged
