"""The HTML report: well-formed, self-contained, and safe with hostile text."""

from __future__ import annotations

import re
import shlex
import time
from html.parser import HTMLParser

import pytest
from tools.records import record_path

from seatrial.model import Artifact, Outcome, Trial
from seatrial.pipeline.run_directory import load_trial
from seatrial.report.appendix import MEANINGS, telemetry_notes
from seatrial.report.html_page import SYMBOLS, _distribution, href, render
from seatrial.report.identity import gpus_of, serial_digest
from seatrial.report.parts import parts, problems
from seatrial.report.view import check_views, coverage
from tests.report import samples
from tests.report.sample_data import METHOD
from tests.report.sample_telemetry import telemetry

VOID = {"meta", "link", "wbr", "input"}


class Page(HTMLParser):
    """The elements, attributes and text of a page. Raises AssertionError for tags that are not properly nested."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)
        if tag in ("td", "th", "dt", "dd"):
            self.text += " "

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.text += data

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_the_page_is_well_formed_and_self_contained(sample: str) -> None:
    html = render(samples.SAMPLES[sample]())
    page = Page(html)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "form", "base", "image", "use", "foreignobject"}
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("src", "srcset", "style", "xlink:href")}
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    for link in page.values("href"):
        assert link == "data:," or link.startswith("./") or link.removeprefix("#") in ids, link
    assert not re.findall(r"url\([^)]*\)", html)
    assert "@import" not in html


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_the_decision_has_a_symbol_and_a_reason(sample: str) -> None:
    trial = samples.SAMPLES[sample]()
    page = Page(render(trial))
    assert trial.decision.value in page.text
    assert f"{SYMBOLS[trial.decision.value]} {trial.decision.value}" in words(page.text)
    if sample != "hostile":
        assert trial.decision.reason in page.text
        assert f"Tested: {trial.decision.tested_hardware}" in page.text
        assert shlex.join(trial.command) in page.text


def test_every_problem_has_its_worst_value_evidence_and_fix() -> None:
    trial = samples.rejected()
    text = words(Page(render(trial)).text)
    for problem in problems(parts(trial)):
        assert problem.title in text
        for figure in problem.figures:
            assert figure.verdict
            for expected in (figure.verdict.message, figure.verdict.evidence, figure.verdict.fix.replace("`", "")):
                assert words(expected) in text


def test_the_first_screen_answers_what_why_and_what_to_do() -> None:
    trial = load_trial(record_path("2026-11-23-2xh200/busy-gpu"))
    first = words(
        Page(render(trial, "0123abcd")).text.partition("Problems by part")[2].partition("Problems by part")[0]
    )
    for expected in (
        "REJECTED: 1 GPU and 1 link fail",
        trial.decision.reason,
        "Do first on vm: nvidia-smi -q",
        "vm/gpu1 serial 1654924088691, GPU-71065a98-5ac3-45ac-4f16-b66204303f01, slot 0000:00:07.0",
        "Excluded by --only 35 checks",
        "1 node × 2 GPUs · launcher local · NVIDIA H200 · driver 580.159.04",
        "0123abcd",
        serial_digest(gpus_of(trial)),
        "Provider: name, date, signature",
    ):
        assert expected in first


def test_checks_that_are_not_covered_lead_to_their_list() -> None:
    page = Page(render(load_trial(record_path("2026-11-23-2xh200/busy-gpu"))))
    assert page.values("href").count("#not-covered") == 3  # contents, excluded checks, metrics without a limit


def test_checks_without_a_result_stand_out_on_the_first_screen() -> None:
    trial = samples.large_cluster()
    assert {"Not measured", "Without a verdict"} & set(coverage(trial))
    not_tested = set(coverage(trial)) - {"Covered", "Does not apply here"}
    assert Page(render(trial)).values("class").count("excluded") == len(not_tested)


def test_a_record_without_serials_says_so() -> None:
    page = render(samples.accepted().model_copy(update={"measurements": (), "environment": {}}))
    assert "serials" not in Page(page).values("id")
    assert "none recorded" in Page(page).text
    assert "no SHA-256" in Page(page).text


def test_failures_precede_errors_and_warnings_everywhere() -> None:
    trial = samples.large_cluster()
    found = [problem.first.outcome for problem in problems(parts(trial))]
    assert found == [Outcome.FAIL, Outcome.ERROR, Outcome.WARN, Outcome.WARN]
    html = render(trial)
    assert re.findall(r'<details class="problem (\w+)"', html) == ["fail", "error", "warn", "warn"]
    assert re.findall(r'<details class="problem \w+" id="[^"]*" (open)?', html) == ["open", "open", "", ""]


def test_every_finding_is_in_the_page() -> None:
    trial = samples.rejected()
    text = words(Page(render(trial)).text)
    for finding in trial.findings:
        for expected in (
            finding.title,
            finding.evidence,
            finding.first_command,
            finding.fix.replace("`", ""),
            finding.source,
        ):
            assert words(expected) in text


def test_a_trial_without_problems() -> None:
    trial = samples.accepted()
    passed = tuple(verdict for verdict in trial.verdicts if verdict.outcome.value == "PASS")
    assert "No FAIL, ERROR, UNJUDGED or WARN" in Page(render(trial.model_copy(update={"verdicts": passed}))).text


def test_the_method_is_below_the_heading() -> None:
    html = render(samples.accepted())
    assert f'<p class="how">{METHOD}</p>' in html
    assert html.count(METHOD) == 1  # not repeated in the facts


def test_the_state_and_failed_rank_of_jobs() -> None:
    text = words(Page(render(samples.incomplete())).text)
    assert "ranks 1 local FAILED 7.9 s 21.4 s node1/gpu3" in text
    assert "ranks, attempt 2, HUNG no heartbeat for 60 s" in text


def test_the_stop_reason_of_the_trial() -> None:
    trial = samples.incomplete().model_copy(update={"stop_reason": "interrupted by Ctrl-C"})
    assert words(Page(render(trial)).text).count("interrupted by Ctrl-C") == 2


def test_each_setting_has_its_origin() -> None:
    text = words(Page(render(samples.accepted())).text)
    assert "cluster.gpus_per_node 4 --set" in text
    assert "checks.collectives.all_reduce.expect.busbw.8GiB > 350 GB/s trial file acceptance.yaml" in text


def test_a_node_with_another_driver_is_listed_separately() -> None:
    text = words(Page(render(samples.large_cluster())).text)
    assert "driver node01, node02, node03 and 60 more 580.95.05 driver node23 570.86.15" in text


def test_the_overhead_in_seconds_and_percent() -> None:
    text = words(Page(render(samples.accepted())).text)
    assert "Time: 62.4 s in checks, 9.5 s overhead (13.2% of the total)" in text


def test_every_outcome_has_its_own_symbol() -> None:
    assert all(len(SYMBOLS[outcome]) == 1 for outcome in MEANINGS)
    assert len({SYMBOLS[outcome] for outcome in MEANINGS}) == len(MEANINGS)
    html = render(samples.rejected())
    assert len(re.findall(r'class="outcome ', html)) == len(
        re.findall(r'class="sign" aria-hidden="true">.</span>', html)
    )


def test_hostile_text_is_escaped() -> None:
    page = Page(render(samples.hostile()))
    assert "<script>alert(1)</script><img src=x onerror=alert(2)> ]]> &lt; \"quotes'" in page.text
    assert "{{ 7*7 }} {% raw %}" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page.text)


@pytest.mark.parametrize(
    ("path", "link"),
    [
        ("artifacts/a b.json", "./artifacts/a%20b.json"),
        ("javascript:alert(1)", "./javascript%3Aalert%281%29"),
        ("a/../../etc/passwd", ""),
        ("/etc/passwd", ""),
        ("//evil.example/x", ""),
        ('"><script>', "./%22%3E%3Cscript%3E"),
    ],
)
def test_links_point_into_the_run_directory_only(path: str, link: str) -> None:
    assert href(path) == link


def test_an_artifact_outside_the_run_directory_has_no_link() -> None:
    page = Page(render(with_artifact(Artifact(path="../../etc/passwd", title="secrets"))))
    assert "secrets (../../etc/passwd)" in page.text
    assert not [link for link in page.values("href") if "passwd" in link]


def test_an_artifact_is_a_link() -> None:
    page = Page(render(with_artifact(Artifact(path="artifacts/model.pt", title="the model"))))
    assert "./artifacts/model.pt" in page.values("href")


def with_artifact(artifact: Artifact) -> Trial:
    trial = samples.accepted()
    first = trial.measurements[0].model_copy(update={"artifacts": (artifact,)})
    return trial.model_copy(update={"measurements": (first, *trial.measurements[1:])})


def test_the_page_of_512_gpus_is_rendered_in_3_s_with_the_worst_parts() -> None:
    trial = samples.large_cluster()
    started = time.process_time()
    html = render(trial)
    assert time.process_time() - started < 3
    assert len(html) < 1_000_000
    assert html.count("<") < 20_000
    assert "<summary>node17/gpu5 <span" in html  # the worst of 512
    assert "<li>node42/gpu2 <b>3</b></li>" in html
    assert html.count('class="node"') == 64


def test_the_page_has_the_dashboards_of_each_phase_and_the_load_of_each_gpu() -> None:
    page = Page(render(samples.with_telemetry()))
    text = words(page.text)
    assert "GPU dashboard 4 GPUs, 60 s, one point per 1 s 0–40 s collectives.all_reduce, 41–41 s x, 42–60 s" in text
    assert "CPU dashboard 1 node, 60 s" in text
    assert "collectives.all_reduce h200-01/gpu3 21 98 %" in text
    assert "software power cap 20%, software thermal slowdown 10%" in text
    assert "collectives.transport (4 GPUs), collectives.all_reduce (1 GPU)." in text
    assert "Samples per second and GPU: 0.25 to 0.33." in text
    assert "Highest CPU use of a sampler: 0.41% of one core." in text
    assert "h200-01: no telemetry samples for 41 s while checks ran" in text
    assert "./jobs/ranks/telemetry.jsonl.gz" in page.values("href")
    assert "dashboard" not in Page(render(samples.accepted())).text


@pytest.mark.parametrize(("share", "is_marked"), [(0.01, False), (0.0101, True)])
def test_cpu_use_of_a_sampler_above_the_limit_is_marked(share: float, is_marked: bool) -> None:
    notes = list(telemetry_notes(telemetry("h200-01", 4).model_copy(update={"sampler_cpu_share": share})))
    assert any("above the limit of 1 %" in note for note in notes) is is_marked


def test_telemetry_of_512_gpus_adds_little_to_the_page() -> None:
    without_telemetry = samples.accepted()
    page = render(without_telemetry.model_copy(update={"telemetry": telemetry("n0", 512)}))
    assert len(page) - len(render(without_telemetry)) < 90_000


def test_a_figure_has_a_distribution_only_if_values_differ() -> None:
    checks = {check.name: check for check in check_views(samples.accepted())}
    assert {row.metric for row in checks["gpu.inventory"].figures if _distribution(row)} == {"temperature"}
