"""Outcome, basis and reason of a verdict."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Outcome(StrEnum):
    """The outcome of one verdict."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"  # measured, and bad
    SKIP = "SKIP"  # not applicable, with a reason
    UNJUDGED = "UNJUDGED"  # without a rule or a reference value, or inconclusive
    ERROR = "ERROR"  # could not be measured


# Worst first: the order in reports and in summaries of several verdicts
WORST_FIRST = (Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED, Outcome.WARN, Outcome.PASS, Outcome.SKIP)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The worst of the outcomes; UNJUDGED if there is none."""
    return min(outcomes, key=WORST_FIRST.index, default=Outcome.UNJUDGED)


class BasisKind(StrEnum):
    """The source of the expected value."""

    TRIAL = "trial"  # threshold in the trial file
    SITE = "site"  # baseline learned from good runs at this site
    SKU = "SKU"  # published value of the hardware
    PHYSICAL_LIMIT = "physical_limit"  # upper bound computed from link bandwidth and peak FLOP/s
    FABRIC_MODEL = "fabric_model"  # bound of the network between nodes, computed from port rates and traffic
    RUN = "run"  # another metric that this run measured
    PEERS = "peers"  # median of the devices of the same model in this trial
    OWN_MEDIAN = "own_median"  # median of the samples of the same metric
    RULE = "rule"  # rule of the check


class Reason(StrEnum):
    """Why a verdict is not an ordinary PASS: what a reader acts on; ``detail`` of the verdict has the particulars."""

    # The check was not measured, or only partly
    EXCLUDED = "excluded"  # by --only, --skip or --time-limit
    NOT_MEASURED = "not_measured"
    MEASUREMENT_FAILED = "measurement_failed"
    PLAN_MISMATCH = "plan_mismatch"  # jobs, measured subjects and configuration contradict each other
    METRIC_MISSING = "metric_missing"  # a rule needs the metric
    METRIC_PARTLY_MISSING = "metric_partly_missing"
    # The rule or threshold was not evaluated
    NOT_APPLICABLE = "not_applicable"
    FACT_INVALID = "fact_invalid"  # missing, unreadable, of another type, or the ranks disagree
    NO_RULE = "no_rule"
    THRESHOLD_NOT_EVALUATED = "threshold_not_evaluated"
    THRESHOLD_ON_OTHER_SIZE = "threshold_on_other_size"  # the trial has a threshold on the same metric at another size
    TOO_FEW_PEERS = "too_few_peers"
    NO_REFERENCE = "no_reference"  # or only the median of peers, which cannot show that all are slow
    NO_THRESHOLD = "no_threshold"
    ALGORITHM_UNKNOWN = "algorithm_unknown"  # the value is too low for one of NCCL's algorithms, and good for another
    WEAK_BASELINE = "weak_baseline"  # the only reference value was learned from this run, or from too few runs
    UNIT_MISMATCH = "unit_mismatch"
    IMPOSSIBLE_THRESHOLD = "impossible_threshold"
    # The value is bad, or cannot be correct
    MEASUREMENT_ERROR = "measurement_error"  # negative, not plausible in its unit, or above the physical bound
    IMPLAUSIBLY_HIGH = "implausibly_high"  # compared with the reference value
    THRESHOLD_VIOLATED = "threshold_violated"
    BELOW_WARNING_THRESHOLD = "below_warning_threshold"
    INCONCLUSIVE = "inconclusive"  # the value violates the threshold, but the samples are too few or too different
    SLOW_WINDOWS = "slow_windows"  # too many samples far slower than the median of the same metric and subject
    BELOW_PEERS = "below_peers"
    ASYMMETRIC = "asymmetric"  # far below the opposite direction
    FABRIC_MISMATCH = "fabric_mismatch"  # NCCL uses another network than the trial asks for
    ERROR_COUNTERS = "error_counters"  # increased, or not read
    # Result of the retry
    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not_reproduced"  # one of two or three measurements is bad
    NO_THIRD_MEASUREMENT = "no_third_measurement"  # one of two measurements is bad, and no third one decides
    NOT_RETRIED = "not_retried"  # or the retry could not be measured
