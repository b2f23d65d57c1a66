"""Copies to and from a GPU, and between two of them, by the copy engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import torch

from seatrial.bench.alone import Timed, time_alone

SIZE = 2**28  # bytes of one copy over PCIe, some 5 ms: starting it does not count
PEER_SIZE = 2**30  # between GPUs a copy also waits for both of them, some µs: it should take more than 2 ms

HEAT_UP_S = 0.05  # a copy engine does not grow hot: this is for peer access and page tables


class Pinned:
    """A buffer in page-locked host memory beside one of the same size on a GPU: copies between them are DMA."""

    def __init__(self, device: str, size: int = SIZE) -> None:
        self.size = size
        self._host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._gpu = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def h2d(self) -> None:
        self._gpu[0].copy_(self._host[0], non_blocking=True)

    def d2h(self) -> None:
        self._host[1].copy_(self._gpu[1], non_blocking=True)

    def both(self) -> None:
        """One copy each way at the same time, on two streams."""
        _fork_join([self._other], self.h2d, self.d2h)


@dataclass(frozen=True)
class PeerCopy:
    """Copies from GPU ``source`` to ``target`` (CUDA's numbers). ``direct``: without a stop in host memory."""

    source: int
    target: int
    direct: bool
    one_way: Timed
    both_ways: Timed


def time_peers(gpus: int, seconds: float, note: Callable[[str], None], size: int = PEER_SIZE) -> list[PeerCopy]:
    """Every ordered pair of the ``gpus`` first GPUs that this process sees, one after the other.

    The current device is the source: a copy that is issued from another one was seen to be half as fast (torch 2.11).
    """
    found = []
    for source, target in permutations(range(gpus), 2):
        note(f"GPU {source} to {target}")
        with torch.cuda.device(source):
            found.append(_time_pair(source, target, seconds, size))
    return found


def _time_pair(source: int, target: int, seconds: float, size: int) -> PeerCopy:
    here, there = f"cuda:{source}", f"cuda:{target}"
    out = [torch.empty(size, dtype=torch.uint8, device=device) for device in (here, there)]
    back = [torch.empty(size, dtype=torch.uint8, device=device) for device in (there, here)]
    forth = partial(out[1].copy_, out[0], non_blocking=True)
    # torch copies on the current stream of the source, and has those of both GPUs wait for it: with one stream of the
    # target for both ways they would take turns.
    streams = [torch.cuda.Stream(device) for device in (there, here)]  # type: ignore[no-untyped-call]
    both = partial(_fork_join, streams, forth, partial(back[1].copy_, back[0], non_blocking=True))
    direct = torch.cuda.can_device_access_peer(source, target)
    one_way = time_alone(forth, here, seconds, heat_up_s=HEAT_UP_S)
    return PeerCopy(source, target, direct, one_way, time_alone(both, here, seconds, heat_up_s=HEAT_UP_S))


def _fork_join(others: Sequence[torch.cuda.Stream], first: Callable[[], object], second: Callable[[], object]) -> None:
    """Both at once: ``second`` on the last of ``others``, from where the current stream stands to where it goes on.

    The streams before it become the current ones of their own devices meanwhile.
    """
    current = torch.cuda.current_stream()
    others[-1].wait_stream(current)
    first()
    with ExitStack() as stack:
        for stream in others:
            stack.enter_context(torch.cuda.stream(stream))
        second()
    current.wait_stream(others[-1])
