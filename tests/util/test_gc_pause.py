from __future__ import annotations

import gc

from seatrial.util.gc_pause import gc_paused


def test_the_collector_is_off_within_and_as_it_was_afterwards() -> None:
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        with gc_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is on
    gc.enable()
