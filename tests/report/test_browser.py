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
  parent.postMessage({name: "NAME", measured: {
    width: innerWidth, scroll_width: document.documentElement.scrollWidth, wide: wide.slice(0, 9),
    fetched: performance.getEntriesByType("resource").map(entry => entry.name),
    scripts: document.scripts.length, decision: document.querySelector("h1").getBoundingClientRect().top,
  }}, "*");
}, 100))</script>"""

# A window is at least 500 pixels wide; a frame can be narrower. The browser starts once and loads each page in a frame.
FRAME = '<iframe width="{width}" height="900" frameborder="0" src="{name}"></iframe>'
RECEIVE = """<!doctype html><script>const measured = {}
addEventListener("message", event => {
  measured[event.data.name] = event.data.measured
  document.documentElement.dataset.measured = JSON.stringify(measured)
})</script>"""

FITTING = (
    ("with_telemetry", 400),
    ("rejected", 400),
    ("incomplete", 400),
    ("hostile", 400),
    ("large_cluster", 400),
    ("four_nodes", 400),
    ("rejected", 1900),
)
BAD = '<div class="wide" style="width: 900px">x</div><img src="http://outside.invalid/x"><script>1</script></main>'


def browse(page: Path) -> str:
    """The DOM of the file ``page`` after its scripts."""
    flags = [*FLAGS, f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", f"file://{page}"]
    command = [tool("chromium", "chromium-browser", "google-chrome"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def without_policy(page: str) -> str:
    """``page`` without its Content-Security-Policy, which also blocks MEASURE."""
    copy = re.sub(r'<meta http-equiv="Content-Security-Policy".*>', "", page)
    assert copy != page
    return copy


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The measurements of MEASURE by page, without pages that block the script."""
    pages = {
        f"{sample}-{width}": (without_policy(render(samples.SAMPLES[sample]())), width) for sample, width in FITTING
    } | {
        "bad": (without_policy(render(samples.incomplete())).replace("</main>", BAD), 400),
        "with policy": (render(samples.accepted()), 400),
    }
    folder = tmp_path_factory.mktemp("browser")
    frames = []
    for number, (name, (page, width)) in enumerate(pages.items()):
        script = MEASURE.replace("NAME", name)
        (folder / f"{number}.html").write_text(page + script, encoding="utf-8")
        frames.append(FRAME.format(width=width, name=f"{number}.html"))
    (folder / "frames.html").write_text(RECEIVE + "".join(frames), encoding="utf-8")
    dom = browse(folder / "frames.html")
    assert dom.count("<iframe") == len(pages)
    match = re.search(r'data-measured="([^"]*)"', dom)
    assert match, dom
    results: dict[str, dict[str, Any]] = json.loads(html.unescape(match[1]))
    return results


@pytest.mark.parametrize(("sample", "width"), FITTING)
def test_the_page_fits_the_window_and_loads_nothing(
    measured: dict[str, dict[str, Any]], sample: str, width: int
) -> None:
    result = measured[f"{sample}-{width}"]
    assert result["width"] == width
    assert result["wide"] == []
    assert result["scroll_width"] <= width
    assert result["fetched"] == []
    assert result["scripts"] == 1  # MEASURE
    assert 0 < result["decision"] < 300 or sample == "hostile"


def test_wide_elements_downloads_and_scripts_are_detected(measured: dict[str, dict[str, Any]]) -> None:
    """The measurement of the test above detects all three in a page that has them."""
    result = measured["bad"]
    assert result["wide"] == ["DIV.wide"]
    assert result["scroll_width"] > 800
    assert result["fetched"] == ["http://outside.invalid/x"]
    assert result["scripts"] == 2


def test_the_page_blocks_all_scripts(measured: dict[str, dict[str, Any]]) -> None:
    assert set(measured) == {*(f"{sample}-{width}" for sample, width in FITTING), "bad"}


def test_the_decision_is_in_the_dom(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render(samples.rejected()), encoding="utf-8")
    dom = browse(page)
    assert "<h1>REJECTED: 1 GPU fails</h1>" in dom
    assert samples.rejected().decision.reason in dom
