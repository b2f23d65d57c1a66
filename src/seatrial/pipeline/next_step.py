"""The next step after a verdict without a reference value, on the output of nccl-tests or nvbandwidth."""

from __future__ import annotations

from dataclasses import replace

from seatrial.hardware.references import MODEL_SEPARATOR, skus
from seatrial.model import Outcome, Reason, Verdict
from seatrial.pipeline.benchmark_hardware import known_models


def with_next_step(verdict: Verdict, gpu: str, *, needs_ports: bool = False) -> Verdict:
    """Return the verdict; if it is UNJUDGED without a reference value, its ``fix`` says where to get one.

    ``gpu``: the NVML name; ``needs_ports``: a reference value depends on the network ports, which are unknown.
    """
    missing = {Reason.NO_REFERENCE, Reason.NO_ABSOLUTE_REFERENCE}
    if verdict.outcome is not Outcome.UNJUDGED or missing.isdisjoint(verdict.reasons):
        return verdict
    baseline = "give --baseline FILE, learned from good runs of `seatrial run`"
    if not set(gpu.split(MODEL_SEPARATOR)) <= {name for sku in skus() for name in sku.nvml_names}:
        return replace(verdict, fix=f"no reference values of this GPU model are known ({known_models()}): {baseline}")
    step = "`seatrial skus` lists the sizes and numbers of GPUs with a reference value: run again with one of them"
    if needs_ports:
        step = f"give the network ports of a node: --nics PORTSxGb/s, such as --nics 8x400. Else {step}"
    return replace(verdict, fix=f"{step}, or {baseline}")
