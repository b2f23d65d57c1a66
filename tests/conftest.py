"""Which tests share a worker when several run side by side, as ``make test`` has it."""

from __future__ import annotations

import gc
from functools import cache

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from tests.paths import ROOT

RIG = "rig"


gc.disable()  # until all is imported: see pytest_collection_finish


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What makes Slurm clusters comes first: it takes longest. Then files with slow tests: none is to be the last."""
    slow = {_group(item.nodeid) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (_group(item.nodeid) != RIG, _group(item.nodeid) not in slow))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not walk through a million of its objects with every test."""
    gc.freeze()
    gc.enable()


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
