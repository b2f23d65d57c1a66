"""Reads pickles of plain data without running code: dict, list, tuple, str, bytes, int, float, bool and None.

Python's own unpickler can be restricted in the classes that it loads, but not in memory. A wrong length or memo index
in a damaged file can make it allocate gigabytes. Here a length is checked against the size of the data, and the number
of opcodes is limited. Opcodes: pickletools.opcodes, protocols 2 to 5; torch's writer uses protocol 2.
"""

from __future__ import annotations

import pickle
import reprlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

# An opcode creates at most one object, of up to 72 bytes plus its text. A dump of the flight recorder with 20,000
# collectives has 3 million opcodes
MAX_OPCODES = 5_000_000
_MAX_MARKS = 100  # nested containers that are still open
_MAX_INTEGER_BYTES = 16  # maximum size of one integer
_KEY_TYPES = (str, int, float, bytes, type(None))  # no tuples: the hash of nested tuples can take exponential time
_UNSUPPORTED = (
    "GLOBAL STACK_GLOBAL INST OBJ NEWOBJ NEWOBJ_EX REDUCE BUILD PERSID BINPERSID EXT1 EXT2 EXT4 NEXT_BUFFER "
    "READONLY_BUFFER FROZENSET EMPTY_SET ADDITEMS"
)
_UNSUPPORTED_NAMES = {getattr(pickle, name)[0]: name for name in _UNSUPPORTED.split()}  # opcode → name


def load(data: bytes) -> Any:
    """The object in a pickle. Raises ValueError if it holds anything but plain data, is damaged or too large."""
    reader = _Reader(data)
    try:
        return reader.read()
    except (struct.error, IndexError, KeyError) as error:
        raise ValueError(f"the pickle is truncated or damaged at byte {reader.position}") from error


def is_pickle(start: bytes) -> bool:
    """Whether a file that begins with ``start`` is a pickle of protocol 2 to 5."""
    return len(start) > 1 and start[0] == pickle.PROTO[0] and 2 <= start[1] <= 5


