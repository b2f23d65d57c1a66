"""One rule on values of devices of one kind: references, thresholds, peers, plausibility."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.hardware.references import References, Spec, skus
from seatrial.judge.rules import judge_check
from seatrial.model import (
    Baseline,
    Basis,
    BasisKind,
    Measurement,
    Metric,
    Outcome,
    Reason,
    ReferenceValue,
    Rule,
    Scope,
    Threshold,
    Verdict,
)
from tests.judge.test_rules import (
    BOTH,
    BY_BASELINE,
    FOUR,
    SKU,
    SPEED,
    STRANGE,
    TOGETHER,
    check,
    judged,
    measured,
    verdicts,
)


@pytest.mark.parametrize(
    ("value", "outcome"), [(400, Outcome.PASS), (379, Outcome.WARN), (361, Outcome.WARN), (359, Outcome.FAIL)]
)
def test_a_baseline_judges_by_shares_and_names_its_source(value: float, outcome: Outcome) -> None:
    rule = Rule(metric="speed", reference="all_reduce", meaning="", fix="")
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA Test", "world_size": 4, "nodes": 1}
    (verdict,) = verdicts(check(rule), measured(value, facts=facts))
    assert verdict.outcome is outcome
    assert "a paper" in verdict.basis_text


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"gpu": "NVIDIA Testx", "world_size": 4, "nodes": 1}, "no SKU data for NVIDIA Testx"),
        ({"gpu": "NVIDIA Test", "world_size": 8, "nodes": 1}, "for 8 GPUs on 1 nodes"),
        ({"world_size": 4, "nodes": 1}, "no SKU data for an unnamed device"),
    ],
)
def test_unknown_hardware_is_unjudged_never_guessed(facts: dict[str, JsonValue], words: str) -> None:
    rule = Rule(metric="speed", reference="all_reduce", meaning="", fix="")
    (verdict,) = verdicts(check(rule), measured(1e9, facts=facts))
    assert verdict.outcome is Outcome.UNJUDGED
    assert words in verdict.message


def sampled(value: float, *samples: float, facts: dict[str, JsonValue] = FOUR) -> Measurement:
    metric = Metric(name="speed", value=value, unit="GB/s", subject="cluster", samples=samples)
    return Measurement(check="c", subject="cluster", metrics=(metric,), facts=facts)


def fleet(*values: float) -> list[Measurement]:
    return [measured(value, subject=f"n{index}", facts=STRANGE) for index, value in enumerate(values)]


def test_a_shortfall_that_noise_may_have_made_only_warns() -> None:
    steady, shaky = [359.0] * 10, [330.0, 335, 340, 350, 358, 359, 361, 366, 370, 390]
    assert judged(check(BY_BASELINE), sampled(359, *steady)) == [("cluster", Outcome.FAIL)]
    (verdict,) = verdicts(check(BY_BASELINE), sampled(359, *shaky))
    assert verdict.outcome is Outcome.WARN
    assert verdict.reasons == (Reason.THRESHOLD_VIOLATED, Reason.WITHIN_CONFIDENCE_INTERVAL)


def test_a_threshold_missed_within_the_noise_only_warns_and_says_so() -> None:
    shaky = [8.0, 9, 9.5, 9.8, 9.9, 10.2, 10.5, 11, 12, 13]
    (verdict,) = verdicts(check(SPEED), sampled(9.9, *shaky))
    assert verdict.outcome is Outcome.WARN
    assert "which its own 95 % interval still reaches (9 GB/s to 12 GB/s)" in verdict.message
    assert judged(check(SPEED), sampled(9.9, *[9.9] * 10)) == [("cluster", Outcome.FAIL)]


def test_a_sites_own_baseline_outranks_the_published_one() -> None:
    own = ReferenceValue(gpus=4, nodes=1, value=300, unit="GB/s", source="three runs", gpu="NVIDIA Test")
    site = Baseline(name="lab", learned_from=(), expected={"all_reduce": (own,)})
    (verdict,) = verdicts(check(BY_BASELINE), measured(299, facts=FOUR), site=site)
    assert verdict.outcome is Outcome.PASS
    assert verdict.basis_text.startswith("site lab: 300 GB/s (three runs)")
    (other,) = verdicts(check(BY_BASELINE), measured(299, facts={**FOUR, "gpu": "NVIDIA Strange"}), site=site)
    assert other.outcome is Outcome.UNJUDGED, "another GPU's baseline is nobody's"


def test_of_unknown_hardware_the_fleet_knows_who_is_slow_but_not_whether_all_are() -> None:
    what = check(BY_BASELINE, scope=Scope.NODE)
    said = verdicts(what, *fleet(100, 101, 99, 100, 80))
    assert [one.outcome for one in said] == [Outcome.UNJUDGED] * 4 + [Outcome.FAIL]
    assert "no uniform slowdown" in said[0].message
    assert said[4].basis_text.startswith("median of 5 subjects on NVIDIA Strange: 100 GB/s (no SKU data")


def test_a_reference_in_another_unit_judges_nothing() -> None:
    site = Baseline(
        name="lab",
        learned_from=("a",),
        expected={
            "all_reduce": (ReferenceValue(gpus=4, nodes=1, value=0.4, unit="TB/s", source="s", gpu="NVIDIA Test"),)
        },
    )
    (verdict,) = verdicts(check(BY_BASELINE), measured(10, facts=FOUR), site=site)
    assert verdict.outcome is Outcome.UNJUDGED
    assert "unit mismatch: site lab is 0.4 TB/s" in verdict.message
    (weak,) = verdicts(
        check(BY_BASELINE), measured(10, facts=FOUR), expect={"speed": Threshold.parse("> 0.1")}, site=site
    )
    assert "site lab" not in weak.basis_text


def test_a_threshold_in_another_unit_judges_nothing() -> None:
    assert judged(check(SPEED), measured(20), expect={"speed": Threshold.parse("> 10 MB/s")}) == [
        ("cluster", Outcome.UNJUDGED)
    ]


@pytest.mark.parametrize(("value", "outcome"), [(599, Outcome.PASS), (4000, Outcome.UNJUDGED)])
def test_more_than_the_hardware_can_do_was_measured_wrongly(value: float, outcome: Outcome) -> None:
    assert judged(check(BY_BASELINE), measured(value, facts=FOUR)) == [("cluster", outcome)]


@pytest.mark.parametrize(
    ("key", "value", "outcome", "words"),
    [
        ("x.busbw.1GiB", 600, Outcome.PASS, "speed is 600 GB/s"),
        (
            "x.busbw.1GiB",
            640,
            Outcome.UNJUDGED,
            "160.0% of the 400 GB/s of SKU Test GPU, which is more than can be believed",
        ),
        ("x.busbw.2GiB", 640, Outcome.PASS, "speed is 640 GB/s"),
        (
            "x.busbw.2GiB",
            701,
            Outcome.ERROR,
            "which nothing here can reach: it was measured wrongly: Test GPU has 700 GB/s",
        ),
    ],
)
def test_a_threshold_of_the_trial_does_not_make_the_unbelievable_good(
    key: str, value: float, outcome: Outcome, words: str
) -> None:
    """Beside what is published; of any size, beside what the links can carry."""
    spec = Spec(value=700, unit="GB/s", source="a datasheet")
    sku = SKU.model_copy(update={"spec": {"nvlink": spec}, "expected": {"x.busbw.1GiB": SKU.expected["all_reduce"]}})
    what = check(Rule(metric="speed", reference=key, meaning="", fix=""))
    expect = {"speed": Threshold.parse("> 390 GB/s")}
    (told,) = judge_check(what, [measured(value, facts=FOUR)], expect, "mine", References(None, [sku]))
    assert told.outcome is outcome
    assert words in told.message


@pytest.mark.parametrize(
    ("expect", "good"), [({}, Outcome.UNJUDGED), ({"speed": Threshold.parse("> 390 GB/s")}, Outcome.PASS)]
)
def test_what_no_link_carries_is_no_speed_whatever_it_is_held_to(expect: dict[str, Threshold], good: Outcome) -> None:
    """A clock that runs fast: half as much again as good hardware reaches may be more than its links carry."""
    sku = SKU.model_copy(update={"spec": {"nvlink": Spec(value=450, unit="GB/s", source="a datasheet")}})
    what = check(Rule(metric="speed", reference="all_gather.busbw.1GiB", meaning="", fix=""))
    for value, nodes, outcome in ((449, 1, good), (451, 1, Outcome.ERROR), (451, 2, good)):
        (told,) = judge_check(
            what, [measured(value, facts=FOUR | {"nodes": nodes})], expect, "mine", References(None, [sku])
        )
        assert told.outcome is outcome


@pytest.mark.parametrize(("settings", "outcome"), [("shipped", Outcome.UNJUDGED), ("changed", Outcome.PASS)])
def test_what_is_published_of_other_settings_does_not_make_a_figure_unbelievable(
    settings: str, outcome: Outcome
) -> None:
    sku = SKU.model_copy(update={"expected": {"train.x": SKU.expected["all_reduce"]}})
    what = check(Rule(metric="speed", reference="train.x", applies_if={"settings": "shipped"}, meaning="", fix=""))
    expect = {"speed": Threshold.parse("> 390 GB/s")}
    seen = measured(4000, facts=FOUR | {"settings": settings})
    (told,) = judge_check(what, [seen], expect, "mine", References(None, [sku]))
    assert told.outcome is outcome


def test_unnamed_devices_and_zeros_are_no_fleet() -> None:
    what = check(BY_BASELINE, scope=Scope.NODE)
    unnamed = [measured(100, subject=f"n{index}", facts={"world_size": 1, "nodes": 1}) for index in range(4)]
    assert {outcome for _, outcome in judged(what, *unnamed)} == {Outcome.UNJUDGED}
    assert {one.outcome for one in verdicts(what, *fleet(0, 0, 0, 100))} == {Outcome.UNJUDGED}


def test_two_can_never_outvote_each_other() -> None:
    what = check(BY_BASELINE, scope=Scope.NODE)
    assert [one.outcome for one in verdicts(what, *fleet(100, 50))] == [Outcome.UNJUDGED] * 2


def test_a_widely_spread_fleet_fails_nobody() -> None:
    what = check(BY_BASELINE, scope=Scope.NODE)
    said = verdicts(what, *fleet(60, 80, 100, 120, 140))
    assert {one.outcome for one in said} == {Outcome.UNJUDGED}


def test_a_subject_far_under_the_others_warns_though_it_reaches_what_is_published() -> None:
    what = check(BY_BASELINE, scope=Scope.NODE)
    said = verdicts(what, *(measured(value, subject=f"n{value}", facts=FOUR) for value in (440, 441, 439, 440, 400)))
    assert [one.outcome for one in said] == [Outcome.PASS] * 4 + [Outcome.WARN]
    assert "far under the others" in said[4].message


def test_among_siblings_who_gets_far_less_warns_and_never_fails() -> None:
    assert {outcome for _, outcome in judged(check(TOGETHER), *fleet(48.4, 48.2, 40.3, 37.0))} == {Outcome.PASS}
    assert {outcome for _, outcome in judged(check(TOGETHER), *fleet(48.4, 48.2, 48.4, 40.3))} == {Outcome.PASS}
    *good, bad = verdicts(check(TOGETHER), *fleet(48.4, 48.2, 48.4, 24.0))
    assert {one.outcome for one in good} == {Outcome.PASS}
    assert (bad.outcome, bad.fix) == (Outcome.WARN, "look at the tree")
    of = "median of 4 subjects on NVIDIA Strange"
    assert bad.message == f"speed is 24 GB/s, 49.7% of the 48.3 GB/s {of}: it shares a port"
    assert bad.basis_text == f"{of}; warns under 75%"


def test_siblings_are_judged_by_no_file_and_all_slow_is_not_asked() -> None:
    """400 GB/s are known of this GPU and key: a figure of the host's memory is not held to what another host gave."""
    named = TOGETHER.model_copy(update={"reference": "all_reduce"})
    slow = [sampled(9.0, facts=FOUR) for _ in range(4)]
    assert {outcome for _, outcome in judged(check(named), *slow)} == {Outcome.PASS}


