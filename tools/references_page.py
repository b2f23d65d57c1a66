"""Write docs/references.md: the reference values of GPU models. tests/test_docs.py compares the file."""

from __future__ import annotations

from pathlib import Path

from seatrial.analysis.known_references import reference_metrics
from seatrial.checks import catalog
from seatrial.hardware.references import skus
from seatrial.report import known_references

PAGE = Path(__file__).parent.parent / "docs" / "references.md"


def page() -> str:
    """The whole page."""
    return known_references.page(skus(), reference_metrics(catalog()))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
