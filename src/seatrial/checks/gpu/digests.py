"""Compares the bits of matrix products between devices of one model, to detect silent data corruption.

A GPU whose arithmetic is wrong in a reproducible way passes every test that compares it with itself. This check
compares devices with each other. Silent data corruption caused 6 of the 419 unplanned interruptions of Llama 3's
training (arXiv 2407.21783, table 5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from seatrial.checks.check import Check, Context, Needs, Options, SkipIf, facts
from seatrial.checks.declare import Answers, absent, metric, value, warning
from seatrial.model import NotApplicable, Phase, Scope
from seatrial.util.grouping import grouped, majority

GPU_SIZE, CPU_SIZE = 4096, 512  # rows and columns
GPU_PRODUCTS, CPU_PRODUCTS = 500, 50  # about 2 s on an H200 in fp32, less than 1 s on a CPU core
DTYPES = {"cuda": ("bf16", "fp32"), "cpu": ("fp32",)}  # backend → dtypes

DigestsByDtype = dict[str, tuple[str, ...]]  # dtype → the digest of every rank; "" for an unsupported dtype


class DigestOptions(Options):
    """``products``: length of the chain of matrix products. ``size``: rows and columns of the matrices."""

    products: int | None = Field(default=None, ge=1)
    size: int | None = Field(default=None, ge=64, multiple_of=16)


def measure(context: Context, options: DigestOptions) -> Answers:
    """Yield from rank 0 the number of rounds in which each rank's digest differs from the majority of its model.

    A mismatch starts a second round on all ranks, which separates a transient upset from a permanent fault. Raises
    NotApplicable if no two devices have the same model and libraries.
    """
    from seatrial.bench import compute, rank

    subjects = rank.gather(context.subject)
    device = rank.describe_device(context.device)
    # A model includes the versions of the libraries: other versions may give other bits
    models = rank.gather(f"{device['gpu'] or device['cpu']}, {compute.describe_arithmetic(context.device)}")
    if len(set(models)) == len(models):
        listing = "; ".join(f"{subject} is {model}" for subject, model in zip(subjects, models, strict=True))
        raise NotApplicable(f"no two devices have the same model and libraries: {listing}")
    dtypes = DTYPES[device["backend"]]
    rounds = [_run_round(context, options, dtypes)]
    if mismatching_ranks(models, rounds[0]):
        context.progress("digests differ: second round")
        rounds.append(_run_round(context, options, dtypes))
    devices = rank.describe_devices(context.device)
    if context.rank == 0:
        yield from facts(devices)
        yield from _compare_digests(models, subjects, rounds)


def _run_round(context: Context, options: DigestOptions, dtypes: Sequence[str]) -> DigestsByDtype:
    """Compute one digest per dtype on this rank, and return the digests of all ranks."""
    from seatrial.bench import compute, rank

    size = options.size or (GPU_SIZE if context.on_gpu else CPU_SIZE)
    products = options.products or (GPU_PRODUCTS if context.on_gpu else CPU_PRODUCTS)
    digests = dict.fromkeys(dtypes, "")
    for dtype in dtypes:
        if not compute.unsupported_reason(dtype, context.device):
            digests[dtype] = compute.chain_digest(dtype, size, context.device, products)
    digests_by_rank = rank.gather(digests)
    return {dtype: tuple(rank_digests[dtype] for rank_digests in digests_by_rank) for dtype in dtypes}


def mismatching_ranks(models: Sequence[str], digests_by_dtype: DigestsByDtype) -> set[int]:
    """The ranks whose digest of at least one dtype differs from the majority of their model.

    If a model has no majority, all its ranks are returned.
    """
    majorities = {dtype: _majorities(models, digests) for dtype, digests in digests_by_dtype.items()}
    return {
        rank
        for dtype, digests in digests_by_dtype.items()
        for rank, digest in enumerate(digests)
        if digest != majorities[dtype][models[rank]]
    }


def _majorities(models: Sequence[str], digests: Sequence[str]) -> dict[str, str | None]:
    """Model → the digest that more than half of its devices have; None without a majority."""
    return {model: majority(of_model) for model, of_model in grouped(zip(models, digests, strict=True)).items()}


def _compare_digests(models: Sequence[str], subjects: Sequence[str], rounds: Sequence[DigestsByDtype]) -> Answers:
    """Yield the number of rounds with a mismatch of each rank, and facts on models and digests."""
    mismatching_by_round = [mismatching_ranks(models, digests_by_dtype) for digests_by_dtype in rounds]
    uncompared = [subject for subject, model in zip(subjects, models, strict=True) if models.count(model) == 1]
    for rank, subject in enumerate(subjects):
        if subject in uncompared:
            yield absent("digest_mismatches", "no other device has this model and these libraries", subject)
            continue
        mismatches = sum(rank in ranks for ranks in mismatching_by_round)
        evidence = [{dtype: digests[rank] for dtype, digests in each.items()} for each in rounds]
        yield value("digest_mismatches", mismatches, subject, evidence=evidence if mismatches else None)
    yield value("uncompared_devices", len(uncompared), evidence=uncompared or None)
    last_round = rounds[-1]
    used_dtypes = [dtype for dtype, digests in last_round.items() if any(digests)]
    by_dtype = {dtype: _majorities(models, digests) for dtype, digests in last_round.items()}
    majorities = {  # model → supported dtype → digest; None without a majority
        model: {dtype: of_dtype[model] for dtype, of_dtype in by_dtype.items() if of_dtype[model] != ""}
        for model in sorted(set(models))
    }
    yield from facts(
        {
            "rounds": len(rounds),
            "dtypes": used_dtypes,
            "models": dict(sorted(Counter(models).items())),
            "matching_digests": majorities,
            "method": f"chain of seeded matrix products in {', '.join(used_dtypes)}; SHA-256 over the bit sums of "
            "every product; digests compared between all devices of one model; the fact matching_digests allows "
            "comparison with other nodes and runs",
        }
    )


CHECK = Check(
    name="device.digests",
    title="Bitwise equality of matrix products between identical devices",
    phase=Phase.DEVICE,
    scope=Scope.CLUSTER,
    measure=measure,
    declared=(
        metric(
            "digest_mismatches",
            "== 0 rounds",
            "the product bits of this device differ from the majority of its model (of only two devices, either may be "
            "wrong): silent data corruption",
            "drain the node; dcgmi diag -r 4 -i INDEX; repeat seatrial run --only device.digests. Mismatch in 1 of 2 "
            "rounds: transient upset, monitor the GPU. Mismatch in every round: replace the GPU",
            per="rank",
        ),
        warning(
            "uncompared_devices",
            "== 0 devices",
            "arithmetic not compared: no other device has the same model and the same libraries",
            "compare GPU models and torch versions (fact: models); install the same libraries for identical GPUs",
        ),
    ),
    limit_s=300.0,
    needs=Needs(min_ranks=2),
    options=DigestOptions,
    skip_if=(SkipIf.UNVERIFIED,),  # if all devices differ in model or libraries
)
