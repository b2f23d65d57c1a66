"""Which tests share a worker when several run side by side, as ``make test`` has it."""

from __future__ import annotations

import pytest

RIG = "rig"


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file is one worker's. Slurm clusters are all one worker's, and come first: they take longest."""
    groups = {item.nodeid: _group(item) for item in items}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item.nodeid]))
    items.sort(key=lambda item: groups[item.nodeid] != RIG)


def _group(item: pytest.Item) -> str:
    module = getattr(item, "module", None)
    return RIG if "Cluster" in vars(module) else item.nodeid.partition("::")[0]
