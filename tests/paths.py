"""Where tests find files that are not Python."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
GOLDEN = ROOT / "tests" / "golden"
RESULTS = ROOT / "docs" / "results"
CONFIGS = ROOT / "configs"
BENCHMARKS = ROOT / "benchmarks"
