"""One rank's failure ends all ranks, and one rank tells why.

A rank that fails says so in the store through which the ranks met. The others look there: when an exchange breaks for
want of a peer, as gloo's do, and now and then besides, since NCCL waits for a peer that is gone until its time-out.
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
from seatrial.util import signals

STORE_KEY = "seatrial/failed"
LOOK_EVERY_S = 2.0
GRACE_S = 5.0  # for the rank that tells: torchrun ends all ranks as soon as one has ended
STUCK_S = 10.0  # longer than GRACE_S: a main thread that has not come to know of it by then never will
TEARDOWN_S = 30
EXIT_INCOMPLETE = 3  # the command line's, for what could not be done


class PeerFailed(SeatrialError):
    """Another rank failed first, and says why."""


@contextmanager
def propagate_failure() -> Iterator[None]:
    """What is raised within ends all ranks of the default process group, where one is open by then.

    The first rank to fail raises what it was; a broken exchange, which is a peer's end, as SeatrialError. The others
    raise EndedWithAnother once the first has had time to tell; one that is stuck in an exchange ends at once.
    """
    ended = threading.Event()
    threading.Thread(target=_look, args=(ended,), name="failure", daemon=True).start()
    try:
        yield
    except Exception as error:
        first = _first_to_fail()
        if first not in (None, _me()):
            _leave_it_to_torchrun()
            raise PeerFailed(f"{_me()} ended with {first}, which says why") from error
        if _is_broken_exchange(error):
            raise SeatrialError(_alone(error)) from error
        raise
    except KeyboardInterrupt:  # Ctrl-C or SIGTERM: to all ranks, or to this one
        if _first_to_fail() in (None, _me()):
            print("seatrial: interrupted. What is in checkpoints/ stays as it is", file=sys.stderr)
        raise
    finally:
        ended.set()


def _me() -> str:
    return f"rank {dist.get_rank() if dist.is_initialized() else 0} on {socket.gethostname()}"


def _first_to_fail() -> str | None:
    """Says that this rank has failed, unless another was first; who that was. None where no others can be told."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # torch may wait for peers that have gone while the interpreter is torn down
    signal.alarm(TEARDOWN_S)
    try:
        return str(_get_default_store().compare_set(STORE_KEY, "", _me()).decode())
    except RuntimeError:  # the store went with the rank that held it
        return None


def _leave_it_to_torchrun() -> None:
    """Wait, so that the rank that tells ends first; torchrun then ends this one, without a word."""
    signals.end_on_sigterm()
    time.sleep(GRACE_S)


def _look(ended: threading.Event) -> None:
    """End this process where another has failed, and the main thread does not come to know of it."""
    while not ended.wait(LOOK_EVERY_S):
        if (first := _failed_already()) and not ended.wait(STUCK_S):
            print(f"seatrial: {_me()} ended with {first}", file=sys.stderr, flush=True)
            os._exit(EXIT_INCOMPLETE)


def _failed_already() -> str | None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    try:
        store = _get_default_store()
        return str(store.get(STORE_KEY).decode()) if store.check([STORE_KEY]) else None
    except RuntimeError:
        return "the rank that held the store, which is gone"
    except (ValueError, KeyError):  # the group was closed meanwhile
        return None


def _is_broken_exchange(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _alone(error: Exception) -> str:
    said = str(error).strip().splitlines()[0]
    return (
        f"{_me()} lost a peer that said nothing: {said}. Such a rank was killed or its machine is gone: torchrun's "
        f"list of failures names it, and the kernel's log (dmesg) says whether memory ran out"
    )
