"""SmolLM-135M on 1,000 instruction rows, one epoch, on one GPU: the smallest training that users would call real.

Trained as users train (Hugging Face's Trainer), saved, loaded as they would, and asked for a few words.
"""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.checks.base import Check, Context
from seatrial.checks.training import _results
from seatrial.checks.training._workload import WorkloadOptions
from seatrial.model import CLUSTER, Fact, Metric, Observation, Phase, Rule, Scope

NAME = "sft-smollm-135m"
GENERATED = 8  # tokens, that show that final/ loads and computes


def measure(context: Context, options: WorkloadOptions) -> Iterator[Observation]:
    then = "then final/ is loaded anew"
    trained = yield from _results.train_on_one_gpu(
        context, options, NAME, after_training=then, generate_tokens=GENERATED
    )
    if context.rank:
        return
    saved = [*trained.out.glob("checkpoints/checkpoint-*/trainer_state.json")]
    yield Metric(name="checkpoints", value=len(saved), unit="count", subject=CLUSTER)
    if generated := trained.value("generated"):
        yield Fact(name="generated", value=generated)
        tokens = generated["tokens"] if generated["finite"] else 0
        yield Metric(name="generated_tokens", value=tokens, unit="count", subject=CLUSTER)


CHECK = Check(
    name="train.sft_smollm",
    title="A small language model fine-tuned on instructions (SmolLM-135M)",
    phase=Phase.SINGLE_GPU,
    scope=Scope.CLUSTER,
    metrics={**_results.metric_units(), "checkpoints": "count", "generated_tokens": "count"},
    rules=(
        *_results.RULES,
        Rule(
            metric="checkpoints",
            expect=">= 1 count",
            applies_if={"trained": "yes"},
            meaning="what is not saved is trained again after the first fault",
            fix="Look at config.json (an artifact): checkpoint.every must not be 0; and at filesystem.shared",
        ),
        Rule(
            metric="generated_tokens",
            expect=">= 1 count",
            applies_if={"trained": "yes"},
            evidence_facts=("generated",),
            meaning="the model that was saved must load and compute: this one gave no token, or logits that are no numbers",
            fix="Load final/ by hand: python -c 'from transformers import AutoModelForCausalLM as M; "
            'M.from_pretrained("…/final")\'; look at filesystem.shared and free space',
        ),
    ),
    measure=measure,
    facts_from_options=lambda options: _results.facts_from_options(options, NAME),
    limit_s=700.0,
    options=WorkloadOptions,
    performance_metrics=_results.PERFORMANCE,
)
