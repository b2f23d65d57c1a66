"""Shared by the tests of reports: a fixed catalog of checks, golden files, and external programs."""

from __future__ import annotations

import os
import shutil

import pytest

from seatrial.report import figures, view
from tests.paths import GOLDEN
from tests.report.samples import CATALOG


@pytest.fixture(autouse=True)
def _catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (figures, view):
        monkeypatch.setattr(module, "catalog", lambda: CATALOG)


def assert_golden(name: str, text: str) -> None:
    """Compare ``text`` with tests/golden/NAME. UPDATE_GOLDEN=1 writes the file: read the diff before the commit."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def tool(*names: str) -> str:
    """The path of the first installed program. If none is, the test is skipped, or fails if CI is set."""
    path = next((path for name in names if (path := shutil.which(name))), None)
    if path:
        return path
    if os.environ.get("CI"):
        pytest.fail(f"{names[0]} is not installed; CI requires this test")
    pytest.skip(f"{names[0]} is not installed")
