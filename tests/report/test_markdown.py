"""The Markdown summary."""

from __future__ import annotations

import re
from dataclasses import replace

from markdown_it import MarkdownIt

from seatrial.report.markdown import MAX_PROBLEMS, render
from tests.report import samples
from tests.report.conftest import assert_golden


def as_html(text: str) -> str:
    return str(MarkdownIt("commonmark").enable("table").render(text))


def test_golden() -> None:
    assert_golden("report-rejected.md", render(samples.rejected()))


def test_hostile_text_is_escaped() -> None:
    html = as_html(render(samples.hostile()))
    assert "<script" not in html
    assert "<img" not in html
    assert "<a " not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_mentions_and_issue_numbers_are_escaped() -> None:
    outside_code = re.sub(r"(?s)<code.*?</code>", "", as_html(render(samples.hostile())))
    assert "everyone" in outside_code
    assert "@everyone" not in outside_code
    assert "#1" not in outside_code


def test_tables_of_parts_and_checks_have_one_row_each_with_hostile_names() -> None:
    trial = samples.hostile()
    html = as_html(render(trial))
    assert html.count("<table>") == 2
    # two bad parts; five planned checks, the hostile one, and the excluded hostile one
    assert html.count("<tr>") == (1 + 2) + (1 + 5 + 1 + 1)
    assert html.count("<td") == 2 * 5 + 7 * 3


def test_the_number_of_problems_is_limited() -> None:
    trial = samples.large_cluster()
    different = tuple(replace(verdict, metric=f"m{number}") for number, verdict in enumerate(trial.verdicts))
    text = render(trial.model_copy(update={"verdicts": different}))
    assert text.count("\n### ") == MAX_PROBLEMS
    assert "more problems (see the report)." in text


def test_commands_are_code() -> None:
    assert "`nvidia-smi -q -d ROW_REMAPPER -i 2`" in render(samples.rejected())