@pytest.mark.parametrize("values", [(48.0, 20.0), (48.0,)])
def test_too_few_siblings_are_not_compared(values: tuple[float, ...]) -> None:
    found = verdicts(check(TOGETHER), *fleet(*values))
    assert {one.outcome for one in found} == {Outcome.SKIP}
    assert "too few of one model to be compared with each other" in found[0].message


def test_siblings_that_differ_widely_and_what_was_not_measured() -> None:
    assert {outcome for _, outcome in judged(check(TOGETHER), *fleet(55, 55, 27, 27))} == {Outcome.PASS}
    assert judged(check(TOGETHER), measured(facts=FOUR)) == [("cluster", Outcome.ERROR)]


def pair(there: float, back: float, facts: dict[str, JsonValue] = FOUR) -> Measurement:
    ends = {"n/gpu0->gpu1": there, "n/gpu1->gpu0": back, "n/gpu0->gpu2": 400.0}
    metrics = tuple(Metric(name="speed", value=value, unit="GB/s", subject=name) for name, value in ends.items())
    return Measurement(check="c", subject="n/gpu0", metrics=metrics, facts=facts)


def test_the_slower_order_of_a_pair_warns_and_names_the_other() -> None:
    slow, good, alone = verdicts(check(BOTH), pair(383, 404))
    assert [one.outcome for one in (slow, good, alone)] == [Outcome.WARN, Outcome.PASS, Outcome.PASS]
    assert "95.8% of the 400 GB/s" in slow.message
    assert (slow.reasons, slow.opposite_value) == ((Reason.ASYMMETRIC,), 404)
    assert slow.message.endswith(", and 94.8% of the 404 GB/s in the opposite direction: a lame link")
    assert slow.fix == "nvlink -e"
    assert slow.basis_text.endswith("; fails under 85%, warns under 95%, warns under 95% of the opposite direction")
    assert {outcome for _, outcome in judged(check(BOTH), pair(385, 404))} == {Outcome.PASS}


