"""Faults of the settings for RDMA ports; see tests.bench.cluster."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tests.bench import cluster


def _bad_gid_index(rank: int) -> AbstractContextManager[Any] | None:
    return patch.dict(os.environ, {"NCCL_IB_GID_INDEX": "three"}) if rank == 1 else None


FAULTS: dict[str, cluster.Fault] = {"bad_gid_index": _bad_gid_index}
