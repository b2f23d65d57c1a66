"""Compiles the patterns of signatures for hyperscan, which finds the candidates of all of them in one pass.

hyperscan needs seconds for a thousand patterns, and a tenth of one for their literals. So it searches, for each
pattern, a set of literals; every matching line contains at least one of them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from seatrial.diagnose.signature import Signature
from seatrial.util import user_cache

_parser: Any = import_module("re._parser")
# A repetition, with its minimum as group 1; or an escape or a set of characters, in which braces are no repetition
_TOKEN = re.compile(r"\{(\d+),\d+\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]")
# A shorter literal occurs in many lines without a failure: the pattern's other literals are searched with it
_RARE_LENGTH = 7
# Literals that count as shorter, since a log can have them in each line
_FAILED = ("failed to", "failed to ", " failed", ": failed", ": failed ", ": failed to ")
_COMMON = ("mlx5_core", "mlx5_core ", "error: ", "link status ", "mce: [hardware error]: ", *_FAILED)
_MAX_STRINGS = 32
# More signatures than this with one expression: all literals of their patterns are searched in sequence, since each
# line with a shared literal is a candidate of all of them (221 signatures begin with "NVRM: Xid (")
_MAX_SHARED = 8
_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)
_ZERO_WIDTH = (_parser.AT, _parser.ASSERT, _parser.ASSERT_NOT)


def compile_patterns(signatures: Mapping[int, Signature], *, by_literals: bool = True) -> Any:
    """The database that finds lines which may match; a match has the number of its signature.

    ``by_literals``: finds more lines, and compiles in a tenth of the time. Raises hyperscan.error for a pattern that is
    not supported.
    """
    if by_literals:
        return _compiled(distinct_expressions(signatures))
    by_number = {number: [_whole(signature.pattern)] for number, signature in signatures.items()}
    return _compiled(by_number, is_literal=False)


def cached_database(signatures: Mapping[int, Signature], cache_name: str = "patterns") -> Any:
    """``compile_patterns``, from the user's cache if it has it: to compile takes half a second.

    ``cache_name``: the cache keeps the last database of each name.
    """
    import hyperscan

    key = _key(signatures)
    if content := user_cache.read(cache_name, key):
        with contextlib.suppress(hyperscan.error):  # compiled for another CPU
            database = hyperscan.loadb(content, hyperscan.HS_MODE_BLOCK)
            database.scratch = hyperscan.Scratch(database)
            return database
    database = compile_patterns(signatures)
    user_cache.write(cache_name, key, hyperscan.dumpb(database))
    return database


def reduced_database(signatures: Mapping[int, Signature], numbers: Collection[int]) -> Any:
    """``cached_database`` of some of the signatures, by their ``numbers``; the literals are from the user's cache."""
    key = _key(signatures)
    if content := user_cache.read("literals", key):
        by_number = {int(number): [each.encode() for each in row] for number, row in json.loads(content).items()}
    else:
        by_number = distinct_expressions(signatures)
        texts = {number: [each.decode() for each in row] for number, row in by_number.items()}
        user_cache.write("literals", key, json.dumps(texts).encode())
    return _compiled({number: by_number[number] for number in numbers})


def unsupported(signature: Signature) -> str:
    """Why hyperscan does not support the pattern; empty if it does."""
    import hyperscan

    try:
        compile_patterns({0: signature}, by_literals=False)
    except hyperscan.error as error:
        return str(error)
    return ""


def _compiled(by_number: Mapping[int, Sequence[bytes]], *, is_literal: bool = True) -> Any:
    """The database of the expressions of each number; literals match without distinction of case."""
    import hyperscan  # not needed to run a trial without failures

    expressions = list(chain.from_iterable(by_number.values()))
    ids = [number for number, row in by_number.items() for _ in row]
    # prefilter: hyperscan ignores lookarounds, so that more lines match
    flags = hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_PREFILTER | (is_literal and hyperscan.HS_FLAG_CASELESS)
    database = hyperscan.Database()
    database.compile(expressions=expressions, ids=ids, elements=len(ids), flags=[flags] * len(ids))
    return database


def _key(signatures: Mapping[int, Signature]) -> str:
    numbered = [[number, signature.pattern] for number, signature in signatures.items()]
    inputs = (json.dumps(numbered), version("hyperscan"), Path(__file__).read_text(encoding="utf-8"))
    return user_cache.key(*map(str.encode, inputs))


def distinct_expressions(signatures: Mapping[int, Signature]) -> dict[int, list[bytes]]:
    """Number of the signature → its ``candidate_expressions``.

    They are in sequence if more than _MAX_SHARED signatures have one of them.
    """
    by_number = {number: candidate_expressions(signature.pattern) for number, signature in signatures.items()}
    uses = Counter(chain.from_iterable(by_number.values()))  # expression → number of signatures that have it
    for number, expressions in by_number.items():
        if any(uses[expression] > _MAX_SHARED for expression in expressions):
            by_number[number] = candidate_expressions(signatures[number].pattern, in_sequence=True)
    return by_number


