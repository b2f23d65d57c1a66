"""The report in a real browser: nothing wider than a phone, nothing fetched, the decision in view."""

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
from tests.report.test_html_page import paired

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

# Put behind a copy of the page: opens everything, then tells the page around it what it measured.
# What is inside a box that scrolls may be wide; the box itself may not.
MEASURE = """<script>addEventListener("load", () => setTimeout(() => {
  document.querySelectorAll("details").forEach(one => one.open = true);
  const wide = [...document.querySelectorAll("body *")].filter(one => !one.closest(".scroll *, pre *"))
    .filter(one => one.getBoundingClientRect().right > innerWidth + 1)
    .map(one => one.tagName + "." + one.getAttribute("class"));
  parent.postMessage(JSON.stringify({
    width: innerWidth, scrolls: document.documentElement.scrollWidth, wide: wide.slice(0, 9),
    fetched: performance.getEntriesByType("resource").map(one => one.name),
    pairs: [...document.querySelectorAll("table.pairs")].map(one => Math.round(one.getBoundingClientRect().right)),
    scripts: document.scripts.length, decision: document.querySelector("h1").getBoundingClientRect().top,
  }), "*");
}, 100))</script>"""

# A window cannot be narrower than 500 pixels, a frame can.
FRAME = """<!doctype html><iframe width="{width}" height="900" frameborder="0" src="page.html"></iframe>
<script>addEventListener("message", event => document.documentElement.dataset.measured = event.data)</script>"""


def measured(page: str, tmp_path: Path, width: int) -> dict[str, Any] | None:
    """What a browser sees of ``page`` in a frame ``width`` pixels wide; None where no script could tell."""
    (tmp_path / "page.html").write_text(page + MEASURE, encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    command = [tool("chromium", "chromium-browser", "google-chrome"), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--dump-dom", f"file://{tmp_path / 'frame.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "<iframe" in dom
    found = re.search(r'data-measured="([^"]*)"', dom)
    result: dict[str, Any] | None = json.loads(html.unescape(found[1])) if found else None
    return result


def without_policy(page: str) -> str:
    """The page forbids all scripts, ours too: a copy without the ban."""
    copy = re.sub(r'<meta http-equiv="Content-Security-Policy".*>', "", page)
    assert copy != page
    return copy


@pytest.mark.parametrize(
    ("sample", "width"),
    [("watched", 400), ("rejected", 400), ("incomplete", 400), ("hostile", 400), ("fleet", 400), ("rejected", 1900)],
)
def test_the_page_fits_the_window_and_fetches_nothing(sample: str, width: int, tmp_path: Path) -> None:
    seen = measured(without_policy(render(samples.SAMPLES[sample]())), tmp_path, width)
    assert seen
    assert seen["width"] == width
    assert seen["wide"] == []
    assert seen["scrolls"] <= width
    assert seen["fetched"] == []
    assert seen["scripts"] == 1  # ours
    assert 0 < seen["decision"] < 300 or sample == "hostile"


def test_eight_gpus_beside_each_other_fit_a_phone(tmp_path: Path) -> None:
    seen = measured(without_policy(render(paired(8))), tmp_path, 400)
    assert seen
    assert len(seen["pairs"]) == 1
    assert 200 < seen["pairs"][0] <= 400


def test_the_browser_would_notice(tmp_path: Path) -> None:
    """What the test above looks for is seen where it is there."""
    bad = '<div class="wide" style="width: 900px">x</div><img src="http://outside.invalid/x"><script>1</script></main>'
    seen = measured(without_policy(render(samples.incomplete())).replace("</main>", bad), tmp_path, 400)
    assert seen
    assert seen["wide"] == ["DIV.wide"]
    assert seen["scrolls"] > 800
    assert seen["fetched"] == ["http://outside.invalid/x"]
    assert seen["scripts"] == 2


def test_the_page_forbids_every_script(tmp_path: Path) -> None:
    assert measured(render(samples.accepted()), tmp_path, 400) is None


def test_the_decision_is_in_the_page_as_a_browser_reads_it(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render(samples.rejected()), encoding="utf-8")
    command = [tool("chromium", "chromium-browser", "google-chrome"), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--dump-dom", f"file://{tmp_path / 'page.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "<h1>REJECTED</h1>" in dom
    assert samples.rejected().decision.reason in dom
