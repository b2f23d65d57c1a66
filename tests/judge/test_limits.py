"""One rule on values of one device model: references, thresholds, peers, plausibility."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import JsonValue

from seatrial.checks import catalog
from seatrial.checks.check import Check
from seatrial.checks.declare import metric
from seatrial.hardware.links import Links, RdmaPorts
from seatrial.hardware.references import References, Sku, Spec, skus
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
    Scope,
    Threshold,
    Verdict,
)
from tests.baselines import learned_runs
from tests.judge.test_rules import (
    AMONG_PEERS,
    BOTH_DIRECTIONS,
    BY_REFERENCE,
    FOUR,
    SKU,
    SPEED,
    UNKNOWN_GPU,
    by_reference,
    check,
    measured,
    outcomes,
    verdicts,
)

ABOVE_390 = {"speed": Threshold.parse("> 390 GB/s")}


def one_verdict(
    check_: Check, measurement: Measurement, expect: dict[str, Threshold], references: References | None = None
) -> Verdict:
    """The verdict on the only metric; thresholds in ``expect`` override the rules of the check."""
    known = references or References(None, [SKU])
    (verdict,) = judge_check(check_, [measurement], expect, "mine", known, override=bool(expect))
    return verdict


def sampled(value: float, *samples: float, facts: dict[str, JsonValue] = FOUR) -> Measurement:
    speed = Metric(name="speed", value=value, unit="GB/s", subject="cluster", samples=samples)
    return Measurement(check="c", subject="cluster", metrics=(speed,), facts=facts)


def peers(*values: float) -> list[Measurement]:
    return [measured(value, subject=f"n{index}", facts=UNKNOWN_GPU) for index, value in enumerate(values)]


@pytest.mark.parametrize(
    ("value", "outcome"), [(400, Outcome.PASS), (379, Outcome.WARN), (361, Outcome.WARN), (359, Outcome.FAIL)]
)
def test_reference_value_fails_and_warns_below_its_shares(value: float, outcome: Outcome) -> None:
    (verdict,) = verdicts(check(BY_REFERENCE), measured(value, facts=FOUR))
    assert verdict.outcome is outcome
    assert verdict.basis is not None
    assert (verdict.basis.kind, verdict.basis.expected, verdict.basis.source) == (BasisKind.SKU, 400, "a paper")


@pytest.mark.parametrize(
    "facts",
    [{"gpu": "NVIDIA Testx", "world_size": 4, "nodes": 1}, {"gpu": "NVIDIA Test", "world_size": 8, "nodes": 1}],
)
def test_unknown_hardware_is_unjudged(facts: dict[str, JsonValue]) -> None:
    (verdict,) = verdicts(check(BY_REFERENCE), measured(1e4, facts=facts))
    assert (verdict.outcome, verdict.reasons) == (Outcome.UNJUDGED, (Reason.NO_REFERENCE,))
    assert verdict.detail


NARROW = [359.0] * 10
WIDE = [330.0, 390, 340, 366, 358, 359, 361, 350, 370, 345]


def test_value_below_the_reference_is_inconclusive_if_the_interval_reaches_it() -> None:
    assert outcomes(check(BY_REFERENCE), sampled(359, *NARROW)) == [("cluster", Outcome.FAIL)]
    (verdict,) = verdicts(check(BY_REFERENCE), sampled(359, *WIDE))
    assert verdict.outcome is Outcome.UNJUDGED
    assert verdict.reasons == (Reason.THRESHOLD_VIOLATED, Reason.INCONCLUSIVE)


def test_value_below_the_threshold_is_inconclusive_if_the_interval_reaches_it() -> None:
    samples = [9.9, 9.7, 10.2, 9.8, 10.1, 9.9, 9.6, 10.3, 9.9, 10.0] * 4
    (verdict,) = verdicts(check(SPEED), sampled(9.9, *samples))
    assert verdict.outcome is Outcome.UNJUDGED
    assert verdict.reasons == (Reason.THRESHOLD_VIOLATED, Reason.INCONCLUSIVE)
    assert verdict.interval == (9.8, 10.1)
    assert outcomes(check(SPEED), sampled(9.9, *[9.9] * 10)) == [("cluster", Outcome.FAIL)]


@pytest.mark.parametrize("slow", [6, 5, 4])
def test_many_samples_far_below_the_threshold_fail_in_spite_of_a_wide_range(slow: int) -> None:
    """GPU pairs with 6 of 7 samples at half NVLink speed."""
    (verdict,) = verdicts(check(SPEED), sampled(5, *[5.0] * slow, *[11.0] * (7 - slow)))
    assert (verdict.outcome, verdict.reasons) == (Outcome.FAIL, (Reason.THRESHOLD_VIOLATED,))


@pytest.mark.parametrize(
    ("algorithm", "busbw", "outcome", "kind"),
    [
        ("Ring", 380, Outcome.PASS, BasisKind.FABRIC_MODEL),
        ("Ring", 340, Outcome.FAIL, BasisKind.FABRIC_MODEL),  # the published minimum of 350 GB/s applies to Ring too
        ("Tree", 340, Outcome.PASS, BasisKind.FABRIC_MODEL),  # but not to an algorithm that cannot reach it
        ("NVLSTree", 340, Outcome.FAIL, BasisKind.SKU),
        ("", 340, Outcome.FAIL, BasisKind.SKU),
        ("", 430, Outcome.PASS, BasisKind.SKU),
    ],
)
@pytest.mark.parametrize("with_site", [False, True])
def test_published_value_of_another_algorithm(
    algorithm: str, busbw: float, outcome: Outcome, kind: BasisKind, with_site: bool
) -> None:
    """435 GB/s on 2×8 H100 are above the 400 of Ring: a trial compares them with another algorithm only."""
    key, gpu = "all_reduce.busbw.8GiB", "NVIDIA H100 80GB HBM3"
    value = ReferenceValue(
        gpus=16, nodes=2, gpu=gpu, fabric="ib-8x400", value=busbw, unit="GB/s", source="learned", runs=3
    )
    baseline = Baseline(name="lab", learned_from=learned_runs(3), expected={key: (value,)}) if with_site else None
    links = Links(network="rdma", ports=RdmaPorts("ib", 8, 400.0)).with_algorithm("all_reduce", "8GiB", algorithm)
    metric = Metric(name="busbw.8GiB", value=busbw, unit="GB/s", subject="cluster")
    facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": 16, "nodes": 2, "backend": "nccl"}
    measurement = Measurement(check="collectives.all_reduce", subject="cluster", metrics=(metric,), facts=facts)
    check_ = catalog()["collectives.all_reduce"]
    check_ = replace(check_, declared=tuple(each for each in check_.declared if each.name == metric.name))
    (verdict,) = judge_check(check_, [measurement], {}, "", References(baseline, skus(), links=links))
    assert verdict.outcome is outcome
    assert (Reason.ALGORITHM_UNKNOWN in verdict.reasons) is (outcome is Outcome.UNJUDGED)
    assert verdict.basis
    assert verdict.basis.kind is kind


def site(value: float, *, runs: int = 3, gpu: str = "NVIDIA Test", override: bool = False) -> Baseline:
    """A baseline for four GPUs; the published value is 400 GB/s."""
    known = ReferenceValue(gpus=4, nodes=1, value=value, unit="GB/s", source="runs", gpu=gpu, runs=runs)
    return Baseline(name="lab", learned_from=learned_runs(runs), override=override, expected={"all_reduce": (known,)})


@pytest.mark.parametrize(
    ("learned", "value", "outcome", "basis"),
    [
        (300, 310, Outcome.FAIL, BasisKind.SKU),  # a lower value does not loosen the published one
        (300, 399, Outcome.PASS, BasisKind.SKU),
        (500, 440, Outcome.FAIL, BasisKind.SITE),  # a higher value tightens it
        (500, 499, Outcome.PASS, BasisKind.SITE),
    ],
)
@pytest.mark.parametrize("runs", [1, 3])
def test_stricter_of_site_baseline_and_published_value_decides(
    learned: float, value: float, outcome: Outcome, basis: BasisKind, runs: int
) -> None:
    (verdict,) = verdicts(check(BY_REFERENCE), measured(value, facts=FOUR), site=site(learned, runs=runs))
    assert (verdict.outcome, verdict.basis and verdict.basis.kind) == (outcome, basis)


@pytest.mark.parametrize(
    ("runs", "value", "outcome", "reasons"),
    [
        (3, 299, Outcome.PASS, ()),
        (2, 299, Outcome.WARN, (Reason.WEAK_BASELINE,)),
        (2, 200, Outcome.FAIL, (Reason.THRESHOLD_VIOLATED,)),
    ],
)
def test_baseline_of_fewer_than_three_runs_does_not_pass_alone(
    runs: int, value: float, outcome: Outcome, reasons: tuple[Reason, ...]
) -> None:
    unknown = measured(value, facts={**FOUR, "gpu": "NVIDIA Unknown"})
    lab = site(300, runs=runs, gpu="NVIDIA Unknown")
    (verdict,) = verdicts(check(BY_REFERENCE), unknown, site=lab)
    assert (verdict.outcome, verdict.reasons) == (outcome, reasons)
    assert bool("baseline learn" in verdict.fix) is (outcome is Outcome.WARN)
    (edited,) = verdicts(check(BY_REFERENCE), unknown, site=lab.model_copy(update={"learned_from": learned_runs(1)}))
    assert edited.outcome is not Outcome.PASS, "a value cannot come from more runs than the baseline"


@pytest.mark.parametrize(("value", "outcome"), [(299, Outcome.UNJUDGED), (280, Outcome.UNJUDGED), (200, Outcome.FAIL)])
def test_baseline_does_not_pass_the_run_that_it_was_learned_from(value: float, outcome: Outcome) -> None:
    unknown = measured(value, facts={**FOUR, "gpu": "NVIDIA Unknown"})
    references = References(site(300, gpu="NVIDIA Unknown"), [SKU], site_includes_run=True)
    (verdict,) = judge_check(check(BY_REFERENCE), [unknown], {}, "mine", references)
    assert verdict.outcome is outcome
    assert (Reason.WEAK_BASELINE in verdict.reasons) is (outcome is Outcome.UNJUDGED)


def test_published_value_judges_the_run_that_a_baseline_was_learned_from() -> None:
    for override, outcome in ((False, Outcome.PASS), (True, Outcome.UNJUDGED)):
        references = References(site(400, override=override), [SKU], site_includes_run=True)
        (verdict,) = judge_check(check(BY_REFERENCE), [measured(399, facts=FOUR)], {}, "mine", references)
        assert verdict.outcome is outcome


def test_overriding_site_baseline_replaces_sku_data() -> None:
    (verdict,) = verdicts(check(BY_REFERENCE), measured(299, facts=FOUR), site=site(300, override=True))
    assert verdict.outcome is Outcome.PASS
    assert verdict.basis is not None
    assert (verdict.basis.kind, verdict.basis.name, verdict.basis.expected) == (BasisKind.SITE, "lab", 300)
    unknown = measured(299, facts={**FOUR, "gpu": "NVIDIA Unknown"})
    (other,) = verdicts(check(BY_REFERENCE), unknown, site=site(300, override=True))
    assert other.outcome is Outcome.UNJUDGED, "a baseline applies to its GPU model only"


def test_without_reference_value_only_low_outliers_among_peers_fail() -> None:
    results = verdicts(check(BY_REFERENCE, scope=Scope.NODE), *peers(100, 101, 99, 100, 80))
    assert [verdict.outcome for verdict in results] == [Outcome.UNJUDGED] * 4 + [Outcome.FAIL]
    assert results[0].reasons == (Reason.NO_REFERENCE,)
    basis = results[4].basis
    assert basis is not None
    assert (basis.kind, basis.name, basis.expected) == (BasisKind.PEERS, "5 subjects on NVIDIA Unknown", 100)


def test_reference_value_in_another_unit_is_not_compared() -> None:
    value = ReferenceValue(gpus=4, nodes=1, value=0.4, unit="TB/s", source="s", gpu="NVIDIA Test")
    lab = Baseline(name="lab", learned_from=learned_runs(), expected={"all_reduce": (value,)})
    (verdict,) = verdicts(check(BY_REFERENCE), measured(10, facts=FOUR), site=lab)
    assert (verdict.outcome, verdict.reasons) == (Outcome.UNJUDGED, (Reason.UNIT_MISMATCH,))
    assert verdict.detail == "TB/s"
    expect = {"speed": Threshold.parse("> 0.1")}
    unjudged, _ = verdicts(check(BY_REFERENCE), measured(10, facts=FOUR), expect=expect, site=lab)
    assert unjudged.reasons == (Reason.UNIT_MISMATCH,), "the threshold does not replace the published value"
    (lax,) = verdicts(check(BY_REFERENCE), measured(10, facts=FOUR), expect=expect, site=lab, override=True)
    assert lax.basis is not None
    assert "site lab" not in lax.basis.lax_reason


@pytest.mark.parametrize("unit", ["MB/s", ""])
def test_metric_in_another_unit_than_the_check_declares_is_an_error(unit: str) -> None:
    metric = Metric(name="speed", value=20, unit=unit, subject="cluster")
    measurement = Measurement(check="c", subject="cluster", metrics=(metric,))
    (verdict,) = verdicts(check(SPEED), measurement)
    assert (verdict.outcome, verdict.reasons, verdict.detail) == (Outcome.ERROR, (Reason.UNIT_MISMATCH,), "GB/s")


def test_threshold_in_another_unit_is_not_compared() -> None:
    verdict = one_verdict(check(SPEED), measured(20), {"speed": Threshold.parse("> 10 MB/s")})
    assert (verdict.outcome, verdict.reasons) == (Outcome.UNJUDGED, (Reason.UNIT_MISMATCH,))


@pytest.mark.parametrize(("value", "outcome"), [(599, Outcome.PASS), (4000, Outcome.UNJUDGED)])
def test_value_far_above_the_reference_is_unjudged(value: float, outcome: Outcome) -> None:
    assert outcomes(check(BY_REFERENCE), measured(value, facts=FOUR)) == [("cluster", outcome)]


def sku_with_nvlink(gbps: float, key: str) -> Sku:
    spec = Spec(value=gbps, unit="GB/s", source="a datasheet")
    return SKU.model_copy(update={"spec": {"nvlink": spec}, "expected": {key: SKU.expected["all_reduce"]}})


@pytest.mark.parametrize(
    ("key", "value", "outcome", "reasons"),
    [
        ("x.busbw.1GiB", 600, Outcome.PASS, ()),
        ("x.busbw.1GiB", 640, Outcome.UNJUDGED, (Reason.IMPLAUSIBLY_HIGH,)),
        ("x.busbw.2GiB", 640, Outcome.PASS, ()),
        ("x.busbw.2GiB", 701, Outcome.ERROR, (Reason.MEASUREMENT_ERROR,)),
    ],
)
def test_value_that_meets_a_threshold_must_be_plausible(
    key: str, value: float, outcome: Outcome, reasons: tuple[Reason, ...]
) -> None:
    """Compared with the reference value (key of 1 GiB only) and with the bandwidth of the links."""
    collective = check(by_reference(key, meaning="a link is slow"))
    references = References(None, [sku_with_nvlink(700, "x.busbw.1GiB")])
    verdict = one_verdict(collective, measured(value, facts=FOUR), ABOVE_390, references)
    assert (verdict.outcome, verdict.reasons) == (outcome, reasons)
    assert verdict.meaning == ""  # the rule's meaning is that of a low value


@pytest.mark.parametrize(
    ("expect", "good"), [({}, Outcome.UNJUDGED), ({"speed": Threshold.parse("> 390 GB/s")}, Outcome.PASS)]
)
def test_bound_of_the_links_applies_on_one_node_only(expect: dict[str, Threshold], good: Outcome) -> None:
    sku = SKU.model_copy(update={"spec": {"nvlink": Spec(value=450, unit="GB/s", source="a datasheet")}})
    collective = check(by_reference("all_gather.busbw.1GiB"))
    for value, nodes, outcome in ((449, 1, good), (451, 1, Outcome.ERROR), (451, 2, good)):
        measurement = measured(value, facts=FOUR | {"nodes": nodes})
        assert one_verdict(collective, measurement, expect, References(None, [sku])).outcome is outcome


@pytest.mark.parametrize(("settings", "outcome"), [("shipped", Outcome.UNJUDGED), ("changed", Outcome.PASS)])
def test_plausibility_uses_reference_values_of_the_same_settings_only(settings: str, outcome: Outcome) -> None:
    sku = SKU.model_copy(update={"expected": {"train.x": SKU.expected["all_reduce"]}})
    training = check(by_reference("train.x", when="settings == shipped"))
    measurement = measured(4000, facts=FOUR | {"settings": settings})
    assert one_verdict(training, measurement, ABOVE_390, References(None, [sku])).outcome is outcome


def test_zeros_are_no_peer_group() -> None:
    node_check = check(BY_REFERENCE, scope=Scope.NODE)
    assert {verdict.outcome for verdict in verdicts(node_check, *peers(0, 0, 0, 100))} == {Outcome.UNJUDGED}


@pytest.mark.parametrize("values", [(100, 50), (60, 80, 100, 120, 140)], ids=["two peers", "wide spread"])
def test_peer_group_without_outlier_fails_no_subject(values: tuple[float, ...]) -> None:
    results = verdicts(check(BY_REFERENCE, scope=Scope.NODE), *peers(*values))
    assert {verdict.outcome for verdict in results} == {Outcome.UNJUDGED}


def test_low_outlier_warns_although_it_reaches_the_reference_value() -> None:
    measurements = [measured(value, subject=f"n{value}", facts=FOUR) for value in (440, 441, 439, 440, 400)]
    results = verdicts(check(BY_REFERENCE, scope=Scope.NODE), *measurements)
    assert [verdict.outcome for verdict in results] == [Outcome.PASS] * 4 + [Outcome.WARN]
    assert results[4].reasons == (Reason.BELOW_PEERS,)


def test_comparison_with_peers_warns_on_low_outliers_and_never_fails() -> None:
    peer_check = check(AMONG_PEERS)
    assert {outcome for _, outcome in outcomes(peer_check, *peers(48.4, 48.2, 40.3, 37.0))} == {Outcome.PASS}
    assert {outcome for _, outcome in outcomes(peer_check, *peers(48.4, 48.2, 48.4, 40.3))} == {Outcome.PASS}
    *good, bad = verdicts(peer_check, *peers(48.4, 48.2, 48.4, 24.0))
    assert {verdict.outcome for verdict in good} == {Outcome.PASS}
    assert (bad.outcome, bad.reasons) == (Outcome.WARN, (Reason.BELOW_WARNING_THRESHOLD,))
    assert bad.ratio == pytest.approx(0.497, abs=0.001)
    assert (bad.meaning, bad.fix) == ("it shares a port", "look at the tree")
    name = "4 subjects on NVIDIA Unknown"
    assert bad.basis is not None
    assert bad.basis.expected == pytest.approx(48.3)
    assert (bad.basis.kind, bad.basis.name, bad.basis.warn_below) == (BasisKind.PEERS, name, 0.75)


def test_comparison_with_peers_ignores_reference_values() -> None:
    """The SKU data have 400 GB/s for this key: host memory differs between hosts with the same GPU."""
    declared = replace(AMONG_PEERS, reference="all_reduce")
    uniformly_slow = [sampled(9.0, facts=FOUR) for _ in range(4)]
    assert {outcome for _, outcome in outcomes(check(declared), *uniformly_slow)} == {Outcome.PASS}


@pytest.mark.parametrize("values", [(48.0, 20.0), (48.0,)])
def test_too_few_peers_are_skipped(values: tuple[float, ...]) -> None:
    results = verdicts(check(AMONG_PEERS), *peers(*values))
    assert {(verdict.outcome, verdict.reasons) for verdict in results} == {(Outcome.SKIP, (Reason.TOO_FEW_PEERS,))}


def test_peers_with_wide_spread_pass_and_a_missing_metric_is_an_error() -> None:
    assert {outcome for _, outcome in outcomes(check(AMONG_PEERS), *peers(55, 55, 27, 27))} == {Outcome.PASS}
    assert outcomes(check(AMONG_PEERS), measured(facts=FOUR)) == [("cluster", Outcome.ERROR)]


def pair(forward: float, backward: float, facts: dict[str, JsonValue] = FOUR) -> Measurement:
    values = {"n/gpu0->gpu1": forward, "n/gpu1->gpu0": backward, "n/gpu0->gpu2": 400.0}
    metrics = tuple(Metric(name="speed", value=value, unit="GB/s", subject=name) for name, value in values.items())
    return Measurement(check="c", subject="n/gpu0", metrics=metrics, facts=facts)


def test_slower_direction_of_a_pair_warns() -> None:
    slow, good, without_opposite = verdicts(check(BOTH_DIRECTIONS), pair(383, 404))
    assert [slow.outcome, good.outcome, without_opposite.outcome] == [Outcome.WARN, Outcome.PASS, Outcome.PASS]
    assert slow.reasons == (Reason.ASYMMETRIC,)
    assert slow.opposite_value == 404
    assert slow.ratio == pytest.approx(0.958, abs=0.001)
    assert (slow.meaning, slow.fix) == ("a degraded link", "nvlink -e")
    assert slow.basis is not None
    limits = (slow.basis.fail_below, slow.basis.warn_below, slow.basis.asymmetry_limit)
    assert limits == (0.85, 0.95, 0.95)
    assert {outcome for _, outcome in outcomes(check(BOTH_DIRECTIONS), pair(385, 404))} == {Outcome.PASS}


def test_asymmetry_never_improves_an_outcome() -> None:
    worse, _, _ = verdicts(check(BOTH_DIRECTIONS), pair(339, 404))
    assert worse.outcome is Outcome.FAIL
    unknown, _, _ = verdicts(check(BOTH_DIRECTIONS), pair(370, 404, UNKNOWN_GPU))
    assert unknown.outcome is Outcome.UNJUDGED
    assert Reason.ASYMMETRIC in unknown.reasons
    assert unknown.opposite_value == 404
    both_slow = outcomes(check(BOTH_DIRECTIONS), pair(300, 300))
    assert both_slow[:2] == [("n/gpu0->gpu1", Outcome.FAIL), ("n/gpu1->gpu0", Outcome.FAIL)]


def test_asymmetry_limit_applies_to_thresholds_of_a_trial() -> None:
    expect = {"speed": Threshold.parse("> 200 GB/s")}
    results = verdicts(check(BOTH_DIRECTIONS), pair(300, 404), expect=expect, override=True)
    assert (results[0].subject, results[0].outcome) == ("n/gpu0->gpu1", Outcome.WARN)


def test_lax_and_strict_thresholds_are_marked() -> None:
    lax = one_verdict(check(BY_REFERENCE), measured(400, facts=FOUR), {"speed": Threshold.parse("> 100")})
    assert lax.outcome is Outcome.PASS
    assert lax.basis is not None
    assert (lax.basis.kind, lax.basis.name, lax.basis.expected, lax.basis.op) == (BasisKind.TRIAL, "mine", 100, ">")
    assert all(text in lax.basis.lax_reason for text in ("25%", "400 GB/s of SKU Test GPU", "4x slowdown"))
    fair = one_verdict(check(BY_REFERENCE), measured(400, facts=FOUR), {"speed": Threshold.parse("> 200")})
    assert fair.basis == Basis(BasisKind.TRIAL, "mine", 200, "GB/s", ">")
    strict = one_verdict(check(BY_REFERENCE), measured(430, facts=FOUR), {"speed": Threshold.parse("> 420")})
    assert strict.basis is not None
    assert strict.basis.exceeds == "the 400 GB/s of SKU Test GPU"


@pytest.mark.parametrize(
    ("value", "threshold", "outcome"),
    [
        (235.7, "> 250 GB/s", Outcome.ERROR),
        (235.7, "> 350 GB/s", Outcome.ERROR),  # above NVLink's 300 GB/s: the switches of the A100 do not reduce
        (260, "> 250 GB/s", Outcome.PASS),
        (235.7, "> 240 GB/s", Outcome.FAIL),  # within the tolerance of the reference value
    ],
)
def test_threshold_that_rejects_good_hardware_is_an_error(value: float, threshold: str, outcome: Outcome) -> None:
    """Eight A100 that reach their reference value, with thresholds for eight H100."""
    facts: dict[str, JsonValue] = {"gpu": "NVIDIA A100-SXM4-80GB", "world_size": 8, "nodes": 1, "backend": "nccl"}
    busbw = Metric(name="busbw.8GiB", value=value, unit="GB/s", subject="cluster")
    measurement = Measurement(check="c", subject="n0/gpu0", metrics=(busbw,), facts=facts)
    declared = catalog()["collectives.all_reduce"].declaration("busbw.8GiB")
    assert declared
    expect = {"busbw.8GiB": Threshold.parse(threshold)}
    verdict = one_verdict(check(declared), measurement, expect, References(None, skus()))
    assert verdict.outcome is outcome
    assert (Reason.IMPOSSIBLE_THRESHOLD in verdict.reasons) is (outcome is Outcome.ERROR)


def test_optional_reference_without_value_is_skipped_on_known_models() -> None:
    optional = check(replace(BY_REFERENCE, reference_optional=True))
    (verdict,) = verdicts(optional, measured(1, facts=FOUR | {"world_size": 8}))
    assert (verdict.outcome, verdict.reasons, verdict.basis) == (Outcome.SKIP, (Reason.NO_THRESHOLD,), None)
    (unknown,) = verdicts(optional, measured(1, facts=UNKNOWN_GPU))
    assert (unknown.outcome, unknown.reasons) == (Outcome.UNJUDGED, (Reason.NO_REFERENCE,))
    assert unknown.detail == "no SKU data for NVIDIA Unknown"
    assert outcomes(optional, measured(1, facts=FOUR)) == [("cluster", Outcome.FAIL)]


def test_optional_reference_is_not_replaced_by_peers() -> None:
    """On a board with two sockets, some pairs of GPUs are always slower than most."""
    declared = replace(BY_REFERENCE, reference_optional=True)
    results = verdicts(check(declared, scope=Scope.NODE), *peers(100, 101, 99, 100, 40))
    assert {verdict.outcome for verdict in results} == {Outcome.UNJUDGED}


@pytest.mark.parametrize(
    ("check_threshold", "threshold", "unit", "value", "texts"),
    [
        (">= 2000 tokens/s", "> 500 tokens/s", "tokens/s", 9000.0, (">= 2000 tokens/s",)),
        ("<= 0 %", "<= 50 %", "%", 40.0, ("<= 0 %",)),
        ("<= 5 %", "<= 10 %", "%", 7.0, ()),
        (None, "< 180 s", "s", 8.0, ("8 s", "22.5x slowdown")),
        (None, "< 180 s", "s", 100.0, ()),
    ],
)
def test_threshold_laxer_than_the_check_or_the_measured_value_is_marked(
    check_threshold: str | None, threshold: str, unit: str, value: float, texts: tuple[str, ...]
) -> None:
    declared = metric("speed", check_threshold) if check_threshold else replace(BY_REFERENCE, unit=unit)
    speed = Metric(name="speed", value=value, unit=unit, subject="cluster")
    measurement = Measurement(check="c", subject="cluster", metrics=(speed,), facts=FOUR)
    verdict = one_verdict(check(declared), measurement, {"speed": Threshold.parse(threshold)})
    assert verdict.outcome is Outcome.PASS
    assert verdict.basis is not None
    assert bool(verdict.basis.lax_reason) is bool(texts)
    assert all(text in verdict.basis.lax_reason for text in texts)


@pytest.mark.parametrize(
    ("gpu", "is_lax"),
    [
        ("NVIDIA Test", True),
        ("NVIDIA Test + NVIDIA Test", True),
        ("NVIDIA Unknown", False),
        ("NVIDIA Test + NVIDIA Unknown", False),
        (None, False),  # a CPU
    ],
)
def test_threshold_is_compared_with_the_measured_value_on_known_models_only(gpu: str | None, is_lax: bool) -> None:
    facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": 4, "nodes": 1}
    verdict = one_verdict(check(SPEED), measured(400, facts=facts), {"speed": Threshold.parse("> 100 GB/s")})
    assert verdict.outcome is Outcome.PASS
    assert verdict.basis is not None
    assert ("25% of the measured 400 GB/s" in verdict.basis.lax_reason) is is_lax


@pytest.mark.parametrize(
    ("threshold", "texts"),
    [
        ("> 601 GB/s", ("> 601 GB/s", "600 GB/s of nvlink (a datasheet)")),
        ("> 0.4 GB/s", ("> 0.4 GB/s", "1/1,000", "400 GB/s of SKU Test GPU")),
    ],
)
def test_impossible_threshold_is_an_error(threshold: str, texts: tuple[str, ...]) -> None:
    """If the GPU model was unknown when the trial was loaded."""
    references = References(None, [sku_with_nvlink(600, "x.busbw.1GiB")])
    expect = {"speed": Threshold.parse(threshold)}
    verdict = one_verdict(check(by_reference("x.busbw.1GiB")), measured(400, facts=FOUR), expect, references)
    assert (verdict.outcome, verdict.reasons) == (Outcome.ERROR, (Reason.IMPOSSIBLE_THRESHOLD,))
    assert all(text in verdict.detail for text in texts)
    assert verdict.basis is not None
    assert verdict.basis.kind is BasisKind.TRIAL


@pytest.mark.parametrize(
    ("required", "value", "outcome"),
    [(320, 361, Outcome.WARN), (320, 359, Outcome.FAIL), (370, 371, Outcome.WARN), (370, 369, Outcome.FAIL)],
)
def test_required_value_of_a_sku_is_one_more_limit(required: float, value: float, outcome: Outcome) -> None:
    reference = SKU.expected["all_reduce"][0].model_copy(update={"required": required})
    sku = SKU.model_copy(update={"expected": {"all_reduce": (reference,)}})
    verdict = one_verdict(check(BY_REFERENCE), measured(value, facts=FOUR), {}, References(None, [sku]))
    assert verdict.outcome is outcome
    assert verdict.basis is not None
    assert (verdict.basis.fail_below, verdict.basis.warn_below) == (max(0.9, required / 400), 0.95)


@pytest.mark.parametrize(("value", "outcome"), [(395, Outcome.PASS), (391, Outcome.FAIL)])
def test_required_value_of_a_site_replaces_fail_below(value: float, outcome: Outcome) -> None:
    """The required 392 of 400 is above ``warn_below``."""
    update = {"required": 392, "gpu": SKU.nvml_names[0]}
    reference = SKU.expected["all_reduce"][0].model_copy(update=update)
    lab = Baseline(name="lab", learned_from=(), expected={"all_reduce": (reference,)})
    verdict = one_verdict(check(BY_REFERENCE), measured(value, facts=FOUR), {}, References(lab, [SKU]))
    assert verdict.outcome is outcome
    assert verdict.basis is not None
    assert (verdict.basis.kind, verdict.basis.name) == (BasisKind.SITE, "lab")


@pytest.mark.parametrize(
    ("samples", "outcome"),
    [
        ((3.3, 10.2), Outcome.UNJUDGED),  # too few for an interval; one sample meets the threshold
        ((3.0, 3.1, 3.3, 3.9, 4.0), Outcome.FAIL),  # few samples, since the operation is slow
        ((3.3,), Outcome.FAIL),
        ((20.0,) * 50, Outcome.FAIL),  # samples of something else: they do not include the value
    ],
)
def test_few_samples_are_inconclusive_only_if_one_meets_the_threshold(
    samples: tuple[float, ...], outcome: Outcome
) -> None:
    verdict = one_verdict(check(SPEED), sampled(3.3, *samples), {})
    assert verdict.outcome is outcome
    assert (Reason.INCONCLUSIVE in verdict.reasons) is (outcome is Outcome.UNJUDGED)


@pytest.mark.parametrize(
    ("unit", "threshold", "signed", "outcome"),
    [
        ("s", "< 180 s", False, Outcome.ERROR),
        ("ratio", "<= 0.01", False, Outcome.ERROR),
        ("%", "<= 5 %", False, Outcome.ERROR),
        ("%", "<= 5 %", True, Outcome.PASS),  # such as a drift
        ("nats", "> 0 nats", False, Outcome.FAIL),
        ("GB/s", "> 0 GB/s", True, Outcome.ERROR),
    ],
)
def test_negative_value_is_a_measurement_error(unit: str, threshold: str, signed: bool, outcome: Outcome) -> None:
    declared = metric("m", threshold, "w", "r", unit=unit, signed=signed)
    negative = Metric(name="m", value=-5, unit=unit, subject="cluster")
    verdict = one_verdict(check(declared), Measurement(check="c", subject="cluster", metrics=(negative,)), {})
    assert verdict.outcome is outcome
    assert (Reason.MEASUREMENT_ERROR in verdict.reasons) is (outcome is Outcome.ERROR)


def node_of_gpus(*values: float, node: str = "n0", model: str = "NVIDIA Test") -> list[Measurement]:
    facts: dict[str, JsonValue] = {"gpu": model, "world_size": 4, "nodes": 1}
    return [measured(value, subject=f"{node}/gpu{index}", facts=facts) for index, value in enumerate(values)]


PEER_LIMIT = replace(BY_REFERENCE, text=(">= 0.90 reference", ">= 0.90 peers"))


def test_gpu_far_below_the_gpus_of_its_node_fails_although_it_meets_the_reference() -> None:
    """A node of fast GPUs hides a slow one behind the reference: 12 % slower is 365 of the expected 400 GB/s."""
    results = verdicts(check(PEER_LIMIT, scope=Scope.GPU), *node_of_gpus(*[415.0] * 7, 365))
    assert [verdict.outcome for verdict in results] == [Outcome.PASS] * 7 + [Outcome.FAIL]
    basis = results[-1].basis
    assert basis is not None
    assert (basis.kind, basis.expected, basis.fail_below) == (BasisKind.PEERS, 415, 0.90)
    assert outcomes(check(BY_REFERENCE, scope=Scope.GPU), *node_of_gpus(*[415.0] * 7, 365))[-1][1] is Outcome.WARN


def test_noise_that_all_gpus_of_a_node_share_is_no_fault_of_one() -> None:
    hot_node = [value for node in range(4) for value in node_of_gpus(*[400.0] * 8, node=f"n{node}")]
    hot_node += node_of_gpus(*[370.0] * 7, 330, node="n4")
    results = verdicts(check(PEER_LIMIT, scope=Scope.GPU), *hot_node)
    assert [verdict.subject for verdict in results if verdict.outcome is Outcome.FAIL] == ["n4/gpu7"]


def test_slow_node_is_compared_with_the_other_nodes() -> None:
    nodes = [value for node in range(4) for value in node_of_gpus(*[430.0] * 2, node=f"n{node}")]
    results = verdicts(check(PEER_LIMIT, scope=Scope.GPU), *nodes, *node_of_gpus(380, 380, node="n4"))
    assert [verdict.subject for verdict in results if verdict.outcome is Outcome.FAIL] == ["n4/gpu0", "n4/gpu1"]


def test_the_slower_of_two_gpus_of_a_node_fails() -> None:
    results = verdicts(check(PEER_LIMIT, scope=Scope.GPU), *node_of_gpus(430, 385))
    assert [verdict.outcome for verdict in results] == [Outcome.PASS, Outcome.FAIL]


@pytest.mark.parametrize(
    ("unit", "threshold", "value", "outcome"),
    [
        ("%", "> 95 %", 1e308, Outcome.ERROR),  # such as an accuracy
        ("%", "> 95 %", 100.1, Outcome.ERROR),
        ("%", "> 95 %", 100.0, Outcome.PASS),
        ("°C", "< 90 °C", 200.0, Outcome.ERROR),
        ("W", "> 100 W", 1e6, Outcome.ERROR),
        ("bool", "> 0 bool", 2.0, Outcome.ERROR),
        ("count", "<= 3 count", 1.5, Outcome.ERROR),
        ("count", "<= 3 count", 2.0, Outcome.PASS),
        ("GB/s", "> 1 GB/s", 1e9, Outcome.ERROR),
        ("files/s", "> 1 files/s", 1e300, Outcome.ERROR),
        ("s", "> 1 s", 1e12, Outcome.ERROR),
        ("", "> 1", 1e300, Outcome.ERROR),
    ],
)
def test_value_outside_the_range_of_its_unit_is_a_measurement_error(
    unit: str, threshold: str, value: float, outcome: Outcome
) -> None:
    declared = metric("m", threshold, "w", "r", unit=unit)
    outside = Metric(name="m", value=value, unit=unit, subject="cluster")
    for trial in ({}, {"m": Threshold.parse(threshold)}):
        verdict = one_verdict(check(declared), Measurement(check="c", subject="cluster", metrics=(outside,)), trial)
        assert verdict.outcome is outcome
        assert (Reason.MEASUREMENT_ERROR in verdict.reasons) is (outcome is Outcome.ERROR)


@pytest.mark.parametrize(("value", "outcome"), [(130.0, Outcome.PASS), (1e7, Outcome.ERROR)])
def test_share_that_may_exceed_100_percent(value: float, outcome: Outcome) -> None:
    speedup = check(metric("efficiency.x", "> 90 %", "w", "r", may_exceed_100=True))
    efficiency = Metric(name="efficiency.x", value=value, unit="%", subject="cluster")
    measurement = Measurement(check="c", subject="cluster", metrics=(efficiency,))
    assert one_verdict(speedup, measurement, {}).outcome is outcome
