from __future__ import annotations

import gc

from seatrial.util.gc_pause import gc_ignores_imports, gc_paused


def test_gc_state_is_restored() -> None:
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        with gc_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is on
    gc.enable()


def test_collection_skips_what_was_imported() -> None:
    before = gc.get_freeze_count()
    with gc_ignores_imports():
        assert not gc.isenabled()
        imported = [[number] for number in range(1000)]
    frozen = gc.get_freeze_count()
    assert gc.isenabled()
    assert frozen >= before + len(imported)
