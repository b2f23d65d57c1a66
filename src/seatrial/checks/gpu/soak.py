"""Loads every device for hours, in rounds of matrix products, memory, all-reduce and a training.

Each round does the same work with the same inputs: its results must have the same bits, and its speeds must not drop.
Each rank appends its rounds to a journal, so that a killed run loses one round, and ``--resume`` measures the rest.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Self

from pydantic import JsonValue, model_validator

from seatrial.checks.check import HOURS_UNDER_LOAD, Check, Context, Options, Seconds, facts
from seatrial.checks.declare import Answers, absent, fact, metric, value, warning
from seatrial.checks.gpu.burn import COOLING, DTYPES, no_value
from seatrial.checks.gpu.gemm import CPU_MATRIX_SIZE, GPU_MATRIX_SIZE, MAX_RELATIVE_ERROR
from seatrial.checks.gpu.memory import CPU_ARRAY_BYTES, GPU_ARRAY_BYTES, bytes_to_test
from seatrial.config.schema import duration_setting
from seatrial.discover.gpu_counters import GPU_COUNTERS
from seatrial.hardware.error_counters import counter_definitions
from seatrial.model import Frozen, Phase, Scope, SeatrialError, Series, parse_bytes
from seatrial.model.telemetry import THROTTLE_REASONS
from seatrial.util import journal

if TYPE_CHECKING:
    from seatrial.telemetry.error_counts import ErrorCounts
    from seatrial.telemetry.gpu_load import GpuLoad

MIN_ROUNDS = 3  # a trend compares the first third with the last third
# Shares of a round; the memory pattern test takes some seconds more
PRODUCTS_SHARE, COPY_SHARE, ALL_REDUCE_SHARE, TRAINING_SHARE = 0.4, 0.1, 0.2, 0.3
GPU_MESSAGE_BYTES, CPU_MESSAGE_BYTES = parse_bytes("1GiB"), parse_bytes("4MiB")
TESTED_SHARE = 0.8  # of the free memory: NCCL and the training need some between two pattern tests
SPEEDS = {"products": "TFLOP/s", "copy": "GB/s", "all_reduce": "GB/s", "training": "tokens/s"}


class SoakOptions(Options):
    """``budget_s``: seconds of all rounds together, those of earlier sessions included. ``round_s``: of one round."""

    budget_s: Seconds = 1800.0
    round_s: Seconds = 60.0

    @model_validator(mode="after")
    def _budget_has_enough_rounds(self) -> Self:
        if self.budget_s < MIN_ROUNDS * self.round_s:
            raise ValueError(
                f"shorter than {MIN_ROUNDS} rounds of {self.round_s:g} s each, the fewest that show a trend: set a "
                f"budget of at least {duration_setting(MIN_ROUNDS * self.round_s)}, or a smaller option round_s"
            )
        return self


class Round(Frozen):
    """Results of one round on one rank.

    ``device``: GPU and libraries. ``seconds``: of the round; ``load_s``: those with load on the device. ``speeds``: by
    the keys of SPEEDS. ``relative_error``: as a multiple of the limit of device.gemm. ``losses``: digest of all losses
    and gradient norms; empty if one is not finite. ``steps``: of the training. ``throttled``: number of load samples
    with throttling, and of all. ``errors``: level (FAIL, WARN, info) → new errors of the GPU's counters.
    """

    device: str
    seconds: float
    load_s: float
    speeds: dict[str, float]
    changed_products: int
    relative_error: float
    wrong_words: int
    wrong_elements: int
    losses: str
    steps: int
    temperature_c: float | None = None
    throttled: tuple[int, int] = (0, 0)
    errors: dict[str, int]

    def wrong_results(self, first: Round) -> dict[str, int]:
        """Metric → the number of wrong results; the losses are compared with those of the ``first`` round."""
        return {
            "changed_products": self.changed_products,
            "wrong_words": self.wrong_words,
            "wrong_elements": self.wrong_elements,
            "changed_losses": int(not self.losses or self.losses != first.losses),
        }


def measure(context: Context, options: SoakOptions) -> Answers:
    """Yield wrong results, trends and heat over the rounds of all sessions. All ranks run the same number of rounds.

    The rounds end before the budget if a result is wrong on a GPU. Raises SeatrialError if earlier rounds are of
    another device, if the disk is full, or if a GPU is lost.
    """
    from seatrial.bench import compute, rank
    from seatrial.telemetry import gpu_load

    device = f"{context.gpu_uuid or context.node}, {compute.describe_arithmetic(context.device)}"
    path = context.artifacts_dir / f"rounds.rank{context.rank}.jsonl"
    rounds, unreadable = _earlier_rounds(path, device)
    earlier = len(rounds)
    load = None
    with ExitStack() as stack:
        if context.nvml_index is not None:
            load = stack.enter_context(gpu_load.sample_gpu_load(context.nvml_index))
        writer = journal.Journal(path)
        while not _is_done(context, options, rounds):
            left_s = options.budget_s - sum(each.seconds for each in rounds)
            context.progress(f"round {len(rounds) + 1}, {max(left_s, 0) / 60:.1f} min left")
            rounds.append(_run_round(context, options, device, load, rounds[0].steps if rounds else 0))
            try:
                writer.append(rounds[-1].model_dump(mode="json"))
            except OSError as error:
                raise SeatrialError(
                    f"cannot write {path}: {error.strerror}; {len(rounds) - 1} rounds are saved: free space (df -h "
                    f"{path.parent}), then seatrial run --resume {context.run_dir}"
                ) from error
    yield from facts(rank.describe_devices(context.device))
    yield from _results(rounds, earlier)
    yield from _trends(context, rounds)
    if load:
        yield from _heat(rounds, load)
    else:
        yield absent(("temperature_max", "throttled_share"), "no GPU")
    hours = sum(each.load_s for each in rounds) / 3600
    yield fact(HOURS_UNDER_LOAD, min(rank.gather(hours)))
    yield fact("rounds", len(rounds))
    yield fact("unreadable_lines", unreadable)
    lost = ", ".join(f"{count} of {name}" for name, count in unreadable.items())
    yield fact(
        "method",
        f"{len(rounds)} rounds of {fmean(each.seconds for each in rounds):.0f} s, {earlier} of them in earlier "
        "sessions: matrix products, copy and pattern test of the memory, all-reduce on all ranks, and a training on "
        "each rank alone with the same seed and batches in each round; losses and gradient norms of these rounds "
        "compared bit by bit with the first of them"
        + (f"; not compared: rounds of earlier sessions whose lines are cut or changed: {lost}" if lost else ""),
    )


def _earlier_rounds(path: Path, device: str) -> tuple[list[Round], dict[str, int]]:
    """The rounds that earlier sessions completed on all ranks, and file → number of its lines that are unreadable.

    The journal ``path`` keeps only these rounds and lines.
    """
    from seatrial.bench import rank

    records, warnings = journal.read(path)
    rounds = [Round.model_validate({name: record[name] for name in Round.model_fields}) for record in records]
    others = sorted({each.device for each in rounds} - {device})
    if reasons := [text for text in rank.gather("; ".join(others) and f"{'; '.join(others)} ({path})") if text]:
        raise SeatrialError(
            f"the earlier rounds of this soak ran on {reasons[0]}; this rank is on {device}: resume on the same "
            "machine and installation, or start a new run"
        )
    rounds = rounds[: min(rank.gather(len(rounds)))]
    if len(rounds) < len(records):
        journal.truncate(path, len(rounds))
    return rounds, {name: count for name, count in rank.gather((path.name, len(warnings))) if count}


def _measured_s(artifacts_dir: Path) -> float:
    """Seconds of the rounds that earlier sessions completed on all ranks."""
    journals = map(journal.read, artifacts_dir.glob("rounds.rank*.jsonl"))
    return min((sum(record["seconds"] for record in records) for records, _ in journals), default=0.0)


def _is_done(context: Context, options: SoakOptions, rounds: Sequence[Round]) -> bool:
    """Whether all ranks stop: the budget is reached, or a result is wrong on a GPU. The same on all ranks."""
    from seatrial.bench import rank

    spent_s = max(rank.gather(sum(each.seconds for each in rounds)))
    wrong = context.on_gpu and any(
        any(each.wrong_results(rounds[0]).values()) or each.relative_error > 1 for each in rounds
    )
    return any(rank.gather(wrong)) or (len(rounds) >= MIN_ROUNDS and spent_s >= options.budget_s)


def _run_round(context: Context, options: SoakOptions, device: str, load: GpuLoad | None, steps: int) -> Round:
    """One round. ``steps``: of the training; 0 in the first round, which finds their number."""
    from seatrial.bench import collectives, compute, memory, rank
    from seatrial.bench.operations import OPERATIONS
    from seatrial.telemetry import error_counts
    from seatrial.train import ddp

    started = time.perf_counter()
    if load:
        load.samples.clear()
    dtype = next(dtype for dtype in DTYPES if compute.unsupported_reason(dtype, context.device) is None)
    size, array, message = (
        (GPU_MATRIX_SIZE, GPU_ARRAY_BYTES, GPU_MESSAGE_BYTES)
        if context.on_gpu
        else (CPU_MATRIX_SIZE, CPU_ARRAY_BYTES, CPU_MESSAGE_BYTES)
    )
    speeds: dict[str, float] = {}
    wrong_elements = 0
    with error_counts.count_errors(context.nvml_index, ports=False) as counts:
        burn = compute.burn(dtype, size, context.device, PRODUCTS_SHARE * options.round_s)
        speeds["products"] = compute.flops(size) / fmean(burn.timing.windows) / 1e12
        copy = memory.time_copy(array, context.device, COPY_SHARE * options.round_s)
        speeds["copy"] = copy.rate(2 * array / 1e9)
        load_s = sum(sum(timing.windows) * timing.per_window for timing in (burn.timing, copy))
        rank.release_memory(context.device)
        pattern_started = time.perf_counter()
        patterns = memory.run_pattern_test(bytes_to_test(context, TESTED_SHARE), context.device)
        load_s += time.perf_counter() - pattern_started
        rank.release_memory(context.device)
        if context.world_size > 1:
            operation, seconds = OPERATIONS["all_reduce"], ALL_REDUCE_SHARE * options.round_s
            result = collectives.measure_back_to_back(operation, message, "float32", context.device, seconds, seconds)
            busbw = operation.busbw_factor(context.world_size) * result.size / 1e9
            speeds["all_reduce"] = busbw / median(result.timings.window_means)
            load_s += sum(result.timings.window_maxima) * result.timings.per_window
            mismatch = result.mismatches.get(context.rank)
            wrong_elements = mismatch.wrong if mismatch else 0
        training = ddp.train_alone(context.device, context.on_gpu, TRAINING_SHARE * options.round_s, steps)
        speeds["training"] = training.tokens / sum(step.seconds for step in training.steps)
        load_s += sum(step.seconds for step in training.steps)
        gc.collect()  # models contain reference cycles
        rank.release_memory(context.device)
    losses = [(step.loss, step.grad_norm) for step in training.steps]
    is_finite = all(step.finite for step in training.steps)
    samples = list(load.samples) if load else []
    if load and load.reader.gpu_lost:
        raise SeatrialError(f"{context.subject} was lost under load: {load.reader.gpu_lost}")
    reasons = [sample.clocks_event_reasons for sample in samples if sample.clocks_event_reasons is not None]
    return Round(
        device=device,
        seconds=time.perf_counter() - started,
        load_s=load_s,
        speeds=speeds,
        changed_products=burn.changed_products,
        relative_error=burn.error / MAX_RELATIVE_ERROR[dtype],
        wrong_words=sum(error.words for error in patterns.errors),
        wrong_elements=wrong_elements,
        losses=hashlib.sha256(repr(losses).encode()).hexdigest() if is_finite else "",
        steps=len(training.steps),
        temperature_c=max((each.temperature_c for each in samples if each.temperature_c is not None), default=None),
        throttled=(sum(not set(THROTTLE_REASONS).isdisjoint(each) for each in reasons), len(reasons)),
        errors=_errors_by_level(counts),
    )


def _errors_by_level(counts: ErrorCounts) -> dict[str, int]:
    """The new errors of the GPU: by the level of their counters, Xids by their own level; no counter of a rate."""
    errors = {"FAIL": 0, "WARN": 0, "info": 0}
    definitions = counter_definitions()
    if counters := counts.gpu_counters:
        for name in GPU_COUNTERS:
            if name != "xid" and not definitions.gpu[name].per_minute:
                errors[definitions.gpu[name].level] += counters.increase(name) or 0
        for xid in counters.xids:
            errors[definitions.for_xid(xid).level] += 1
    return errors


def _results(rounds: Sequence[Round], earlier: int) -> Answers:
    wrong = [each.wrong_results(rounds[0]) for each in rounds]
    counts = {name: [each[name] for each in wrong] for name in wrong[0]} | {
        "errors_before_resume": [each.errors["FAIL"] for each in rounds[:earlier]],
        "warnings_before_resume": [each.errors["WARN"] for each in rounds[:earlier]],
    }
    for name, numbers in counts.items():
        if name == "wrong_elements" and "all_reduce" not in rounds[0].speeds:
            yield absent(name, "one rank has no collectives")
        else:
            yield value(name, sum(numbers), evidence=_bad_rounds(numbers))
    # without samples: one wrong result is enough
    errors = [round(each.relative_error, 3) for each in rounds]
    yield value("relative_error", max(each.relative_error for each in rounds), evidence={"by round": errors})


def _bad_rounds(numbers: Sequence[int]) -> dict[str, JsonValue] | None:
    return {"rounds": [position for position, number in enumerate(numbers, 1) if number]} if any(numbers) else None


def _trends(context: Context, rounds: Sequence[Round]) -> Answers:
    from seatrial.bench.timing import drift

    ends = tuple(sum(each.load_s for each in rounds[: number + 1]) / 3600 for number in range(len(rounds)))
    for name, unit in SPEEDS.items():
        if name not in rounds[0].speeds:
            yield absent(f"drift.{name}", "one rank has no collectives")
            continue
        rates = tuple(each.speeds[name] for each in rounds)
        yield value(f"drift.{name}", 100 * drift([1 / rate for rate in rates]))
        yield Series(name=name, subject=context.subject, x=ends, y=rates, x_unit="h", y_unit=unit)


def _heat(rounds: Sequence[Round], load: GpuLoad) -> Answers:
    temperatures = [each.temperature_c for each in rounds if each.temperature_c is not None]
    throttled, samples = (sum(each.throttled[index] for each in rounds) for index in (0, 1))
    if temperatures:
        yield value("temperature_max", max(temperatures))
    else:
        yield no_value("temperature_max", "temperature_c", load.reader)
    if samples:
        evidence = _bad_rounds([each.throttled[0] for each in rounds])
        yield value("throttled_share", 100 * throttled / samples, evidence=evidence)
    else:
        yield no_value("throttled_share", "clocks_event_reasons", load.reader)


_REPLACE = "dcgmi diag -r 4 -i INDEX; run device.digests; if results still differ, replace the GPU"
_rank_metric, _rank_warning = partial(metric, per="rank"), partial(warning, per="rank")
CHECK = Check(
    name="device.soak",
    title="Hours of load in rounds: repeated results, trends, heat",
    phase=Phase.DEVICE,
    scope=Scope.CLUSTER,
    measure=measure,
    declared=(
        _rank_metric(
            "changed_losses",
            "== 0 rounds",
            "The same training gave other loss bits than in the first round, or losses that are not finite: silent "
            "data corruption.",
            _REPLACE,
            when="backend == cuda",  # CPU libraries may change the order of summation
        ),
        _rank_metric(
            "changed_products",
            "== 0 products",
            "The same matrix product gave different bits under load.",
            _REPLACE,
            when="backend == cuda",
        ),
        _rank_metric(
            "relative_error",
            "<= 1 ratio",
            "The error of a matrix product is above 1 × the limit of device.gemm: wrong results under load.",
            _REPLACE,
        ),
        _rank_metric(
            "wrong_words",
            "== 0 words",
            "Memory words read back differ from the words written.",
            "nvidia-smi -q -d ECC,ROW_REMAPPER -i INDEX; reset the GPU to remap bad rows; if errors return, replace it",
        ),
        _rank_metric(
            "wrong_elements",
            "== 0 elements",
            "Elements of an all-reduce on this rank differ from the exact sum.",
            "Run collectives.all_reduce and device.digests; check NVLink and port errors of this node",
        ),
        _rank_metric(
            "errors_before_resume",
            "== 0 errors",
            "Error counters of the GPU increased in rounds before the run was interrupted (after it: new_errors).",
            "nvidia-smi -q -d ECC,ROW_REMAPPER,PCIE -i INDEX; journalctl -k | grep -i xid",
        ),
        _rank_warning(
            "warnings_before_resume",
            "== 0 errors",
            "Counters of corrected errors of the GPU increased in rounds before the run was interrupted.",
            "nvidia-smi -q -d ECC,ROW_REMAPPER -i INDEX; nvidia-smi nvlink -e -i INDEX",
        ),
        *(
            _rank_metric(
                f"drift.{name}",
                "<= 10 %",
                "The last third of the rounds was slower than the first.",
                COOLING,
                warn="<= 5 %",
                when="backend == cuda",
                signed=True,
                may_exceed_100=True,
            )
            for name in SPEEDS
        ),
        _rank_metric(
            "temperature_max",
            "<= 105 °C",
            "highest GPU temperature of all rounds",
            COOLING,
            when="backend == cuda",
        ),
        _rank_metric(
            "throttled_share",
            "<= 0 %",
            "clocks reduced by hardware or temperature in this share of the samples",
            COOLING,
        ),
    ),
    limit_s=600.0,
    options=SoakOptions,
    measured_s=_measured_s,
)
