"""What the tests of reports share: a catalog that does not change, golden files, and tools that CI must have."""

from __future__ import annotations

import os
import shutil

import pytest

from seatrial.report import view
from tests.paths import GOLDEN
from tests.report.samples import CATALOG


@pytest.fixture(autouse=True)
def _catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "catalog", lambda: CATALOG)


def assert_golden(name: str, text: str) -> None:
    """Compare with tests/golden/NAME. UPDATE_GOLDEN=1 writes it anew: then read the difference before it is kept."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def tool(*names: str) -> str:
    """The first of these programs that is there. Without any the test is skipped; where CI is set it fails."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found:
        return found
    if os.environ.get("CI"):
        pytest.fail(f"{names[0]} is not installed, and CI must run this test")
    pytest.skip(f"{names[0]} is not installed")
