"""One parameter of one rank differs in one bit, as after an error in its GPU's memory."""

from __future__ import annotations

from typing import Any

MODULE = "seatrial.train.invariants"


def change(invariants: Any) -> None:
    """Flip the lowest bit of one parameter before the parameters of all ranks are compared."""
    parameter_digest = invariants.parameter_digest

    def digest_with_fault(models: Any) -> str:
        models = list(models)
        parameter = next(models[0].parameters()).detach()
        parameter.view(invariants.torch.int32).view(-1)[0] ^= 1
        digest: str = parameter_digest(models)
        return digest

    invariants.parameter_digest = digest_with_fault