def test_the_other_order_excuses_nothing() -> None:
    worse, _, _ = verdicts(check(BOTH), pair(339, 404))
    assert worse.outcome is Outcome.FAIL
    unknown, _, _ = verdicts(check(BOTH), pair(370, 404, STRANGE))
    assert unknown.outcome is Outcome.UNJUDGED
    assert Reason.ASYMMETRIC in unknown.reasons
    assert "91.6% of the 404 GB/s in the opposite direction" in unknown.message
    both_slow = judged(check(BOTH), pair(300, 300))
    assert both_slow[:2] == [("n/gpu0->gpu1", Outcome.FAIL), ("n/gpu1->gpu0", Outcome.FAIL)]


def test_a_threshold_of_the_trial_still_looks_at_the_other_order() -> None:
    limit = {"speed": Threshold.parse("> 200 GB/s")}
    assert judged(check(BOTH), pair(300, 404), expect=limit)[0] == ("n/gpu0->gpu1", Outcome.WARN)


def test_a_threshold_that_hardly_tests_anything_says_what_it_lets_through() -> None:
    (weak,) = verdicts(check(BY_BASELINE), measured(400, facts=FOUR), expect={"speed": Threshold.parse("> 100")})
    assert weak.outcome is Outcome.PASS
    assert weak.basis == Basis(
        BasisKind.TRIAL,
        "mine",
        100,
        "GB/s",
        ">",
        lax_reason="25% of the 400 GB/s of SKU Test GPU: a 4x slowdown would pass",
    )
    (fair,) = verdicts(check(BY_BASELINE), measured(400, facts=FOUR), expect={"speed": Threshold.parse("> 200")})
    assert fair.basis == Basis(BasisKind.TRIAL, "mine", 200, "GB/s", ">")
    (high,) = verdicts(check(BY_BASELINE), measured(430, facts=FOUR), expect={"speed": Threshold.parse("> 420")})
    assert "BEYOND the 400 GB/s of SKU Test GPU: good hardware of this shape fails it" in high.basis_text


