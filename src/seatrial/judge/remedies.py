"""The next step for UNJUDGED verdicts, and for ERRORs without one, by their reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from seatrial.hardware.references import MODEL_SEPARATOR, skus
from seatrial.judge.groups import gpu_model
from seatrial.model import Measurement, Outcome, Reason, Verdict

_BASELINE = (
    "learn a baseline from three good runs: `seatrial baseline learn RUN1 RUN2 RUN3 --out site.yaml`, then "
    "`seatrial judge RUN --baseline site.yaml`, and `--set baseline=site.yaml` for later runs"
)
_THRESHOLD = "`--set 'checks.{check}.expect.{metric}=>= VALUE {unit}'`"
_NO_REFERENCE = f"set a threshold in the trial: {_THRESHOLD}; or {_BASELINE}"
_RUN_AGAIN = "run the check again: `seatrial run TRIAL --only {check}`"
_FIXES: Mapping[Reason, str] = {
    Reason.ERROR_COUNTERS: _RUN_AGAIN,
    Reason.FACT_INVALID: _RUN_AGAIN,
    Reason.METRIC_MISSING: _RUN_AGAIN,
    Reason.METRIC_PARTLY_MISSING: _RUN_AGAIN,
    Reason.INCONCLUSIVE: "measure again, longer: `seatrial run TRIAL --only {check}` with more seconds or samples in "
    "the check's options; `seatrial show checks {check} --power` lists how many samples a limit needs",
    Reason.NO_THIRD_MEASUREMENT: "`seatrial run --resume RUN` measures the metric a third time",
    Reason.UNIT_MISMATCH: "set the threshold in {unit}, the unit of {metric}",
    Reason.IMPLAUSIBLY_HIGH: f"measure it with another tool; if the value is correct, {_BASELINE}",
    Reason.ALGORITHM_UNKNOWN: "`seatrial run TRIAL` without --only and --skip: other checks read the rate of the ports "
    "and NCCL's algorithm at each size",
    Reason.NO_REFERENCE: _NO_REFERENCE,
}


def with_remedies(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The verdicts. An UNJUDGED verdict gets the fix for its reason instead of the rule's fix, which is for a fault."""
    unjudged, error = Outcome.UNJUDGED, Outcome.ERROR  # looked up once, since enum member access is slow
    found = []
    for each in verdicts:
        if each.outcome is unjudged or (each.outcome is error and not each.fix):
            text = next((text for reason, text in _FIXES.items() if reason in each.reasons), "")
            fix = text.format(check=each.check, metric=each.metric, unit=each.unit)
            found.append(replace(each, fix=fix))
        else:
            found.append(each)
    return found


def unknown_gpus(measurements: Iterable[Measurement]) -> tuple[str, ...]:
    """The measured GPU models without SKU data."""
    models = {model for each in measurements for model in gpu_model(each.facts).split(MODEL_SEPARATOR)}
    return tuple(sorted(models - {"", *(name for sku in skus() for name in sku.nvml_names)}))
