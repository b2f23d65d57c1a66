"""One parameter of one rank differs in one bit, as after an error in its GPU's memory."""

from __future__ import annotations

from typing import Any

from seatrial.drill.faults import call_after_import, is_faulty_rank


def install() -> None:
    """Flip the lowest bit of one parameter before the parameters of all ranks are compared."""
    if is_faulty_rank():
        call_after_import("seatrial.train.invariants", _change)


def _change(invariants: Any) -> None:
    parameter_digest = invariants.parameter_digest

    def digest_with_fault(models: Any) -> str:
        models = list(models)
        parameter = next(models[0].parameters()).detach()
        parameter.view(invariants.torch.int32).view(-1)[0] ^= 1
        digest: str = parameter_digest(models)
        return digest

    invariants.parameter_digest = digest_with_fault
