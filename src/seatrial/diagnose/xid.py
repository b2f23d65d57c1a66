"""Signatures of NVIDIA's Xids: the facts of data/xid_catalog.yaml with the policy of data/xid_policy.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from seatrial.diagnose.signature import Row
from seatrial.discover.kernel_log import XID
from seatrial.util import data_files

_EXAMPLE = "NVRM: Xid (PCI:0000:3b:00): "
_WORD_BITS = 32
_MAX_DIGITS = 6
FILES = ("xid_catalog.yaml", "xid_policy.yaml")


def xid_rows() -> Iterator[Row]:
    """A signature for each Xid of the catalog, for groups of NVLink errors (Xid 144 to 150), and for other Xids."""
    catalog, policy = map(data_files.read, FILES)
    nvlink: dict[int, dict[str, list[Row]]] = {}  # Xid → ID → facts of the errors with the same unit and actions
    for fact in catalog["nvlink"]:
        nvlink.setdefault(fact["xid"], {}).setdefault(_nvlink_id(fact), []).append(fact)
    for fact in catalog["xids"]:
        errors = nvlink.get(fact["xid"], {})
        generated = _xid_row(fact, policy, catalog["source"])
        words = "|".join(dict.fromkeys(_words(error) for group in errors.values() for error in group))
        if words:
            generated["pattern"] += rf"(?![^(\n]{{0,120}}\((?:{words}))"
        own = dict(policy["xids"].get(fact["xid"], {}))
        generated["pattern"] += own.pop("ends", "")
        yield generated | own
        for identifier, group in errors.items():
            yield _nvlink_row(identifier, group, policy, catalog["source"])
    defined = frozenset(str(fact["xid"]) for fact in catalog["xids"])
    yield policy["other"] | {"id": "xid.other", "pattern": rf"{XID}{other_numbers(defined)},"}


def other_numbers(defined: frozenset[str], prefix: str = "") -> str:
    """The pattern of numbers with up to _MAX_DIGITS digits that are not in ``defined``, without their ``prefix``.

    It has no lookahead, which hyperscan ignores: each line of a defined Xid would be a candidate.
    """
    free, branches = "", []  # free: the next digits that no defined number has
    for digit in "0123456789":
        number = prefix + digit
        if not any(each.startswith(number) for each in defined):
            free += digit
            continue
        more_digits = other_numbers(defined, number) if len(number) < _MAX_DIGITS else "(?!)"
        branches.append(f"{digit}{more_digits}{'' if number in defined else '?'}")
    if free:
        branches.append(rf"[{free}]\d{{0,{_MAX_DIGITS - len(prefix) - 1}}}")
    return f"(?:{'|'.join(branches)})"


def _xid_row(fact: Row, policy: Mapping[str, Any], source: str) -> Row:
    number, is_described = fact["xid"], fact["meaning"] not in ("", "Unused")
    meaning = fact["meaning"] if is_described else f"{fact['mnemonic']} (no description in NVIDIA's catalog)"
    other = 1000 + number  # an Xid that is not in the catalog
    return {
        "id": f"xid.{number}",
        "title": f"Xid {number}: {meaning}",
        "pattern": rf"{XID}{number},",
        "cause": f"{meaning[0].upper()}{meaning[1:].rstrip('.')}. {_nvidia_advice(fact, policy)}",
        "source": source,
        # the driver's format: "NVRM: Xid (PCI:%04x:%02x:%02x): %d, "
        "examples": [f"{_EXAMPLE}{number}, pid='<unknown>', name=<unknown>"],
        "counter_examples": [f"{_EXAMPLE}{other}, pid={number}, name={number},", f"Xid {number} is in the catalog"],
        **policy["advice"][fact["immediate"]],
    }


def _nvlink_row(identifier: str, group: list[Row], policy: Mapping[str, Any], source: str) -> Row:
    first = group[0]
    words = "|".join(dict.fromkeys(map(_words, group)))
    severity, unit = first["severity"].lower(), _unit(first)
    begin = f"{_EXAMPLE}{first['xid']}, {unit} {'Nonfatal' if severity == 'non-fatal' else 'Fatal'} XC0 i0 Link 00"
    effects = " or ".join(dict.fromkeys(fact["effect"] for fact in group))
    return {
        "id": identifier,
        "title": f"Xid {first['xid']}: NVLink error in {unit} ({severity})",
        "pattern": rf"{XID}{first['xid']}, [^(\n]{{0,120}}\((?:{words})",
        "cause": f"NVIDIA decodes the status words of this line as a {severity} error. Effect {effects}. "
        f"{_nvidia_advice(first, policy)}",
        "source": f"{source}, table of Xids 144 to 150",
        # the format of the driver, with the words of the catalog
        "examples": list(dict.fromkeys(f"{begin} ({_example_words(fact)})" for fact in group)),
        "counter_examples": [f"{begin} (0x3f00003f 0x7fffffff 0x00000000)"],
        **policy["advice"][first["immediate"]],
    }


def _nvidia_advice(fact: Row, policy: Mapping[str, Any]) -> str:
    texts = [policy["nvidia_actions"].get(fact[key], fact[key]) for key in ("immediate", "investigatory")]
    texts = [text for text in texts if text]
    return f"NVIDIA's advice: {'; then '.join(dict.fromkeys(texts))}." if texts else "NVIDIA gives no advice."


def _nvlink_id(fact: Row) -> str:
    name = "_".join(part for part in (_unit(fact), fact["immediate"], fact["investigatory"]) if part)
    return f"xid.{fact['xid']}.{re.sub('[^a-z0-9]+', '_', name.lower()).strip('_')}"


def _unit(fact: Row) -> str:
    """The unit as the log prints it: TLW_RX for "TLW_RX/TLW_RX_PIPE0"."""
    name: str = fact["unit"]
    return name.partition("/")[0]


def _words(fact: Row) -> str:
    """The pattern of both status words of an NVLink error."""
    patterns = "|".join(_hex_pattern(bits) for bits in fact["intrinfo"])
    return f"0x(?:{patterns}) {fact['status']}"


def _hex_pattern(bits: str) -> str:
    """The pattern of a word of 32 bits in hex; "-" is any bit."""
    digits = []
    for start in range(0, _WORD_BITS, 4):
        mask = bits[start : start + 4]
        matching = re.compile(mask.replace("-", "."))
        values = [f"{value:x}" for value in range(16) if matching.fullmatch(f"{value:04b}")]
        digits.append(values[0] if len(values) == 1 else "[0-9a-f]" if len(values) == 16 else f"[{''.join(values)}]")
    return "".join(digits)


def _example_words(fact: Row) -> str:
    intrinfo = int(fact["intrinfo"][0].replace("-", "0"), 2)
    return f"0x{intrinfo:08x} {fact['status']} 0x00000000 0x00000000 0x00000000 0x00000000"
