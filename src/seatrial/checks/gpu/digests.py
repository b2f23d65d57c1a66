"""Do identical GPUs compute identical bits? The odd one among them corrupts training without a word.

A GPU whose arithmetic is wrong in the same way each time passes every test that compares it with itself. So the same
products are made everywhere and compared between devices of one model (silent data corruption: Llama 3 lost 6 of its
419 unplanned stops to it, arXiv 2407.21783, table 5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pydantic import Field

from seatrial.checks.base import Check, Context, Needs, Options, facts, metric
from seatrial.model import EXEMPT, NotApplicable, Observation, Outcome, Phase, Rule, Scope

GPU_SIZE, CPU_SIZE = 4096, 512
GPU_LINKS, CPU_LINKS = 500, 50  # about 2 s of an H200 in fp32, under 1 s of a CPU core
KINDS = {"cuda": ("bf16", "fp32"), "cpu": ("fp32",)}


class DigestOptions(Options):
    """``links``: products in a row whose bits are compared, of ``size`` × ``size`` matrices."""

    links: int | None = Field(default=None, ge=1)
    size: int | None = Field(default=None, ge=64, multiple_of=16)


def measure(context: Context, options: DigestOptions) -> Iterator[Observation]:
    """Yield, on rank 0, for every rank with a twin whether its bits are those of most others of its model.

    Where they are not all alike, everybody computes once more: an upset that does not come back is told from a fault
    that does. Raises NotApplicable where no two devices are alike.
    """
    from seatrial.bench import compute, rank

    subjects = rank.gather(context.subject)
    device = rank.describe_device(context.device)
    models = rank.gather(f"{device['gpu'] or device['cpu']}, {compute.describe_arithmetic(context.device)}")
    if len(set(models)) == len(models):
        named = "; ".join(f"{subject} is {model}" for subject, model in zip(subjects, models, strict=True))
        raise NotApplicable(f"no two devices are alike: {named}")
    kinds = KINDS[device["backend"]]
    rounds = [_round(context, options, kinds)]
    if any(mismatching_ranks(models, digests) for digests in _by_kind(rounds[0])):
        context.progress("not alike: once more")
        rounds.append(_round(context, options, kinds))
    devices = rank.describe_devices(context.device)
    if context.rank == 0:
        yield from facts(devices)
        yield from _compare_digests(models, subjects, kinds, rounds)


def _round(context: Context, options: DigestOptions, kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """The digests of every rank, one a kind; an empty one for what its device does not multiply in hardware."""
    from seatrial.bench import compute, rank

    size, links = (GPU_SIZE, GPU_LINKS) if context.on_gpu else (CPU_SIZE, CPU_LINKS)
    size, links = options.size or size, options.links or links
    missing = {kind for kind in kinds if compute.unsupported_reason(kind, context.device)}
    digests = ("" if kind in missing else compute.chain_digest(kind, size, context.device, links) for kind in kinds)
    return rank.gather(tuple(digests))


def _by_kind(digests: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return list(zip(*digests, strict=True))


def mismatching_ranks(models: Sequence[str], digests: Sequence[str]) -> set[int]:
    """Ranks whose digest is not that of more than half of their model; all of a model where there is no such half."""
    agreed = {model: majority_digest(_of_model(model, models, digests)) for model in set(models)}
    return {rank for rank, digest in enumerate(digests) if digest != agreed[models[rank]]}


def _of_model(model: str, models: Sequence[str], digests: Sequence[str]) -> list[str]:
    return [digest for digest, other in zip(digests, models, strict=True) if other == model]


def majority_digest(digests: Sequence[str]) -> str | None:
    """The digest of more than half of them; None where there is no such half."""
    digest, count = Counter(digests).most_common(1)[0]
    return digest if 2 * count > len(digests) else None


def _compare_digests(
    models: Sequence[str], subjects: Sequence[str], kinds: Sequence[str], rounds: Sequence[list[tuple[str, ...]]]
) -> Iterator[Observation]:
    differing_ranks = [
        set[int]().union(*(mismatching_ranks(models, digests) for digests in _by_kind(by_rank))) for by_rank in rounds
    ]
    alone = [subject for subject, model in zip(subjects, models, strict=True) if models.count(model) == 1]
    for rank, subject in enumerate(subjects):
        if subject not in alone:
            yield metric("digest_mismatches", sum(rank in ranks for ranks in differing_ranks), "rounds", subject)
    yield metric("uncompared_devices", len(alone), "devices")
    last = dict(zip(kinds, _by_kind(rounds[-1]), strict=True))
    used = [kind for kind, digests in last.items() if any(digests)]
    agreed: dict[str, dict[str, str | None]] = {}
    for model in sorted(set(models)):  # of each kind that it has in hardware; None where its devices do not agree
        by_kind = {kind: majority_digest(_of_model(model, models, digests)) for kind, digests in last.items()}
        agreed[model] = {kind: digest for kind, digest in by_kind.items() if digest != ""}
    yield from facts(
        {
            "rounds": len(rounds),
            "kinds": used,
            "models": {model: models.count(model) for model in agreed},
            "unique_models": alone,
            "agreed": agreed,
            EXEMPT: dict.fromkeys(alone, "no other device here is like it"),
            "digests": [dict(zip(subjects, map(list, one), strict=True)) for one in rounds] if len(rounds) > 1 else [],
            "how": f"a chain of seeded matrix products in {', '.join(used)}; SHA-256 over the sums of the bits of "
            "every product, compared between all devices of one model, and kept (fact: agreed) to compare nodes and "
            "runs by",
        }
    )


CHECK = Check(
    name="device.digests",
    title="Identical devices compute identical bits",
    phase=Phase.DEVICE,
    scope=Scope.CLUSTER,
    metrics={"digest_mismatches": "rounds", "uncompared_devices": "devices"},
    rules=(
        Rule(
            metric="digest_mismatches",
            expect="== 0 rounds",
            evidence_facts=("digests",),
            meaning="this device's bits differ from those of most others of its model (of two that differ, either may be "
            "wrong): it corrupts training silently",
            fix="take the node out of service; dcgmi diag -r 4 -i INDEX; repeat with "
            "seatrial run --only device.digests. Once in two rounds: an upset, watch it. Each time: replace the GPU",
        ),
        Rule(
            metric="uncompared_devices",
            expect="== 0 devices",
            outcome_if_violated=Outcome.WARN,
            evidence_facts=("unique_models",),
            meaning="nothing is known of this device's arithmetic: no other here has its model and its libraries",
            fix="compare models and torch versions (facts: models); unlike libraries among like GPUs: install one",
        ),
    ),
    measure=measure,
    limit_s=300.0,
    needs=Needs(min_ranks=2),
    options=DigestOptions,
    required_per={"digest_mismatches": "rank"},
)
