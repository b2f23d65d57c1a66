"""Failure propagation: the failure of one rank ends all ranks, and only that rank prints its error.

The first rank that fails writes its name to the process group's store. The other ranks read this name when a collective
fails, and every POLL_INTERVAL_S. When a peer is lost, collectives of gloo fail at once; those of NCCL wait until their
timeout.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from seatrial.model import SeatrialError
from seatrial.train import disk, ranks
from seatrial.train.step_speed import INTERRUPTED
from seatrial.util import signals

STORE_KEY = "seatrial/failed"
POLL_INTERVAL_S = 2.0  # between two reads of the store
GRACE_S = 5.0  # from noticing a failure to PeerFailed; meanwhile the first failed rank exits, and torchrun ends all
STUCK_S = 10.0  # longer than GRACE_S; a main thread that still runs after this time is blocked in a collective
TEARDOWN_S = 30  # from a failure to SIGALRM, which ends a process that is still waiting for peers
EXIT_INCOMPLETE = 3  # exit code of the command line for an incomplete run


class PeerFailed(SeatrialError):
    """Another rank failed first, and that rank reports the cause."""


@contextmanager
def propagate_failure() -> Iterator[None]:
    """Context manager: an error of one rank ends all ranks of the default process group, if there is one.

    The first rank to fail raises its error, or SeatrialError if a collective failed because a peer is lost. The others
    raise PeerFailed GRACE_S after they have noticed the failure; a rank that is blocked in a collective exits.
    """
    finished = threading.Event()
    threading.Thread(target=_watch_peers, args=(finished,), name="failure", daemon=True).start()
    try:
        yield
    except Exception as error:
        first_failed = _register_failure()
        if first_failed not in (None, _rank_name()):
            # the first failed rank exits meanwhile; torchrun then ends this rank without a message
            signals.end_on_sigterm()
            time.sleep(GRACE_S)
            raise PeerFailed(
                f"{_rank_name()} exits because {first_failed} failed; see the error of that rank"
            ) from error
        is_gloo_error = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
        if is_gloo_error or isinstance(error, dist.DistError):
            raise SeatrialError(
                f"{_rank_name()}: a peer disconnected without an error: {disk.first_line(error)}. It was killed, or "
                "its node is down: see torchrun's list of failures for the rank, and dmesg for an out-of-memory kill"
            ) from error
        raise
    except KeyboardInterrupt:  # Ctrl-C or SIGTERM, sent to all ranks or only to this one
        if _register_failure() in (None, _rank_name()):
            print(f"{INTERRUPTED}; complete checkpoints in checkpoints/ remain", file=sys.stderr)
        raise
    finally:
        finished.set()


def _rank_name() -> str:
    return f"rank {ranks.rank()} on {socket.gethostname()}"


def _register_failure() -> str | None:
    """Registers this rank as failed if no other rank has failed before; returns the name of the first failed rank.

    None with a single rank, or if the store is lost.
    """
    if ranks.world_size() == 1:
        return None
    signal.alarm(TEARDOWN_S)  # at interpreter shutdown torch may wait forever for peers that have exited
    try:
        return str(_get_default_store().compare_set(STORE_KEY, "", _rank_name()).decode())
    except RuntimeError:  # the rank that hosts the store has exited
        return None


def _watch_peers(finished: threading.Event) -> None:
    """Exits this process if another rank has failed and the main thread has not finished STUCK_S later."""
    while not finished.wait(POLL_INTERVAL_S):
        if (first_failed := _failed_rank()) and not finished.wait(STUCK_S):
            print(f"seatrial: {_rank_name()} exits because {first_failed} failed", file=sys.stderr, flush=True)
            os._exit(EXIT_INCOMPLETE)


def _failed_rank() -> str | None:
    """The name of the first failed rank, or a text about the rank that hosted a lost store; None without a failure."""
    if ranks.world_size() == 1:
        return None
    try:
        store = _get_default_store()
        return str(store.get(STORE_KEY).decode()) if store.check([STORE_KEY]) else None
    except RuntimeError:
        return "the rank that hosts the store"
    except (ValueError, KeyError):  # the group has been closed
        return None
