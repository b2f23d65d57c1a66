"""The summary on the terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from seatrial.model import Baseline, Basis, BasisKind, Trial
from seatrial.report.terminal import summary
from tests.report import samples
from tests.report.conftest import assert_golden


def printed(trial: Trial, width: int = 80, tty: bool = False) -> str:
    file = io.StringIO()
    summary(
        trial, Console(file=file, width=width, force_terminal=tty or None, color_system="standard" if tty else None)
    )
    return file.getvalue()


def test_golden() -> None:
    lines = [line.rstrip() for line in printed(samples.rejected()).splitlines()]
    assert_golden("report-rejected.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_without_a_terminal_it_is_plain_text_in_80_columns(sample: str) -> None:
    text = printed(samples.SAMPLES[sample]())
    assert "\x1b" not in text
    # Commands are not wrapped, so that they can be copied
    assert all(cell_len(line) <= 80 for line in text.splitlines() if not line.startswith("   run first "))


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_the_decision_comes_last(sample: str) -> None:
    trial = samples.SAMPLES[sample]()
    last = printed(trial, width=4000).rstrip().splitlines()[-2:]
    assert last[0].startswith(f"{trial.decision.value}  ")
    assert last[1].strip().startswith("Tested: ")


def test_hostile_text_is_not_interpreted() -> None:
    text = printed(samples.hostile(), width=2000, tty=True)
    assert "[bold red]markup[/]" in text
    assert "[link=file:///etc/passwd]x[/link]" in text
    assert ":boom:" in text
    assert "\x1b]8" not in text
    assert "\x07" not in text
    assert "\x1b[31mred" not in text


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[1;31mREJECTED" in printed(samples.rejected(), tty=True)
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(samples.rejected(), tty=True)
    assert "\x1b[1mREJECTED" in text
    assert "\x1b[1;31m" not in text


def test_a_problem_of_many_subjects_lists_four_and_counts_the_rest() -> None:
    text = printed(samples.large_cluster(), width=200)
    assert "nofile_soft is 1,024 files, expected >= 4,096 files: node41, node42, node43, node44 … and 20 more" in text


def test_long_evidence_is_truncated_with_a_note() -> None:
    trial = samples.incomplete()
    lines = "\n".join(f"line {number}" for number in range(50))
    verdict = replace(trial.verdicts[-1], evidence=lines)
    text = printed(trial.model_copy(update={"verdicts": (verdict,)}))
    assert "line 7\n" in text.replace(" \n", "\n").replace("  ", "")
    assert "line 8" not in text
    assert "… 42 more lines in the report" in text


def test_excluded_checks_are_listed() -> None:
    assert "  train.ddp: --skip" in printed(samples.rejected())


def test_the_number_of_verdicts_from_the_sites_baseline() -> None:
    trial = samples.rejected()
    judged_by_site = replace(trial.verdicts[0], basis=Basis(BasisKind.SITE, "hall-2", 363, "GB/s", source="3 runs"))
    site = Baseline(name="hall-2", learned_from=("a.json",), expected={})
    with_baseline = trial.model_copy(update={"verdicts": (judged_by_site, *trial.verdicts[1:]), "baseline": site})
    assert "2 SKIP; 1 judged by the site's baseline hall-2" in printed(with_baseline, width=120)
    assert "baseline" not in next(line for line in printed(trial).splitlines() if line.startswith("verdicts: "))


def test_names_of_checks_are_not_truncated() -> None:
    assert "  collectives.all_reduce " in printed(samples.large_cluster(), width=80)
