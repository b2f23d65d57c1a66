"""Which tests share a worker when several run side by side, as ``make test`` has it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

RIG = "rig"
ROOT = Path(__file__).parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What makes Slurm clusters comes first: it takes longest."""
    items.sort(key=lambda item: _group(item.nodeid) != RIG)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return Together(config, log)


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """A file is one worker's, and all files that make Slurm clusters are one worker's together."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)


def _group(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return RIG if _makes_clusters(file) else file


@cache
def _makes_clusters(file: str) -> bool:
    return "tests.rig" in (ROOT / file).read_text(encoding="utf-8")
