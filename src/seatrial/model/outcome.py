"""What a verdict says, by what it is judged, and why: three enumerations that code reads in place of text."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Outcome(StrEnum):
    """What one verdict says. The six are never merged: "measured bad" is not "could not be measured"."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"  # does not apply here; the reason says why
    UNJUDGED = "UNJUDGED"  # measured, and nothing known to judge it by
    ERROR = "ERROR"  # could not be measured


# Worst first: the order in which a report and a summary of several verdicts care.
WORST_FIRST = (Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED, Outcome.WARN, Outcome.PASS, Outcome.SKIP)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome that a summary shows. No outcome at all is UNJUDGED: nothing was said."""
    return min(outcomes, key=WORST_FIRST.index, default=Outcome.UNJUDGED)


class BasisKind(StrEnum):
    """Where the expected value comes from."""

    TRIAL = "trial"  # a threshold of the trial file
    SITE = "site"  # the baseline of this site's good runs
    SKU = "SKU"  # what is published of the hardware
    PHYSICAL_LIMIT = "physical_limit"  # the limit computed from the hardware's links and arithmetic
    PEERS = "peers"  # the median of like devices in this trial
    RULE = "rule"  # the check itself


class Reason(StrEnum):
    """Why a verdict is no plain PASS. One verdict may have several."""

    # The check was not measured, or not completely
    EXCLUDED = "excluded"  # by --only or --skip
    UNKNOWN_CHECK = "unknown_check"
    NOT_MEASURED = "not_measured"
    MEASUREMENT_FAILED = "measurement_failed"
    INCOMPLETE_COVERAGE = "incomplete_coverage"  # fewer places than planned, or other ones
    METRIC_MISSING = "metric_missing"  # a metric that a rule judges
    METRIC_PARTLY_MISSING = "metric_partly_missing"
    # The rule or threshold was not evaluated
    NOT_APPLICABLE = "not_applicable"
    APPLIES_TO_PEERS_ONLY = "applies_to_peers_only"  # and not here, without a reason
    RANKS_DISAGREE = "ranks_disagree"
    NO_RULE = "no_rule"
    THRESHOLD_NOT_EVALUATED = "threshold_not_evaluated"
    THRESHOLD_ON_OTHER_SIZE = "threshold_on_other_size"  # the trial has a threshold on another size of the same figure
    TOO_FEW_PEERS = "too_few_peers"
    NO_REFERENCE = "no_reference"
    NO_ABSOLUTE_REFERENCE = "no_absolute_reference"  # peers show who is slower, not whether all are
    NO_THRESHOLD = "no_threshold"
    UNIT_MISMATCH = "unit_mismatch"
    IMPOSSIBLE_THRESHOLD = "impossible_threshold"
    # The value is bad, or cannot be right
    NEGATIVE_VALUE = "negative_value"
    ABOVE_PHYSICAL_LIMIT = "above_physical_limit"
    IMPLAUSIBLY_HIGH = "implausibly_high"  # too good beside the reference
    THRESHOLD_VIOLATED = "threshold_violated"
    BELOW_WARNING_THRESHOLD = "below_warning_threshold"
    WITHIN_CONFIDENCE_INTERVAL = "within_confidence_interval"  # the threshold is within the value's 95 % interval
    WITHIN_SAMPLE_RANGE = "within_sample_range"  # the threshold is within the range of too few samples for an interval
    BELOW_PEERS = "below_peers"
    ASYMMETRIC = "asymmetric"  # far under the opposite direction
    ERROR_COUNTERS_INCREASED = "error_counters_increased"
    COUNTERS_NOT_READ = "counters_not_read"
    COUNTERS_UNAVAILABLE = "counters_unavailable"
    # What the second measurement says
    REPRODUCED = "reproduced"
    REPRODUCED_ON_OTHER_DEVICE = "reproduced_on_other_device"  # by the same rank on another device
    NOT_REPRODUCED = "not_reproduced"
    FAILED_IN_RETRY_ONLY = "failed_in_retry_only"
    NOT_RETRIED = "not_retried"
    RETRY_FAILED = "retry_failed"
