"""Fixtures of the tests of launchers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.on_fake_cluster import Attempt


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    created = Attempt(tmp_path, monkeypatch)
    yield created
    created.cluster.stop()