def candidate_expressions(pattern: str, *, in_sequence: bool = False) -> list[bytes]:
    """Expressions for hyperscan, without distinction of case; each line that matches ``pattern`` matches one of them.

    They are literals, or literals with any text between; the pattern itself if it requires no literal.
    ``in_sequence``: all literals of the pattern, also if the longest is rare; the pattern if the others are short.
    """
    required = _required(_parser.parse(pattern, re.MULTILINE | re.ASCII))
    lengths = sorted(part.length for part in required.parts)
    if in_sequence and sum(lengths[:-1]) < _RARE_LENGTH:
        return [_whole(pattern)]  # the other literals, such as commas, select no lines among those with the longest
    literals = _in_sequence(required.parts) if in_sequence else required.literals
    return sorted(each.encode() for each in literals.expressions) if literals.length else [_whole(pattern)]


def _whole(pattern: str) -> bytes:
    """The pattern for hyperscan, which has no named groups of Python's form.

    Repetitions have no upper limit, which takes a third of the time to compile: ``{1,60}`` becomes ``{1,}``.
    """
    unnamed = re.sub(r"\(\?P<\w+>", "(?:", pattern)
    return _TOKEN.sub(lambda token: f"{{{token[1]},}}" if token[1] else token[0], unnamed).encode()


class _Literals(NamedTuple):
    """Expressions; each match contains one of them. ``length``: characters of the shortest, 0 for none."""

    length: int
    expressions: set[str]


class _Required(NamedTuple):
    """``literals``: each text that a part of a pattern matches contains one of these expressions.

    ``strings``: all texts that the part matches; None if there are too many. ``parts``: all literals of a sequence of
    operations, in their order; ``literals`` are a selection from them.
    """

    strings: set[str] | None
    literals: _Literals
    parts: tuple[_Literals, ...] = ()


_NOTHING = _Required(None, _Literals(0, set()))


def _required(nodes: Iterable[tuple[Any, Any]]) -> _Required:
    """What a sequence of parsed operations requires."""
    parts = []
    run = {""}  # the strings that the operations since the last gap match
    is_complete = True
    for operation, argument in nodes:
        if operation is _parser.LITERAL and argument < 128:
            run = {before + chr(argument).lower() for before in run}
            continue
        strings, literals, _ = _required_by_operation(operation, argument)
        if strings is not None and len(run) * len(strings) <= _MAX_STRINGS:
            run = {before + after for before in run for after in strings}
            continue
        parts.append(_as_literals(run))
        is_complete = False
        if strings is not None and len(strings) <= _MAX_STRINGS:
            run = strings
        else:
            parts.append(literals)
            run = {""}
    parts.append(_as_literals(run))
    literals = max(parts, key=lambda each: each.length)
    sequence = tuple(each for each in parts if each.length)
    if literals.length < _RARE_LENGTH:
        literals = _in_sequence([each for each in parts if each.length >= min(2, literals.length)])
    return _Required(run if is_complete else None, literals, sequence)


def _as_literals(strings: set[str]) -> _Literals:
    """The strings without those that begin with another one, since hyperscan reports each of them."""
    shortest = {each for each in strings if not any(each[:end] in strings for end in range(1, len(each)))}
    length = min(min(len(each), _RARE_LENGTH - 1) if each in _COMMON else len(each) for each in strings)
    return _Literals(length, {re.escape(string) for string in shortest})


def _in_sequence(parts: Sequence[_Literals]) -> _Literals:
    """The parts in their order, with any text between them."""
    if len(parts) == 1:
        return parts[0]
    groups = (f"(?:{'|'.join(sorted(part.expressions))})" for part in parts)
    return _Literals(sum(part.length for part in parts), {".*".join(groups)})


def _required_by_operation(operation: Any, argument: Any) -> _Required:
    """What one parsed operation requires. Other characters than ASCII count as unknown."""
    if operation is _parser.IN and all(kind is _parser.LITERAL and code < 128 for kind, code in argument):
        return _Required({chr(code).lower() for _, code in argument}, _NOTHING.literals)
    if operation in _ZERO_WIDTH:
        return _Required({""}, _NOTHING.literals)
    if operation is _parser.SUBPATTERN:
        return _required(argument[3])
    if operation is _parser.BRANCH:
        branches = [_required(branch) for branch in argument[1]]
        strings = [branch.strings for branch in branches]
        union = None if None in strings else set().union(*(each for each in strings if each))
        length = min(branch.literals.length for branch in branches)
        return _Required(union, _Literals(length, set().union(*(branch.literals.expressions for branch in branches))))
    if operation in _REPEATS:
        minimum, maximum, repeated = argument
        inner = _required(repeated)
        if (minimum, maximum) == (0, 1) and inner.strings is not None:
            return _Required({"", *inner.strings}, _NOTHING.literals)
        return _Required(None, inner.literals) if minimum else _NOTHING
    return _NOTHING
