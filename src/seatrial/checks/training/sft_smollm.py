"""Fine-tunes SmolLM-135M on 1,000 instruction rows, one epoch, on one GPU, with Hugging Face's Trainer.

The check then loads the exported model and generates a few tokens.
"""

from __future__ import annotations

from seatrial.checks.check import Check, Context
from seatrial.checks.declare import Answers, metric, value
from seatrial.checks.training import _results
from seatrial.checks.training._workload import WorkloadOptions
from seatrial.model import Phase, Scope

NAME = "sft-smollm-135m"
GENERATED_TOKENS = 8


def measure(context: Context, options: WorkloadOptions) -> Answers:
    """Train on the GPU of rank 0; yield metrics, checkpoints and generated tokens on rank 0."""
    result = yield from _results.train_on_one_gpu(
        context, options, NAME, after_training="then final/ is loaded", generate_tokens=GENERATED_TOKENS
    )
    if context.rank:
        return
    yield value("checkpoints", len([*result.out.glob("checkpoints/checkpoint-*/trainer_state.json")]))
    if generated := result.value("generated"):
        yield value("generated_tokens", generated["tokens"] if generated["finite"] else 0, evidence=generated)


CHECK = Check(
    name="train.sft_smollm",
    title="Instruction fine-tune of SmolLM-135M on one GPU",
    phase=Phase.SINGLE_GPU,
    scope=Scope.CLUSTER,
    declared=(
        *_results.DECLARED,
        *_results.speed(""),
        *_results.ONE_TRAINING,
        metric(
            "checkpoints",
            ">= 1 count",
            "The training wrote no checkpoint: after a fault it starts from the beginning.",
            "Check config.json (artifact): checkpoint.every must not be 0. Check filesystem.shared",
            when=_results.TRAINED,
        ),
        metric(
            "generated_tokens",
            ">= 1 count",
            "The exported model generated no tokens, or its logits are infinite or NaN.",
            "Load final/ manually: python -c 'from transformers import AutoModelForCausalLM as M; "
            'M.from_pretrained("…/final")\'; check filesystem.shared and free disk space',
            when=_results.TRAINED,
        ),
    ),
    measure=measure,
    facts_from_options=lambda options: _results.facts_from_options(options, NAME),
    limit_s=700.0,
    options=WorkloadOptions,
)
