"""Clusters for tests. In a test module: ``pytest_plugins = ["tests.rig.fixtures"]``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.rig import host
from tests.rig.cluster import Cluster


@contextmanager
def _maker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    if reason := Cluster.reason_unavailable():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no Slurm cluster here: {reason}")
    with ExitStack() as stack:

        def make(nodes: int, gpus_per_node: int = 0, extra: str = "", confined: bool = False) -> Cluster:
            if confined and (reason := host.cgroups_unavailable()):
                pytest.skip(reason)
            folder = tmp_path_factory.mktemp("rig")
            kind = Cluster(nodes=nodes, gpus_per_node=gpus_per_node, folder=folder, extra=extra, confined=confined)
            return stack.enter_context(kind)

        yield make


@pytest.fixture
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """``make_cluster(nodes=2, gpus_per_node=2, extra=…, confined=True)``: a cluster that lives as long as the test."""
    with _maker(tmp_path_factory) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """The same, of clusters that live as long as the module's tests."""
    with _maker(tmp_path_factory) as make:
        yield make


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes for all tests of the session that break nothing of Slurm.

    Those that do make a cluster of their own: it is up in 0.2 s, and a controller that is started again takes 4 s.
    """
    with _maker(tmp_path_factory) as make:
        yield make(2)


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(4)
