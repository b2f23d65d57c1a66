"""Fine-tunes on one GPU: Mistral-7B, and SmolLM-135M with Hugging Face's Trainer.

Mistral trains ten steps: the baseline for distributed training. SmolLM trains one epoch of 1,000 instruction rows; then
the exported model is loaded and generates a few tokens.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from seatrial.checks.check import Check, Context
from seatrial.checks.declare import Answer, Answers, fact, metric, value
from seatrial.checks.training import _results, _workload
from seatrial.checks.training._workload import TrainingResult, WorkloadOptions
from seatrial.model import Phase, Scope

MISTRAL, SMOLLM = "sft-mistral-7b-1gpu", "sft-smollm-135m"
GENERATED_TOKENS = 8


def measure_mistral(context: Context, options: WorkloadOptions) -> Answers:
    """Train on the GPU of rank 0; yield the metrics of the training on rank 0."""
    # the export would write 14.5 GB
    result = yield from _train(context, options, MISTRAL, "no export", "export=false")
    if context.rank == 0:
        yield fact("precision", result.value("precision"))


def measure_smollm(context: Context, options: WorkloadOptions) -> Answers:
    """Train on the GPU of rank 0; yield metrics, checkpoints and generated tokens on rank 0."""
    then = "then final/ is loaded"
    result = yield from _train(context, options, SMOLLM, then, generate_tokens=GENERATED_TOKENS)
    if context.rank:
        return
    yield value("checkpoints", len([*result.out.glob("checkpoints/checkpoint-*/trainer_state.json")]))
    if generated := result.value("generated"):
        yield value("generated_tokens", generated["tokens"] if generated["finite"] else 0, evidence=generated)


def _train(
    context: Context, options: WorkloadOptions, name: str, then: str, *overrides: str, generate_tokens: int = 0
) -> Generator[Answer, None, TrainingResult]:
    """Train the shipped config ``name`` on the GPU of rank 0; the other ranks wait. ``then``: for the fact method."""
    config, overrides = _workload.config_and_overrides(context, options, name, overrides)
    stage = _results.Stage(overrides=overrides, groups=[[0]])
    method = f"on one GPU, once; {then}"
    results = yield from _results.run_stages(context, config, [stage], options.limit_s, method, generate_tokens)
    return results[stage.name][0]


MISTRAL_CHECK = Check(
    name="train.sft_mistral",
    title="Full fine-tune of Mistral-7B on one GPU",
    phase=Phase.SINGLE_GPU,
    scope=Scope.CLUSTER,
    declared=(*_results.DECLARED, *_results.speed(""), *_results.ONE_TRAINING),
    measure=measure_mistral,
    facts_from_options=lambda options: _results.facts_from_options(options, MISTRAL),
    limit_s=700.0,
    options=WorkloadOptions,
)
SMOLLM_CHECK = replace(
    MISTRAL_CHECK,
    name="train.sft_smollm",
    title="Instruction fine-tune of SmolLM-135M on one GPU",
    declared=(
        *MISTRAL_CHECK.declared,
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
    measure=measure_smollm,
    facts_from_options=lambda options: _results.facts_from_options(options, SMOLLM),
)
CHECKS = (MISTRAL_CHECK, SMOLLM_CHECK)
