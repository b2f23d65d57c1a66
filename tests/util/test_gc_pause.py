from __future__ import annotations

import gc

from seatrial.util.gc_pause import gc_paused


def test_gc_state_is_restored() -> None:
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        with gc_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is on
    gc.enable()
