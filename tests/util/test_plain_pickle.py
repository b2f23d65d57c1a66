"""Pickles of plain data are read; hostile ones end in a clear error, without running code or filling memory."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.util import plain_pickle

_SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text()
_PLAIN = st.recursive(
    _SCALARS | st.binary(),
    lambda children: (
        st.lists(children)
        | st.dictionaries(_SCALARS, children)
        | st.tuples(children)
        | st.tuples(children, children, children, children)
    ),
    max_leaves=20,
)


@given(_PLAIN, st.integers(2, 5))
def test_plain_data_is_read_as_pickle_reads_it(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    calls_functions = b"__builtin__\nbytes" in data or b"_codecs\nencode" in data  # for bytes in protocol 2
    if not calls_functions:
        assert plain_pickle.is_pickle(data)
        assert plain_pickle.load(data) == value


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_code_is_not_run(protocol: int, tmp_path: Path) -> None:
    hostile = {"entries": [Hostile(tmp_path / "run")], "pg_config": {}}
    with pytest.raises(ValueError, match="others can run code"):
        plain_pickle.load(pickle.dumps(hostile, protocol=protocol))
    assert not (tmp_path / "run").exists()


def _shared_tuples() -> bytes:
    """A dict whose key is a tuple of tuples that share their items: its hash takes 2**60 steps."""
    return b"\x80\x04}" + b"K\x01" + b"\x94h\x00\x86" + b"".join(b"\x94h%c\x86" % n for n in range(1, 60)) + b"Ns."


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x80\x02B\xff\xff\xff\x7fabc.", "claims 2147483647 bytes"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.", "claims 9223372036854775807 bytes"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "claims"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f" + b"1" * 99 + b".", "integer of 2147483647 bytes"),
        (b"\x80\x02" + b"(" * 10_000, "nested deeper"),
        (_shared_tuples(), "dict key of type tuple"),
        (b"\x80\x02K\x01r\xff\xff\xff\xff", "truncated"),  # a memo of 2**32 entries
        (b"\x80\x02K\x01N\x61.", "no list"),
        (b"\x80\x02]", "truncated"),
        (b"\x80\x02a.", "truncated"),
        (b"\x80\x02h\x07.", "truncated"),
        (b"\x80\x02ctorch\nTensor\n.", "GLOBAL"),
        (b"\x80\x09N.", "protocol 9"),
        (b"", "truncated"),
    ],
)
def test_hostile_or_damaged_pickle_is_refused_in_little_memory(data: bytes, reason: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=reason):
            plain_pickle.load(data)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_number_of_opcodes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MAX_OPCODES", 100)
    assert plain_pickle.load(b"\x80\x02]" + b"Na" * 48 + b".") == [None] * 48
    with pytest.raises(ValueError, match="more than 100 opcodes"):
        plain_pickle.load(b"\x80\x02]" + b"Na" * 50 + b".")


def test_list_in_itself_is_harmless() -> None:
    value = plain_pickle.load(b"\x80\x04]\x94h\x00a.")
    assert value[0] is value
