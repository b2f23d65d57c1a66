"""Transports from NCCL logs; the sum over all ranks is tested in test_all_reduce.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.bench import group, rank
from seatrial.checks.fabric import _nccl_log
from tests.paths import FIXTURES

LOG = FIXTURES / "nccl" / "h200-nvlink-2.28.9.log"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The log of a single rank."""
    path = tmp_path / "nccl.log"
    monkeypatch.setattr(group, "nccl_log_path", lambda: path)
    monkeypatch.setattr(rank, "gather", lambda value: [value])
    return path


def test_only_connections_after_the_offset_count(log: Path) -> None:
    log.write_bytes(LOG.read_bytes())
    assert group.nccl_log_size() == LOG.stat().st_size
    first = _nccl_log.connections_by_transport()
    assert first.keys() == {"P2P/CUMEM"}
    with log.open("ab") as file:
        file.write(LOG.read_bytes())
    assert _nccl_log.connections_by_transport(LOG.stat().st_size) == first
    assert _nccl_log.connections_by_transport() == {"P2P/CUMEM": 2 * first["P2P/CUMEM"]}


def test_no_log_gives_no_transports(log: Path) -> None:
    assert _nccl_log.connections_by_transport() == {}
    assert group.nccl_log_size() == 0
