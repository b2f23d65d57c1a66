"""Do identical GPUs compute identical bits? The odd one among them corrupts training without a word.

A GPU whose arithmetic is wrong in the same way each time passes every test that compares it with itself. So the same
products are made everywhere and compared between devices of one model (silent data corruption: Llama 3 lost 6 of its
419 unplanned stops to it, arXiv 2407.21783, table 5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pydantic import Field

from seatrial.checks.base import Check, Needs, Options, Place
from seatrial.model import CLUSTER, EXCUSED, Fact, Metric, NotApplicable, Observation, Outcome, Phase, Rule, Scope

GPU_SIZE, CPU_SIZE = 4096, 512
GPU_LINKS, CPU_LINKS = 500, 50  # about 2 s of an H200 in fp32, under 1 s of a CPU core
KINDS = {"cuda": ("bf16", "fp32"), "cpu": ("fp32",)}


class DigestOptions(Options):
    """``links``: products in a row whose bits are compared, of ``size`` × ``size`` matrices."""

    links: int | None = Field(default=None, ge=1)
    size: int | None = Field(default=None, ge=64, multiple_of=16)


def measure(place: Place, options: DigestOptions) -> Iterator[Observation]:
    """Yield, on rank 0, for every rank with a twin whether its bits are those of most others of its model.

    Where they are not all alike, everybody computes once more: an upset that does not come back is told from a fault
    that does. Raises NotApplicable where no two devices are alike.
    """
    from seatrial.bench import compute, rank

    subjects = rank.gather(place.subject)
    device = rank.describe_device(place.device)
    models = rank.gather(f"{device['gpu'] or device['cpu']}, {compute.describe_arithmetic(place.device)}")
    if len(set(models)) == len(models):
        named = "; ".join(f"{subject} is {model}" for subject, model in zip(subjects, models, strict=True))
        raise NotApplicable(f"no two devices are alike: {named}")
    kinds = KINDS[device["backend"]]
    rounds = [_round(place, options, kinds)]
    if any(odd(models, digests) for digests in _by_kind(rounds[0])):
        place.note("not alike: once more")
        rounds.append(_round(place, options, kinds))
    devices = rank.describe_devices(place.device)
    if place.rank:
        return
    yield from (Fact(name=name, value=value) for name, value in devices.items())
    yield from _told(models, subjects, kinds, rounds)


def _round(place: Place, options: DigestOptions, kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """The digests of every rank, one a kind; an empty one for what its device does not multiply in hardware."""
    from seatrial.bench import compute, rank

    size, links = (GPU_SIZE, GPU_LINKS) if place.device.startswith("cuda") else (CPU_SIZE, CPU_LINKS)
    size, links = options.size or size, options.links or links
    missing = {kind for kind in kinds if compute.why_not(kind, place.device)}
    digests = ("" if kind in missing else compute.chain_digest(kind, size, place.device, links) for kind in kinds)
    return rank.gather(tuple(digests))


def _by_kind(digests: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return list(zip(*digests, strict=True))


def odd(models: Sequence[str], digests: Sequence[str]) -> set[int]:
    """Ranks whose digest is not that of more than half of their model; all of a model where there is no such half."""
    ranks = set()
    for model in set(models):
        own = [rank for rank, other in enumerate(models) if other == model]
        agreed = majority([digests[rank] for rank in own])
        ranks |= {rank for rank in own if digests[rank] != agreed}
    return ranks


def majority(digests: Sequence[str]) -> str | None:
    """The digest of more than half of them; None where there is no such half."""
    digest, count = Counter(digests).most_common(1)[0]
    return digest if 2 * count > len(digests) else None


def _agreed_on(
    model: str, models: Sequence[str], kinds: Sequence[str], digests: Sequence[Sequence[str]]
) -> dict[str, str | None]:
    """Kind → the digest of most devices of a model, None where they do not agree; only kinds it has in hardware."""
    own = [rank for rank, other in enumerate(models) if other == model]
    agreed = {kind: majority([one[rank] for rank in own]) for kind, one in zip(kinds, digests, strict=True)}
    return {kind: digest for kind, digest in agreed.items() if digest != ""}


def _told(
    models: Sequence[str], subjects: Sequence[str], kinds: Sequence[str], rounds: Sequence[list[tuple[str, ...]]]
) -> Iterator[Observation]:
    strange = [[odd(models, digests) for digests in _by_kind(one)] for one in rounds]
    alone = [subjects[rank] for rank, model in enumerate(models) if models.count(model) == 1]
    for rank, subject in enumerate(subjects):
        if subject not in alone:
            times = sum(any(rank in ranks for ranks in one) for one in strange)
            yield Metric(name="odd_rounds", value=times, unit="rounds", subject=subject)
    yield Metric(name="without_a_twin", value=len(alone), unit="devices", subject=CLUSTER)
    last = _by_kind(rounds[-1])
    used = [kind for kind, digests in zip(kinds, last, strict=True) if any(digests)]
    found: Mapping[str, object] = {
        "rounds": len(rounds),
        "kinds": used,
        "models": {model: models.count(model) for model in sorted(set(models))},
        "nobody_like": alone,
        "agreed": {model: _agreed_on(model, models, kinds, last) for model in sorted(set(models))},
        EXCUSED: dict.fromkeys(alone, "no other device here is like it"),
        "digests": [dict(zip(subjects, map(list, one), strict=True)) for one in rounds] if len(rounds) > 1 else [],
        "how": f"a chain of seeded matrix products in {', '.join(used)}; SHA-256 over the sums of the bits of every "
        "product, compared between all devices of one model, and kept (fact: agreed) to compare nodes and runs by",
    }
    yield from (Fact(name=name, value=value) for name, value in found.items())


CHECK = Check(
    name="device.digests",
    title="Identical devices compute identical bits",
    phase=Phase.DEVICE,
    scope=Scope.CLUSTER,
    metrics={"odd_rounds": "rounds", "without_a_twin": "devices"},
    rules=(
        Rule(
            metric="odd_rounds",
            expect="== 0 rounds",
            shows=("digests",),
            why="this device's bits differ from those of most others of its model (of two that differ, either may be "
            "wrong): it corrupts training silently",
            fix="take the node out of service; dcgmi diag -r 4 -i INDEX; repeat with "
            "seatrial run --only device.digests. Once in two rounds: an upset, watch it. Each time: replace the GPU",
        ),
        Rule(
            metric="without_a_twin",
            expect="== 0 devices",
            breach=Outcome.WARN,
            shows=("nobody_like",),
            why="nothing is known of this device's arithmetic: no other here has its model and its libraries",
            fix="compare models and torch versions (facts: models); unlike libraries among like GPUs: install one",
        ),
    ),
    measure=measure,
    limit_s=300.0,
    needs=Needs(ranks=2),
    options=DigestOptions,
    per={"odd_rounds": "place"},
)
