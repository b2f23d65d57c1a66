"""The summary on the terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from tools.records import record_path

from seatrial.checks import catalog
from seatrial.judge.insights import RARE_FAULTS
from seatrial.model import Baseline, Basis, BasisKind, DecisionValue, Insight, Outcome, Trial
from seatrial.pipeline.run_directory import load_trial
from seatrial.report import figures
from seatrial.report.terminal import summary
from tests.baselines import learned_runs
from tests.report import samples
from tests.report.conftest import assert_golden


def printed(trial: Trial, width: int = 80, tty: bool = False, verbose: bool = False) -> str:
    file = io.StringIO()
    colors = "standard" if tty else None
    console = Console(file=file, width=width, force_terminal=tty or None, color_system=colors)  # type: ignore[arg-type]
    summary(trial, console, verbose=verbose)
    return file.getvalue()


def test_golden() -> None:
    lines = [line.rstrip() for line in printed(samples.rejected()).splitlines()]
    assert_golden("report-rejected.txt", "\n".join(lines) + "\n")


def test_full_golden() -> None:
    lines = [line.rstrip() for line in printed(samples.rejected(), verbose=True).splitlines()]
    assert_golden("report-rejected-full.txt", "\n".join(lines) + "\n")


def test_one_bad_gpu_has_at_most_25_lines_and_every_result_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "catalog", catalog)
    trial = load_trial(record_path("2026-11-23-2xh200/busy-gpu"))
    lines = printed(trial, width=160).splitlines()
    assert len(lines) <= 25
    (gpu,) = (line for line in lines if line.startswith("FAIL") and "serial 1654924088691" in line)
    assert "vm/gpu1" in gpu
    assert sum("313.2 GB/s" in line for line in lines) == 2  # as part, and as headline figure


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_without_a_terminal_it_is_plain_text_in_80_columns(sample: str) -> None:
    text = printed(samples.SAMPLES[sample]()) + printed(samples.SAMPLES[sample](), verbose=True)
    assert "\x1b" not in text
    # Commands are not wrapped, so that they can be copied
    assert all(cell_len(line) <= 80 for line in text.splitlines() if not line.startswith("Do first"))


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_the_decision_comes_last(sample: str) -> None:
    trial = samples.SAMPLES[sample]()
    last = printed(trial, width=4000).rstrip().split("\n\n")[-1].splitlines()
    assert last[0].startswith(f"{trial.decision.value}  ")
    assert last[1].strip().startswith(("Tested: ", "Cause: "))
    assert any(line.startswith("Do first: ") for line in last) is (trial.decision.value is not DecisionValue.ACCEPTED)


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


def test_a_problem_of_many_parts_names_four_and_counts_the_rest() -> None:
    trial = samples.large_cluster()
    warnings = tuple(verdict for verdict in trial.verdicts if verdict.outcome is Outcome.WARN)
    text = printed(trial.model_copy(update={"verdicts": warnings}), width=200)
    assert "24 nodes  node41, node42, node43, node44 and 20 more" in text
    assert "node64" in printed(trial, verbose=True)


def test_long_evidence_is_truncated_with_a_note() -> None:
    trial = samples.incomplete()
    lines = "\n".join(f"line {number}" for number in range(50))
    verdict = replace(trial.verdicts[-1], evidence=lines)
    text = printed(trial.model_copy(update={"verdicts": (verdict,)}), verbose=True)
    assert "line 7\n" in text.replace(" \n", "\n").replace("  ", "")
    assert "line 8" not in text
    assert "… 42 more lines in the report" in text


def test_excluded_checks_are_listed() -> None:
    assert "Excluded by --skip: 1 check (train.ddp)" in printed(samples.rejected())


def test_the_number_of_verdicts_from_the_sites_baseline() -> None:
    trial = samples.rejected()
    judged_by_site = replace(trial.verdicts[0], basis=Basis(BasisKind.SITE, "hall-2", 363, "GB/s", source="3 runs"))
    site = Baseline(name="hall-2", learned_from=learned_runs(1), expected={})
    with_baseline = trial.model_copy(update={"verdicts": (judged_by_site, *trial.verdicts[1:]), "baseline": site})
    assert "2 SKIP; 1 judged by the site's baseline hall-2" in printed(with_baseline, width=120, verbose=True)
    assert "baseline" not in next(line for line in printed(trial, verbose=True).splitlines() if "verdicts: " in line)


def test_names_of_checks_are_not_truncated() -> None:
    assert "collectives.all_reduce " in printed(samples.large_cluster(), width=80, verbose=True)


def test_the_decision_ends_with_the_rare_faults_that_a_soak_would_have_shown() -> None:
    insight = Insight(check="device.soak", title=RARE_FAULTS, text="seen with 13 % (N = 1)")
    trial = samples.accepted().model_copy(update={"insights": (insight,)})
    assert printed(trial).rstrip().endswith("seen with 13 % (N = 1)")
