"""The text of a log as blocks of whole lines: without colours, and unpacked from journalctl's and Docker's JSON.

The text does not depend on how many bytes each read of the file returns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from seatrial.util.input_files import Readable

BLOCK_BYTES = 2**20
# ECMA-48 control sequences, such as colours, and the selection of a character set
_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~]|[ -/][0-~])")
_LINE_END = re.compile(rb"[\r\n\0]")
_MAX_RECORD = 2**18  # bytes; longer lines are not unpacked, and may be cut
# Translates the other line ends, which do not count in line numbers, to newlines
TO_NEWLINES = bytes.maketrans(b"\r\0", b"\n\n")
_JSON_BEGIN = re.compile(rb'\s{0,9}\{\s?"')


def line_blocks(file: Readable) -> Iterator[bytes]:
    """The stream as blocks of whole lines, without control sequences.

    If its first line is a JSON record of a journal or container, each record is replaced by its text.
    """
    is_json: bool | None = None
    for block in _whole_lines(file):
        if is_json is None:
            is_json = _record_text(block.partition(b"\n")[0]) is not None
        if is_json:
            block = b"\n".join(_record_text(line) or line for line in block.split(b"\n"))
        yield _ESCAPE.sub(b"", block) if b"\x1b" in block else block


def _whole_lines(file: Readable) -> Iterator[bytes]:
    """Blocks that end with a line; a line that is longer than a block is cut.

    A carriage return ends a line too, since progress bars write many updates into one line. So does a zero byte, since
    files contain sequences of zero bytes after a loss of power.
    """
    # The line whose end has not been read yet, and whether its first _MAX_RECORD bytes are kept and the others skipped
    partial, is_cut = b"", False
    while chunk := file.read(BLOCK_BYTES):
        if is_cut:
            line_end = _LINE_END.search(chunk)
            if not line_end:
                continue
            chunk, is_cut = chunk[line_end.start() :], False
        data = partial + chunk
        end = max(data.rfind(b"\n"), data.rfind(b"\r"), data.rfind(b"\0")) + 1
        partial = data[end:]
        if end:
            yield data[:end]
        if len(partial) > max(_MAX_RECORD, BLOCK_BYTES):
            partial, is_cut = partial[:_MAX_RECORD], True
    if partial:
        yield partial + b"\n"


def _record_text(line: bytes) -> bytes | None:
    """The time and text of a record of ``journalctl -o json`` or of Docker's json-file; None if it is neither."""
    if len(line) > _MAX_RECORD or not _JSON_BEGIN.match(line):
        return None
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    text = record.get("MESSAGE", record.get("log"))
    if isinstance(text, list):  # journalctl's form of a message that is not UTF-8
        text = bytes(byte for byte in text if isinstance(byte, int) and 0 <= byte < 256).decode(errors="replace")
    if not isinstance(text, str):
        return None
    time = record.get("time", "")
    stamp = record.get("__REALTIME_TIMESTAMP", "")
    if isinstance(stamp, str) and stamp.isdecimal() and len(stamp) <= 16:
        time = datetime.fromtimestamp(int(stamp) / 1e6, UTC).isoformat()
    fields = [time, record.get("_HOSTNAME", ""), record.get("SYSLOG_IDENTIFIER", "")]
    prefix = " ".join(field for field in fields if isinstance(field, str) and field)
    return f"{prefix}: {text}".encode(errors="replace").rstrip(b"\n").replace(b"\n", b"\r")
