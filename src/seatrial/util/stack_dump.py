"""Writes the Python stacks of all threads of a process, on request or when no Python thread can run.

The folder ``stacks`` of an attempt contains the file ``wanted`` once stacks are requested, and the stacks of each rank.
``rank3.txt`` is written by the thread that writes the heartbeat. ``rank3.blocked.txt`` is written by a thread of
faulthandler, which does not need Python's global lock: it writes if other code holds that lock for BLOCKED_S, so that
the heartbeat thread cannot run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable
from pathlib import Path

FOLDER = "stacks"
REQUEST_FILE = "wanted"
BLOCKED_S = 10.0  # a heartbeat thread that has not run for this long cannot get Python's global lock


def stack_files(folder: Path, rank: int) -> tuple[Path, Path]:
    """Two files in ``folder``: a rank writes the first on request, its faulthandler the second if Python is blocked."""
    return folder / f"rank{rank}.txt", folder / f"rank{rank}.blocked.txt"


def recorder_file(folder: Path, rank: int) -> Path:
    """The file to which a rank writes its flight-recorder dump, after its stacks; the file is empty without a dump."""
    return folder / f"rank{rank}.recorder"


class StackDump:
    """Writes the stacks of this process. A thread calls ``poll`` about once a second, from the start of the process.

    ``recorder_dump``: returns the dump of torch's flight recorder; empty if there is none.
    """

    def __init__(self, attempt: Path, rank: int, recorder_dump: Callable[[], bytes] = lambda: b"") -> None:
        self._folder, self._rank = attempt / FOLDER, rank
        self._recorder_dump = recorder_dump
        self._is_written = False
        self._main_thread = f"main thread 0x{threading.main_thread().ident:016x}\n"
        self._folder.mkdir(exist_ok=True)
        self._on_request, blocked = stack_files(self._folder, rank)
        self._blocked_file = os.open(blocked, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def poll(self) -> None:
        """Restart the timer of faulthandler, and write the stacks if they are wanted.

        Raises OSError, or RuntimeError if no thread can be started.
        """
        if os.fstat(self._blocked_file).st_size:  # Python was blocked and runs again
            os.ftruncate(self._blocked_file, 0)
            os.lseek(self._blocked_file, 0, os.SEEK_SET)
        faulthandler.dump_traceback_later(BLOCKED_S, file=self._blocked_file)
        if not self._is_written and (self._folder / REQUEST_FILE).exists():
            self._is_written = True
            self._write()

    def close(self) -> None:
        """Stop the timer."""
        faulthandler.cancel_dump_traceback_later()
        os.close(self._blocked_file)

    def _write(self) -> None:
        temporary = self._on_request.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(self._main_thread)
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        temporary.rename(self._on_request)  # before the call of torch, which may not return
        dump = b""
        with contextlib.suppress(Exception):  # a function of torch that another version lacks must not end heartbeats
            dump = self._recorder_dump()
        temporary.write_bytes(dump)
        temporary.rename(recorder_file(self._folder, self._rank))


def request(attempt: Path) -> None:
    """Ask all ranks of an attempt for their stacks. Raises OSError."""
    (attempt / FOLDER).mkdir(exist_ok=True)
    (attempt / FOLDER / REQUEST_FILE).touch()
