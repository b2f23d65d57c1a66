"""Import stack hf as the product does, which is faster than importing its packages directly."""

from __future__ import annotations

import pytest

from tests.train import ranks
from tests.train.hf import imports

__all__ = ["imports"]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import stack hf in the process from which ranks are forked, if ranks train: 3 s of CPU time in each worker."""
    if any(item.get_closest_marker("training") for item in session.items):
        ranks.FORK.set_forkserver_preload([imports.__name__, *ranks.PRELOADED])
