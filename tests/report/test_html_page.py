"""The HTML report as a document: sound, self-contained, and deaf to whatever text it shows."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from pydantic import JsonValue

from seatrial.model import Artifact, Outcome, Trial
from seatrial.report.html_page import MEANINGS, SYMBOLS, href, render
from tests.report import samples
from tests.report.made_up import HOW

VOID = {"meta", "link", "wbr"}


class Page(HTMLParser):
    """The elements of a page; a tag that is not closed in its turn is an error."""

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
def test_a_page_is_sound_and_self_contained(sample: str) -> None:
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
    assert set(re.findall(r"url\([^)]*\)", html)) == {"url(#hatch)"}
    assert "@import" not in html


@pytest.mark.parametrize("sample", samples.SAMPLES)
def test_the_decision_is_a_word_a_sign_and_its_reason(sample: str) -> None:
    trial = samples.SAMPLES[sample]()
    page = Page(render(trial))
    assert trial.decision.value in page.text
    assert f"{SYMBOLS[trial.decision.value]} {trial.decision.value}" in words(page.text)
    if sample != "hostile":
        assert trial.decision.reason in page.text
        assert f"Tested: {trial.decision.tested_hardware}" in page.text
        assert shlex.join(trial.command) in page.text


def test_every_trouble_has_its_evidence_and_fix() -> None:
    trial = samples.rejected()
    text = words(Page(render(trial)).text)
    for verdict in trial.verdicts:
        if verdict.outcome.value in ("FAIL", "ERROR", "UNJUDGED", "WARN"):
            for said in (verdict.message, verdict.evidence, verdict.fix.replace("`", "")):
                assert words(said) in text


def test_why_a_check_brought_back_no_number_stands_in_the_overview() -> None:
    trial = samples.rejected()
    why = "does not apply: one GPU has nobody to talk to"
    none = replace(trial.verdicts[0], outcome=Outcome.SKIP, metric="", value=None, detail=why)
    skipped = trial.model_copy(update={"verdicts": (none,), "measurements": (), "jobs": ()})
    overview = render(skipped).partition('id="overview"')[2].partition("</table>")[0]
    assert "<td>does not apply: one GPU has nobody to talk to</td>" in overview


def test_every_finding_is_told() -> None:
    trial = samples.rejected()
    text = words(Page(render(trial)).text)
    for finding in trial.findings:
        for said in (
            finding.title,
            finding.evidence,
            finding.first_command,
            finding.fix.replace("`", ""),
            finding.source,
        ):
            assert words(said) in text


def test_nothing_to_complain_of_is_said() -> None:
    trial = samples.accepted()
    good = tuple(verdict for verdict in trial.verdicts if verdict.outcome.value == "PASS")
    assert "No FAIL, ERROR, UNJUDGED or WARN" in Page(render(trial.model_copy(update={"verdicts": good}))).text


def test_how_it_was_measured_stands_open_under_the_heading() -> None:
    html = render(samples.accepted())
    assert f'<p class="how">{HOW}</p>' in html
    assert html.count(HOW) == 1  # and not among the folded facts again


def test_the_map_has_a_legend() -> None:
    text = words(Page(render(samples.fleet())).text)
    assert (
        "A box is a GPU with its number on the node, or the symbol of an outcome other than PASS. "
        "✗ FAIL ⊘ ERROR 0 PASS" in text
    )
    assert "A box is a rank (a process without a GPU) with" in words(Page(render(on_ranks())).text)


def on_ranks() -> Trial:
    return Trial.model_validate_json(samples.accepted().model_dump_json().replace("h200-01/gpu", "h200-01/rank"))


def test_how_jobs_ended() -> None:
    text = words(Page(render(samples.incomplete())).text)
    assert "ranks 1 local ✗FAILED 7.9 s 21.4 s node1/gpu3" in text
    assert "ranks, attempt 2, HUNG: node1/gpu3 silent for 60 s" in text


def test_what_ended_the_trial_early_is_said() -> None:
    trial = samples.incomplete().model_copy(update={"stop_reason": "interrupted by Ctrl-C"})
    assert "The trial was stopped: interrupted by Ctrl-C" in Page(render(trial)).text


def test_the_config_has_origins() -> None:
    text = words(Page(render(samples.accepted())).text)
    assert "cluster.gpus_per_node 4 --set" in text
    assert "checks.collectives.all_reduce.expect.busbw.8GiB > 350 GB/s trial file acceptance.yaml" in text


def test_the_one_node_with_another_driver_stands_out() -> None:
    text = words(Page(render(samples.fleet())).text)
    assert "driver 580.95.05 node01, node02, node03 … (63 places) 570.86.15 node23" in text


def test_the_time_bar_says_the_overhead_in_percent() -> None:
    text = words(Page(render(samples.accepted())).text)
    assert "Time 62.4 s in checks and 9.5 s overhead" in text
    assert "13.2 % of the total" in text


def test_a_sign_stands_beside_every_word() -> None:
    assert all(len(SYMBOLS[outcome]) == 1 for outcome in MEANINGS)
    assert len({SYMBOLS[outcome] for outcome in MEANINGS}) == len(MEANINGS)
    html = render(samples.rejected())
    assert len(re.findall(r'class="outcome ', html)) == len(
        re.findall(r'class="sign" aria-hidden="true">.</span>', html)
    )


def test_hostile_text_is_shown_and_does_nothing() -> None:
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
def test_links_lead_into_the_run_directory_only(path: str, link: str) -> None:
    assert href(path) == link


def test_an_artifact_that_leads_out_is_named_without_a_link() -> None:
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


def paired(gpus: int) -> Trial:
    """With figures of each pair of GPUs, as transfer.peers records them."""
    rows: list[JsonValue] = [
        [None if row == to else 780.0 + row + to / 10 for to in range(gpus)] for row in range(gpus)
    ]
    names = [f"gpu{number}" for number in range(gpus)]
    trial = samples.accepted()
    first, *others = trial.measurements
    facts: dict[str, JsonValue] = {**first.facts, "bidirectional_matrix": {"gpus": [*names], "gb_s": [*rows]}}
    return trial.model_copy(update={"measurements": (first.model_copy(update={"facts": facts}), *others)})


def test_a_figure_for_each_pair_is_a_small_table() -> None:
    html = render(paired(3))
    Page(html)
    assert "<tr><th>GB/s</th><th>gpu0</th><th>gpu1</th><th>gpu2</th></tr>" in html
    assert "<tr><th>gpu2</th><td>782</td><td>782</td><td>–</td></tr>" in html


def test_512_gpus_are_rendered_soon_small_and_folded() -> None:
    trial = samples.fleet()
    began = time.process_time()
    html = render(trial)
    assert time.process_time() - began < 3
    assert len(html) < 1_000_000
    assert html.count('<details class="by-subject" >') == 4
    assert '<details class="by-subject" open>' not in html
    assert '<details class="by-subject" open>' in render(samples.accepted())