def test_what_rejects_good_hardware_says_nothing_of_this_one() -> None:
    """350 GB/s, which eight H100 pass, asked of eight A100 that reach all that is known of them."""

    def judged_(value: float, gpus: int, limit: str) -> Verdict:
        facts: dict[str, JsonValue] = {
            "gpu": "NVIDIA A100-SXM4-80GB",
            "world_size": gpus,
            "nodes": 1,
            "backend": "nccl",
        }
        busbw = Metric(name="busbw.8GiB", value=value, unit="GB/s", subject="cluster")
        seen = Measurement(check="c", subject="n0/gpu0", metrics=(busbw,), facts=facts)
        rule = catalog()["collectives.all_reduce"].rules[-1]
        asked = {"busbw.8GiB": Threshold.parse(limit)}
        (said,) = judge_check(check(rule), [seen], asked, "mine", References(None, skus()))
        return said

    said = judged_(235.7, 8, "> 250 GB/s")
    assert said.outcome is Outcome.ERROR
    assert (
        "> 250 GB/s would reject good hardware, which reaches 235.7 GB/s in this shape (SKU NVIDIA A100" in said.message
    )
    assert judged_(235.7, 8, "> 350 GB/s").outcome is Outcome.ERROR  # NVLink's 300, since its switches do not sum
    assert judged_(260, 8, "> 250 GB/s").outcome is Outcome.PASS
    assert judged_(235.7, 8, "> 240 GB/s").outcome is Outcome.FAIL  # as near as two good ones are