class _Reader:
    """A stack machine that executes the opcodes of a pickle, but only opcodes that build plain data."""

    def __init__(self, data: bytes) -> None:
        self.position = 0
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[int] = []  # height of the stack at each MARK
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        """Execute the opcodes up to STOP; return the object. The most frequent ones are inline, for speed."""
        data, stack, memo = self._data, self._stack, self._memo
        get, get_long, put, put_long, byte = _FREQUENT  # get and put: from and to the memo
        for _ in range(MAX_OPCODES):
            opcode, position = data[self.position], self.position + 1
            if opcode == get:
                stack.append(memo[data[position]])
                self.position = position + 1
            elif opcode == get_long:
                stack.append(memo[int.from_bytes(data[position : position + 4], "little")])
                self.position = position + 4
            elif opcode == put:
                memo[data[position]] = stack[-1]
                self.position = position + 1
            elif opcode == put_long:
                memo[int.from_bytes(data[position : position + 4], "little")] = stack[-1]
                self.position = position + 4
            elif opcode == byte:
                stack.append(data[position])
                self.position = position + 1
            elif action := _ACTIONS.get(opcode):
                self.position = position
                method, argument = action
                method(self, argument)
            elif opcode == pickle.STOP[0]:
                return stack[-1]
            else:
                name = _UNSUPPORTED_NAMES.get(opcode, repr(bytes([opcode])))
                raise ValueError(
                    f"the pickle has opcode {name} at byte {self.position}; only opcodes of plain "
                    "data are read, since others can run code"
                )
        raise ValueError(f"the pickle has more than {MAX_OPCODES} opcodes")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def push_new(self, kind: type[Any]) -> None:
        self.push(kind())

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        taken = self._data[self.position : self.position + size]
        if len(taken) < size:
            raise ValueError(
                f"the pickle claims {size} bytes at byte {self.position}, where {len(taken)} are left: "
                "truncated or damaged"
            )
        self.position += size
        return taken

    def number(self, layout: str) -> Any:
        """Return the next number; ``layout``: its format of the module struct."""
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return value

    def push_number(self, layout: str) -> None:
        self.push(self.number(layout))

    def push_bytes(self, layout: str) -> None:
        """Push bytes; ``layout``: the format of their number."""
        self.push(self.take(self.number(layout)))

    def push_text(self, layout: str) -> None:
        """Push a text; ``layout``: the format of its length."""
        self.push(self.take(self.number(layout)).decode("utf-8", errors="replace"))

    def push_integer(self, layout: str) -> None:
        """Push an integer; ``layout``: the format of its number of bytes."""
        size = self.number(layout)
        if not 0 <= size <= _MAX_INTEGER_BYTES:
            raise ValueError(f"the pickle has an integer of {size} bytes")
        self.push(int.from_bytes(self.take(size), "little", signed=True))

    def mark(self, _: None) -> None:
        if len(self._marks) >= _MAX_MARKS:
            raise ValueError(f"the pickle is nested deeper than {_MAX_MARKS} levels")
        self._marks.append(len(self._stack))

    def push_tuple(self, count: int | None) -> None:
        self.push(tuple(self._popped(count)))

    def append(self, count: int | None) -> None:
        """Append popped objects to the list below them."""
        items = self._popped(count)
        if not isinstance(self._stack[-1], list):
            raise ValueError("the pickle appends to an object that is no list: damaged")
        self._stack[-1].extend(items)

    def set_items(self, count: int | None) -> None:
        """Add popped keys and values to the dict below them."""
        items = self._popped(count)
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("the pickle sets items of an object that is no dict: damaged")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, _KEY_TYPES):
                raise ValueError(f"the pickle has a dict key of type {type(key).__name__}")
            target[key] = value

    def _popped(self, count: int | None) -> list[Any]:
        """Remove the last ``count`` objects of the stack, or those since the last mark, and return them."""
        height = self._marks.pop() if count is None else len(self._stack) - count
        if not 0 <= height <= len(self._stack):
            raise IndexError
        items = self._stack[height:]
        del self._stack[height:]
        return items

    def memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def protocol(self, layout: str) -> None:
        if (version := self.number(layout)) > 5:
            raise ValueError(f"the pickle has protocol {reprlib.repr(version)}, expected at most 5")


_FREQUENT = (pickle.BINGET[0], pickle.LONG_BINGET[0], pickle.BINPUT[0], pickle.LONG_BINPUT[0], pickle.BININT1[0])
# Opcode → the method that executes it, and the argument of the method. None as a count: up to the last mark
_ACTIONS: Mapping[int, tuple[Callable[[_Reader, Any], object], Any]] = {
    code[0]: (method, argument)
    for method, arguments in (
        (_Reader.protocol, {pickle.PROTO: "<B"}),
        (_Reader.number, {pickle.FRAME: "<Q"}),
        (_Reader.mark, {pickle.MARK: None}),
        (_Reader.push, {pickle.NONE: None, pickle.NEWTRUE: True, pickle.NEWFALSE: False}),
        (_Reader.push_number, {pickle.BININT: "<i", pickle.BININT2: "<H", pickle.BINFLOAT: ">d"}),
        (_Reader.push_integer, {pickle.LONG1: "<B", pickle.LONG4: "<i"}),
        (
            _Reader.push_text,
            {pickle.SHORT_BINUNICODE: "<B", pickle.BINUNICODE: "<I", pickle.BINUNICODE8: "<Q"},
        ),
        (_Reader.push_bytes, {pickle.SHORT_BINBYTES: "<B", pickle.BINBYTES: "<I", pickle.BINBYTES8: "<Q"}),
        (_Reader.push_new, {pickle.EMPTY_LIST: list, pickle.EMPTY_DICT: dict, pickle.EMPTY_TUPLE: tuple}),
        (
            _Reader.push_tuple,
            {pickle.TUPLE: None, pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3},
        ),
        (_Reader.append, {pickle.APPEND: 1, pickle.APPENDS: None}),
        (_Reader.set_items, {pickle.SETITEM: 2, pickle.SETITEMS: None}),
        (_Reader.memoize, {pickle.MEMOIZE: None}),
    )
    for code, argument in arguments.items()
}
