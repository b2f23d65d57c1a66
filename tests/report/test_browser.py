"""The HTML report in a real browser: it fits a phone, loads nothing, and shows the decision at the top."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from seatrial.report.html_page import render
from tests.report import samples
from tests.report.conftest import tool
from tests.report.test_html_page import with_pair_table

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=2000",
]

# Script appended to a copy of the page: opens all details, then sends its measurements to the enclosing page. Elements
# inside a scrollable box may be wider than the window, the box may not.
MEASURE = """<script>addEventListener("load", () => setTimeout(() => {
  document.querySelectorAll("details").forEach(element => element.open = true);
  const wide = [...document.querySelectorAll("body *")].filter(element => !element.closest(".scroll *, pre *"))
    .filter(element => element.getBoundingClientRect().right > innerWidth + 1)
    .map(element => element.tagName + "." + element.getAttribute("class"));
  parent.postMessage(JSON.stringify({
    width: innerWidth, scroll_width: document.documentElement.scrollWidth, wide: wide.slice(0, 9),
    fetched: performance.getEntriesByType("resource").map(entry => entry.name),
    pairs: [...document.querySelectorAll("table.pairs")].map(table => Math.round(table.getBoundingClientRect().right)),
    scripts: document.scripts.length, decision: document.querySelector("h1").getBoundingClientRect().top,
  }), "*");
}, 100))</script>"""

# A window is at least 500 pixels wide; a frame can be narrower.
FRAME = """<!doctype html><iframe width="{width}" height="900" frameborder="0" src="page.html"></iframe>
<script>addEventListener("message", event => document.documentElement.dataset.measured = event.data)</script>"""


def measured(page: str, tmp_path: Path, width: int) -> dict[str, Any] | None:
    """The measurements of MEASURE in a frame of ``width`` pixels; None if the page blocks the script."""
    (tmp_path / "page.html").write_text(page + MEASURE, encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    command = [tool("chromium", "chromium-browser", "google-chrome"), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--dump-dom", f"file://{tmp_path / 'frame.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "<iframe" in dom
    match = re.search(r'data-measured="([^"]*)"', dom)
    result: dict[str, Any] | None = json.loads(html.unescape(match[1])) if match else None
    return result


def without_policy(page: str) -> str:
    """``page`` without its Content-Security-Policy, which also blocks MEASURE."""
    copy = re.sub(r'<meta http-equiv="Content-Security-Policy".*>', "", page)
    assert copy != page
    return copy


@pytest.mark.parametrize(
    ("sample", "width"),
    [
        ("with_telemetry", 400),
        ("rejected", 400),
        ("incomplete", 400),
        ("hostile", 400),
        ("large_cluster", 400),
        ("four_nodes", 400),
        ("rejected", 1900),
    ],
)
def test_the_page_fits_the_window_and_loads_nothing(sample: str, width: int, tmp_path: Path) -> None:
    result = measured(without_policy(render(samples.SAMPLES[sample]())), tmp_path, width)
    assert result
    assert result["width"] == width
    assert result["wide"] == []
    assert result["scroll_width"] <= width
    assert result["fetched"] == []
    assert result["scripts"] == 1  # MEASURE
    assert 0 < result["decision"] < 300 or sample == "hostile"


def test_a_table_of_eight_gpus_fits_a_phone(tmp_path: Path) -> None:
    result = measured(without_policy(render(with_pair_table(8))), tmp_path, 400)
    assert result
    assert len(result["pairs"]) == 1
    assert 200 < result["pairs"][0] <= 400


def test_wide_elements_downloads_and_scripts_are_detected(tmp_path: Path) -> None:
    """What the test above looks for is result where it is there."""
    bad = '<div class="wide" style="width: 900px">x</div><img src="http://outside.invalid/x"><script>1</script></main>'
    result = measured(without_policy(render(samples.incomplete())).replace("</main>", bad), tmp_path, 400)
    assert result
    assert result["wide"] == ["DIV.wide"]
    assert result["scroll_width"] > 800
    assert result["fetched"] == ["http://outside.invalid/x"]
    assert result["scripts"] == 2


def test_the_page_blocks_all_scripts(tmp_path: Path) -> None:
    assert measured(render(samples.accepted()), tmp_path, 400) is None


def test_the_decision_is_in_the_dom(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render(samples.rejected()), encoding="utf-8")
    command = [tool("chromium", "chromium-browser", "google-chrome"), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--dump-dom", f"file://{tmp_path / 'page.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "<h1>REJECTED</h1>" in dom
    assert samples.rejected().decision.reason in dom
