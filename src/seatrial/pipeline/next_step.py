"""The next step after a verdict without a reference value, on the output of nccl-tests or nvbandwidth."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from seatrial.hardware.references import MODEL_SEPARATOR, skus
from seatrial.model import Outcome, Reason, Verdict, parse_bytes
from seatrial.pipeline.benchmark_hardware import known_models

_PORTS_STEP = "give the network ports of a node: --nics PORTSxGb/s, such as --nics 8x400"
_ALGORITHM_STEP = (
    "give --algorithm: Ring if NCCL_ALGO was set to it, else NVLSTree or Tree; or run again with NCCL_DEBUG=INFO "
    "NCCL_DEBUG_SUBSYS=INIT,NET,ENV,TUNING"
)


def with_next_steps(
    verdicts: Iterable[Verdict], gpu: str, operation: str, has_reference: Callable[[str], bool], needs_ports: bool
) -> tuple[Verdict, ...]:
    """Return the verdicts on an operation of nccl-tests, each after ``with_next_step``.

    ``has_reference``: whether there is a reference value at a size, such as 8GiB, on this hardware.
    """
    prefix = f"{operation}.busbw."
    keys = {key for sku in skus() if gpu in sku.nvml_names for key in sku.expected if key.startswith(prefix)}
    sizes = sorted(filter(has_reference, (key.removeprefix(prefix) for key in keys)), key=parse_bytes)
    return tuple(with_next_step(verdict, gpu, needs_ports=needs_ports, reference_sizes=sizes) for verdict in verdicts)


def with_next_step(
    verdict: Verdict, gpu: str, *, needs_ports: bool = False, reference_sizes: Sequence[str] = ()
) -> Verdict:
    """Return the verdict; if it is UNJUDGED without a reference value, its ``fix`` says where to get one.

    ``gpu``: the NVML name; ``needs_ports``: a reference value depends on the network ports, which are unknown.
    ``reference_sizes``: the sizes with a reference value on this hardware, such as 8GiB.
    """
    if Reason.ALGORITHM_UNKNOWN in verdict.reasons:
        return replace(verdict, fix=f"{_PORTS_STEP}, and {_ALGORITHM_STEP}" if needs_ports else _ALGORITHM_STEP)
    no_reference = {Reason.NO_REFERENCE, Reason.NO_ABSOLUTE_REFERENCE}
    if verdict.outcome is not Outcome.UNJUDGED or no_reference.isdisjoint(verdict.reasons):
        return verdict
    baseline = "give --baseline FILE, learned from good runs of `seatrial run`"
    names = gpu.split(MODEL_SEPARATOR)
    models = [sku.name.removeprefix("NVIDIA ") for sku in skus() if not set(names).isdisjoint(sku.nvml_names)]
    if len(models) < len(set(names)):
        return replace(verdict, fix=f"no reference values of this GPU model are known ({known_models()}): {baseline}")
    commands = " and ".join(f"`seatrial skus {shlex.quote(model)}`" for model in models)
    if reference_sizes:
        sizes = " or ".join(f"-e {size.removesuffix('iB')}" for size in reference_sizes)
        step = (
            f"the reference values are for {', '.join(reference_sizes)}: run again with {sizes}; {commands} lists them"
        )
    else:
        step = f"{commands} lists the sizes and numbers of GPUs with a reference value: run again with one of them"
    if needs_ports:
        step = f"{_PORTS_STEP}. Else {step}"
    return replace(verdict, fix=f"{step}, or {baseline}")
