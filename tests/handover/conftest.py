"""A finished run that the tests of bundle and verify share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.handover.fixtures import make_run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("handover") / "run")