def test_what_is_judged_only_where_it_is_known_is_told_as_recorded() -> None:
    rule = BY_BASELINE.model_copy(update={"reference_optional": True})
    (said,) = verdicts(check(rule), measured(1, facts=STRANGE))
    assert (said.outcome, said.reasons, said.basis) == (Outcome.SKIP, (Reason.NO_THRESHOLD,), None)
    assert said.message == "speed is 1 GB/s, recorded and judged by nothing: no SKU data for NVIDIA Strange"
    assert judged(check(rule), measured(1, facts=FOUR)) == [("cluster", Outcome.FAIL)]


def test_what_is_judged_only_where_it_is_known_is_not_judged_by_its_siblings() -> None:
    """Pairs of GPUs on a board with two sockets: what is slower than most is so on every such board."""
    rule = BY_BASELINE.model_copy(update={"reference_optional": True})
    said = verdicts(check(rule, scope=Scope.NODE), *fleet(100, 101, 99, 100, 40))
    assert {one.outcome for one in said} == {Outcome.SKIP}


@pytest.mark.parametrize(
    ("own", "limit", "unit", "value", "mark"),
    [
        (">= 2000 tokens/s", "> 500 tokens/s", "tokens/s", 9000.0, "the check itself asks for >= 2000 tokens/s"),
        ("<= 0 %", "<= 50 %", "%", 40.0, "the check itself asks for <= 0 %"),
        ("<= 5 %", "<= 10 %", "%", 7.0, ""),
        (None, "< 180 s", "s", 8.0, "beside the 8 s that was measured here, a 22.5x slowdown would pass"),
        (None, "< 180 s", "s", 100.0, ""),
    ],
)
def test_a_threshold_laxer_than_the_checks_own_or_far_over_what_was_measured_is_marked(
    own: str | None, limit: str, unit: str, value: float, mark: str
) -> None:
    what = check(Rule(metric="speed", expect=Threshold.parse(own), meaning="", fix="")) if own else check(BY_BASELINE)
    metric = Metric(name="speed", value=value, unit=unit, subject="cluster")
    seen = Measurement(check="c", subject="cluster", metrics=(metric,), facts=FOUR)
    (said,) = verdicts(what, seen, expect={"speed": Threshold.parse(limit)})
    assert said.outcome is Outcome.PASS
    assert said.basis is not None
    assert said.basis.lax_reason == mark


@pytest.mark.parametrize(
    ("gpu", "weak"),
    [
        ("NVIDIA Test", True),
        ("NVIDIA Test + NVIDIA Test", True),
        ("NVIDIA Strange", False),
        ("NVIDIA Test + NVIDIA Strange", False),
        (None, False),  # a CPU
    ],
)
def test_of_hardware_that_nobody_knows_nothing_is_expected(gpu: str | None, weak: bool) -> None:
    """The rule has no baseline: what was measured here would be compared with itself."""
    facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": 4, "nodes": 1}
    (told,) = verdicts(check(SPEED), measured(400, facts=facts), expect={"speed": Threshold.parse("> 100 GB/s")})
    assert told.outcome is Outcome.PASS
    assert told.basis is not None
    assert told.basis.lax_reason.startswith("25% of the 400 GB/s that was measured here: ") is weak


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("> 601 GB/s", "> 601 GB/s is above what the hardware can do: Test GPU has 600 GB/s of nvlink (a datasheet)"),
        ("> 0.4 GB/s", "> 0.4 GB/s is 1/1,000 of the 400 GB/s of SKU Test GPU: is it meant in another unit?"),
    ],
)
def test_a_threshold_that_cannot_be_meant_so_is_an_error_and_no_fault_of_the_hardware(limit: str, words: str) -> None:
    """Where the GPU was not known before: nothing could refuse it then."""
    spec = Spec(value=600, unit="GB/s", source="a datasheet")
    sku = SKU.model_copy(update={"spec": {"nvlink": spec}, "expected": {"x.busbw.1GiB": SKU.expected["all_reduce"]}})
    rule = Rule(metric="speed", reference="x.busbw.1GiB", meaning="", fix="")
    expect = {"speed": Threshold.parse(limit)}
    (verdict,) = judge_check(check(rule), [measured(400, facts=FOUR)], expect, "mine", References(None, [sku]))
    assert verdict.outcome is Outcome.ERROR
    assert verdict.message.startswith(f"speed is 400 GB/s, and the threshold says nothing: {words}")
    assert verdict.basis_text.startswith("trial mine: >")


