"""Fine-tunes SmolLM-135M on 1,000 instruction rows, one epoch, on one GPU, with Hugging Face's Trainer.

The check then loads the exported model and generates a few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.checks.base import Check, Context
from seatrial.checks.training import _results
from seatrial.checks.training._workload import WorkloadOptions
from seatrial.model import CLUSTER, Fact, Metric, Observation, Phase, Rule, Scope

NAME = "sft-smollm-135m"
GENERATED_TOKENS = 8


def measure(context: Context, options: WorkloadOptions) -> Iterator[Observation]:
    """Train on the GPU of rank 0; yield metrics, checkpoints and generated tokens on rank 0."""
    result = yield from _results.train_on_one_gpu(
        context, options, NAME, after_training="then final/ is loaded", generate_tokens=GENERATED_TOKENS
    )
    if context.rank:
        return
    checkpoints = [*result.out.glob("checkpoints/checkpoint-*/trainer_state.json")]
    yield Metric(name="checkpoints", value=len(checkpoints), unit="count", subject=CLUSTER)
    if generated := result.value("generated"):
        yield Fact(name="generated", value=generated)
        tokens = generated["tokens"] if generated["finite"] else 0
        yield Metric(name="generated_tokens", value=tokens, unit="count", subject=CLUSTER)


CHECK = Check(
    name="train.sft_smollm",
    title="Instruction fine-tune of SmolLM-135M on one GPU",
    phase=Phase.SINGLE_GPU,
    scope=Scope.CLUSTER,
    metrics={**_results.metric_units(), "checkpoints": "count", "generated_tokens": "count"},
    rules=(
        *_results.RULES,
        Rule(
            metric="checkpoints",
            expect=">= 1 count",
            applies_if={"trained": "yes"},
            meaning="The training wrote no checkpoint: after a fault it starts from the beginning.",
            fix="Check config.json (artifact): checkpoint.every must not be 0. Check filesystem.shared",
        ),
        Rule(
            metric="generated_tokens",
            expect=">= 1 count",
            applies_if={"trained": "yes"},
            evidence_facts=("generated",),
            meaning="The exported model generated no tokens, or its logits are infinite or NaN.",
            fix="Load final/ manually: python -c 'from transformers import AutoModelForCausalLM as M; "
            'M.from_pretrained("…/final")\'; check filesystem.shared and free disk space',
        ),
    ),
    rule_facts=_results.RULE_FACTS,
    measure=measure,
    facts_from_options=lambda options: _results.facts_from_options(options, NAME),
    limit_s=700.0,
    options=WorkloadOptions,
    performance_metrics=_results.PERFORMANCE,
)
