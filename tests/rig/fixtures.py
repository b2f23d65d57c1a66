"""Fixtures that start test clusters. In a test module: ``pytest_plugins = ["tests.rig.fixtures"]``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pytest

from tests.rig import host
from tests.rig.cluster import Cluster


@contextmanager
def _maker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    if reason := Cluster.reason_unavailable():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"cannot start a Slurm test cluster: {reason}")
    with ExitStack() as stack:

        def make(
            nodes: int,
            gpus_per_node: int = 0,
            extra: str = "",
            confined: bool = False,
            partitions: Mapping[str, str] | None = None,
        ) -> Cluster:
            if confined and (reason := host.cgroups_unavailable()):
                pytest.skip(reason)
            folder = tmp_path_factory.mktemp("rig")
            cluster = Cluster(
                nodes=nodes,
                gpus_per_node=gpus_per_node,
                folder=folder,
                extra=extra,
                confined=confined,
                partitions=partitions,
            )
            return stack.enter_context(cluster)

        yield make


@pytest.fixture
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Returns a function that starts a cluster for one test: ``make_cluster(nodes=2, gpus_per_node=2, extra=…)``."""
    with _maker(tmp_path_factory) as make:
        yield make


@pytest.fixture(scope="module")
def make_shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Returns a function that starts a cluster for all tests of a module."""
    with _maker(tmp_path_factory) as make:
        yield make


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Returns a two-node cluster for all tests of the session that do not break Slurm.

    Other tests start a separate cluster, which takes 0.2 s; a restart of the controller takes 4 s.
    """
    with _maker(tmp_path_factory) as make:
        yield make(2)


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(4)