@pytest.mark.parametrize(("value", "outcome"), [(379, Outcome.WARN), (321, Outcome.WARN), (319, Outcome.FAIL)])
def test_a_floor_that_is_known_takes_the_place_of_the_rules_share(value: float, outcome: Outcome) -> None:
    known = SKU.expected["all_reduce"][0].model_copy(update={"required": 320})
    sku = SKU.model_copy(update={"expected": {"all_reduce": (known,)}})
    (verdict,) = judge_check(check(BY_BASELINE), [measured(value, facts=FOUR)], {}, "", References(None, [sku]))
    assert verdict.outcome is outcome
    assert "fails under 80%, warns under 95%" in verdict.basis_text


@pytest.mark.parametrize(("value", "outcome"), [(395, Outcome.PASS), (391, Outcome.FAIL)])
def test_under_a_floor_that_a_site_set_fails_whatever_the_rule(value: float, outcome: Outcome) -> None:
    """392 of 400 is above the rule's warning."""
    own = SKU.expected["all_reduce"][0].model_copy(update={"required": 392, "gpu": SKU.nvml_names[0]})
    site = Baseline(name="lab", learned_from=(), expected={"all_reduce": (own,)})
    (verdict,) = judge_check(check(BY_BASELINE), [measured(value, facts=FOUR)], {}, "", References(site, [SKU]))
    assert verdict.outcome is outcome
    assert verdict.basis_text.startswith("site lab: ")


@pytest.mark.parametrize(
    ("samples", "outcome"),
    [
        ((3.0, 3.1, 3.3, 3.9, 10.2), Outcome.WARN),  # too few for an interval, and one of them reaches it
        ((3.0, 3.1, 3.3, 3.9, 4.0), Outcome.FAIL),  # what is slow is seen seldom: seldom is no excuse
        ((3.3,), Outcome.FAIL),
        ((20.0,) * 50, Outcome.FAIL),  # of something else: the value is not among them
    ],
)
def test_few_samples_leave_open_what_they_show_and_no_more(samples: tuple[float, ...], outcome: Outcome) -> None:
    speed = Metric(name="speed", value=3.3, unit="GB/s", subject="cluster", samples=samples)
    one = Measurement(check="c", subject="cluster", metrics=(speed,))
    (said,) = judge_check(check(SPEED), [one], {}, "mine")
    assert said.outcome is outcome
    assert (Reason.WITHIN_SAMPLE_RANGE in said.reasons) is (outcome is Outcome.WARN)


@pytest.mark.parametrize(
    ("unit", "limit", "signed", "outcome"),
    [
        ("s", "< 180 s", False, Outcome.ERROR),
        ("ratio", "<= 0.01", False, Outcome.ERROR),
        ("%", "<= 5 %", False, Outcome.ERROR),
        ("%", "<= 5 %", True, Outcome.PASS),  # a drift upwards, say
        ("nats", "> 0 nats", False, Outcome.FAIL),
        ("GB/s", "> 0 GB/s", True, Outcome.ERROR),
    ],
)
def test_what_cannot_be_below_0_was_measured_wrongly(unit: str, limit: str, signed: bool, outcome: Outcome) -> None:
    rule = Rule(metric="figure", expect=Threshold.parse(limit), may_be_negative=signed, meaning="w", fix="r")
    below = Metric(name="figure", value=-5, unit=unit, subject="cluster")
    (said,) = judge_check(check(rule), [Measurement(check="c", subject="cluster", metrics=(below,))], {}, "mine")
    assert said.outcome is outcome
