"""Slurm's notation for lists of hosts: ``n[1-4,7],login0``. Pure: needs no command of Slurm."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

MAX_HOSTS = 100_000  # more are a typing error, such as n[1-99999999]
_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")  # up to a comma that is not in brackets
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> list[str]:
    """Return the hosts of a list in its order, each once: ``n[08-10]`` → n08, n09, n10. Raises ValueError."""
    hosts: dict[str, None] = {}
    end = 0  # of the last valid item
    for match in _ITEM.finditer(text):
        separator = text[end : match.start()]
        if separator not in ("", ","):
            break
        for host in _hosts(match[0].strip(), text):
            hosts[host] = None
            if len(hosts) > MAX_HOSTS:
                raise ValueError(f"{text[:80]!r} has more than {MAX_HOSTS:,} hosts")
        end = match.end()
    if end < len(text) or not hosts:
        raise _invalid(text)
    return list(hosts)


def _hosts(item: str, text: str) -> Iterator[str]:
    """Yield the hosts of one item of the list, such as ``rack[0-1]n[1-4]``."""
    if not item or re.search(r"[\s/]", item):  # sbatch takes a name with / for a file
        raise _invalid(text)
    alternatives = []  # for each part of the item
    for in_brackets, plain in _PART.findall(item):
        alternatives.append([plain] if plain else _numbers(in_brackets, text))
    return ("".join(combination) for combination in product(*alternatives))


def _numbers(ranges: str, text: str) -> list[str]:
    """Return the numbers of ``1-4,7``. Those of a range are filled with zeros to the width of the first number."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or last < first:
            raise _invalid(text)
        if last - first >= MAX_HOSTS:
            raise ValueError(f"{text[:80]!r} has more than {MAX_HOSTS:,} hosts")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _invalid(text: str) -> ValueError:
    return ValueError(f"{text[:80]!r} is not a list of hosts: expected names and ranges such as n[1-4,7],login0")
