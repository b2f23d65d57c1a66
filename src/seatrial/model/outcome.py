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
    MODEL = "model"  # the limit computed from the hardware's links and arithmetic
    PEERS = "peers"  # the median of like devices in this trial
    RULE = "rule"  # the check itself


class Reason(StrEnum):
    """Why a verdict is no plain PASS. One verdict may have several."""

    # The check was not measured, or not completely
    LEFT_OUT = "left_out"  # by --only or --skip
    UNKNOWN_CHECK = "unknown_check"
    NOT_MEASURED = "not_measured"
    MEASUREMENT_FAILED = "measurement_failed"
    INCOMPLETE = "incomplete"  # fewer places than planned, or other ones
    MISSING = "missing"  # a metric that a rule judges
    MISSING_SOMEWHERE = "missing_somewhere"
    # The rule or threshold was not evaluated
    DOES_NOT_APPLY = "does_not_apply"
    APPLIES_TO_PEER = "applies_to_peer"  # and not here, without a reason
    RANKS_DISAGREE = "ranks_disagree"
    NO_RULE = "no_rule"
    THRESHOLD_NOT_EVALUATED = "threshold_not_evaluated"
    OTHER_SIZE = "other_size"  # the trial has a threshold on another size of the same figure
    TOO_FEW_PEERS = "too_few_peers"
    NO_REFERENCE = "no_reference"
    PEERS_ONLY = "peers_only"  # peers show who is slower, not whether all are
    RECORDED_ONLY = "recorded_only"
    OTHER_UNIT = "other_unit"
    IMPOSSIBLE_THRESHOLD = "impossible_threshold"
    # The value is bad, or cannot be right
    BELOW_ZERO = "below_zero"
    BEYOND_HARDWARE = "beyond_hardware"
    BEYOND_BELIEF = "beyond_belief"  # too good beside the reference
    THRESHOLD_VIOLATED = "threshold_violated"
    BELOW_WARNING = "below_warning"
    INTERVAL_REACHES = "interval_reaches"  # the threshold is within the value's 95 % interval
    SAMPLES_REACH = "samples_reach"  # the threshold is within the range of too few samples for an interval
    BEHIND_PEERS = "behind_peers"
    ASYMMETRIC = "asymmetric"  # far under the opposite direction
    ERRORS_COUNTED = "errors_counted"
    COUNTERS_UNREAD = "counters_unread"
    COUNTERS_REFUSED = "counters_refused"
    # What the second measurement says
    REPRODUCED = "reproduced"
    REPRODUCED_BY_RANK = "reproduced_by_rank"  # by the same rank on another device
    NOT_REPRODUCED = "not_reproduced"
    SECOND_TIME_ONLY = "second_time_only"
    NOT_REPEATED = "not_repeated"
    RETRY_FAILED = "retry_failed"
