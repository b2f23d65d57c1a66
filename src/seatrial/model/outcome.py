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
    """Why a verdict is not an ordinary PASS; a verdict may have several reasons."""

    # The check was not measured, or only partly
    EXCLUDED = "excluded"  # by --only, --skip or --time-limit
    UNKNOWN_CHECK = "unknown_check"
    NOT_MEASURED = "not_measured"
    MEASUREMENT_FAILED = "measurement_failed"
    INCOMPLETE_COVERAGE = "incomplete_coverage"  # fewer subjects than planned, or different ones
    PLAN_MISMATCH = "plan_mismatch"  # jobs, measurements and configuration of the record contradict each other
    METRIC_MISSING = "metric_missing"  # a rule needs the metric
    METRIC_PARTLY_MISSING = "metric_partly_missing"
    # The rule or threshold was not evaluated
    NOT_APPLICABLE = "not_applicable"
    APPLIES_TO_PEERS_ONLY = "applies_to_peers_only"  # the rule applies to comparable subjects, but not to this one
    RANKS_DISAGREE = "ranks_disagree"
    FACT_INVALID = "fact_invalid"  # missing, of another type, or a value that the check does not declare
    FACT_UNREADABLE = "fact_unreadable"  # this user may not read it, or what was read is not known
    NO_RULE = "no_rule"
    THRESHOLD_NOT_EVALUATED = "threshold_not_evaluated"
    THRESHOLD_ON_OTHER_SIZE = "threshold_on_other_size"  # the trial has a threshold on the same metric at another size
    TOO_FEW_PEERS = "too_few_peers"
    NO_REFERENCE = "no_reference"
    NO_ABSOLUTE_REFERENCE = "no_absolute_reference"  # only compared with peers, which cannot show that all are slow
    NO_THRESHOLD = "no_threshold"
    ALGORITHM_UNKNOWN = "algorithm_unknown"  # the value is too low for one of NCCL's algorithms, and good for another
    BASELINE_OF_THIS_RUN = "baseline_of_this_run"  # the only reference value was learned from the run itself
    BASELINE_OF_FEW_RUNS = "baseline_of_few_runs"  # the only reference value was learned from too few runs
    UNIT_MISMATCH = "unit_mismatch"
    IMPOSSIBLE_THRESHOLD = "impossible_threshold"
    # The value is bad, or cannot be correct
    NEGATIVE_VALUE = "negative_value"
    OUTSIDE_PLAUSIBLE_RANGE = "outside_plausible_range"  # a value that its unit cannot have
    ABOVE_PHYSICAL_LIMIT = "above_physical_limit"
    IMPLAUSIBLY_HIGH = "implausibly_high"  # compared with the reference value
    THRESHOLD_VIOLATED = "threshold_violated"
    BELOW_WARNING_THRESHOLD = "below_warning_threshold"
    WITHIN_CONFIDENCE_INTERVAL = "within_confidence_interval"  # the 95 % interval contains the threshold
    WITHIN_SAMPLE_RANGE = "within_sample_range"  # the range contains the threshold; too few samples for an interval
    MANY_SAMPLES_BEYOND = "many_samples_beyond"  # the share of samples clearly beyond the threshold is significant
    INCONCLUSIVE = "inconclusive"  # the value violates the threshold, but the samples are too few or too different
    SLOW_WINDOWS = "slow_windows"  # too many samples far slower than the median of the same metric and subject
    BELOW_PEERS = "below_peers"
    ASYMMETRIC = "asymmetric"  # far below the opposite direction
    FABRIC_MISMATCH = "fabric_mismatch"  # NCCL uses another network than the trial asks for
    ERROR_COUNTERS_INCREASED = "error_counters_increased"
    COUNTERS_NOT_READ = "counters_not_read"
    COUNTERS_UNAVAILABLE = "counters_unavailable"
    # Result of the retry
    REPRODUCED = "reproduced"
    REPRODUCED_ON_OTHER_DEVICE = "reproduced_on_other_device"  # the same rank is bad on another GPU
    NOT_REPRODUCED = "not_reproduced"
    FAILED_IN_RETRY_ONLY = "failed_in_retry_only"
    MOVED = "moved"  # the first measurement and the retry failed on different subjects of one node
    NO_THIRD_MEASUREMENT = "no_third_measurement"  # one of two measurements is bad, and no third one decides
    NOT_RETRIED = "not_retried"
    RETRY_FAILED = "retry_failed"
