"""Mutates accepted records and counts those that stay ACCEPTED although evidence was lost or contradicts itself.

    python benchmarks/mutations.py [--json FILE]

A mutation deletes the value of one subject, all values of one rank, the measurement of one rank, one fact or one entry
of a fact; changes a fact on which rules depend, so that it contradicts the values; or gives a GPU the UUID of another.
It is *hidden* if the trial stays ACCEPTED with fewer met limits, or with fewer measured ranks, than before. Makes all
mutations of all accepted records. Prints each hidden mutation once by check, kind and name. Exits with 1 if any is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import Literal, get_args

sys.path.insert(0, str(Path(__file__).parents[1]))
from pydantic import JsonValue
from tests.pipeline.mutations import evidence
from tools.records import record_path, record_paths

from seatrial.model import DecisionValue, Measurement, Trial
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial

Kind = Literal[
    "value",
    "values of a rank",
    "measurement of a rank",
    "fact",
    "entry of a fact",
    "other fact",
    "one UUID",
    "other UUID",
]
# (check, fact): nothing else in the record states it: the scheduler, whether the node has GPUs; the trial, whether
# sockets are expected; the training, whether it offloads
ONLY_WITNESS = {
    ("host.load", "gpu_node"),
    ("collectives.transport", "sockets_expected"),
    ("train.throughput", "cpu_offload"),
    ("train.fsdp", "cpu_offload"),
}
KINDS: tuple[Kind, ...] = get_args(Kind)
QUICK = ("2026-11-28-2xh200-second/quick", "2026-11-28-4xh100/quick", "2026-11-28-slurm-2xh100/quick")


@dataclass(frozen=True)
class Mutation:
    """One mutation: ``name`` is that of the metric or fact; empty for all of a rank."""

    record: str
    kind: Kind
    check: str
    subject: str
    name: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.check, self.kind, self.name


@dataclass(frozen=True)
class Record:
    """A record, judged by this version: whether it is accepted, and its evidence."""

    name: str
    trial: Trial
    is_accepted: bool
    evidence: Counter[tuple[object, ...]]

    @classmethod
    def load(cls, name: str) -> Record:
        trial = load_trial(record_path(name)).model_copy(update={"telemetry": None, "sessions": ()})
        judged = rejudge(trial)
        return cls(name, trial, judged.decision.value is DecisionValue.ACCEPTED, evidence(judged))

    def is_hidden(self, mutation: Mutation) -> bool:
        """Whether the trial stays ACCEPTED with this mutation and less evidence."""
        judged = rejudge(mutated(self.trial, mutation))
        if judged.decision.value is not DecisionValue.ACCEPTED:
            return False
        return mutation.kind in ("one UUID", "other UUID") or bool(self.evidence - evidence(judged))

    def mutations(self) -> dict[Kind, list[Mutation]]:
        """All mutations by kind."""
        found: dict[Kind, list[Mutation]] = defaultdict(list)

        def add(kind: Kind, measurement: Measurement, subject: str, name: str = "") -> None:
            found[kind].append(Mutation(self.name, kind, measurement.check, subject, name))

        for measurement in self.trial.measurements:
            if measurement.skipped:
                continue
            add("measurement of a rank", measurement, measurement.subject)
            if measurement.metrics:
                add("values of a rank", measurement, measurement.subject)
            for metric in measurement.metrics:
                add("value", measurement, metric.subject, metric.name)
            for name, value in measurement.facts.items():
                add("fact", measurement, measurement.subject, name)
                for entry in value if isinstance(value, dict) else ():
                    add("entry of a fact", measurement, measurement.subject, f"{name}/{entry}")
                if other_value(value) is not None and (measurement.check, name) not in ONLY_WITNESS:
                    add("other fact", measurement, measurement.subject, name)
            if len(_gpus(measurement)) > 1:
                add("one UUID", measurement, measurement.subject, "gpus")
            if measurement.gpu_uuid:
                add("other UUID", measurement, measurement.subject)
        return found


def mutated(trial: Trial, mutation: Mutation) -> Trial:
    """The trial with the mutation."""
    measurements: list[Measurement] = []
    for measurement in trial.measurements:
        if measurement.check != mutation.check:
            measurements.append(measurement)
        elif mutation.kind == "value":
            kept = tuple(
                each for each in measurement.metrics if (each.subject, each.name) != (mutation.subject, mutation.name)
            )
            measurements.append(measurement.model_copy(update={"metrics": kept}))
        elif measurement.subject != mutation.subject:
            measurements.append(measurement)
        elif mutation.kind != "measurement of a rank":
            measurements.append(measurement.model_copy(update=_changes(measurement, mutation)))
    return trial.model_copy(update={"measurements": tuple(measurements)})


def _changes(measurement: Measurement, mutation: Mutation) -> dict[str, object]:
    if mutation.kind == "values of a rank":
        return {"metrics": ()}
    if mutation.kind == "other UUID":
        return {"gpu_uuid": "GPU-of-another-machine"}
    facts = dict(measurement.facts)
    name, _, entry = mutation.name.partition("/")
    if mutation.kind == "fact":
        del facts[mutation.name]
    elif mutation.kind == "entry of a fact" and isinstance(fact := facts[name], dict):
        facts[name] = {key: value for key, value in fact.items() if key != entry}
    elif mutation.kind == "other fact":
        facts[mutation.name] = other_value(facts[mutation.name])
    else:
        first, second, *others = _gpus(measurement)
        facts["gpus"] = [first, {**second, "uuid": first.get("uuid")}, *others]
    return {"facts": facts}


def other_value(value: JsonValue) -> JsonValue:
    """Another value of a fact on which rules depend; None for facts of other kinds."""
    swapped = {"yes": "no", "no": "yes", "cuda": "cpu", "nccl": "gloo"}
    if isinstance(value, str):
        return swapped.get(value)
    return value + 1 if type(value) is int and 0 < value < 1000 else None


def _gpus(measurement: Measurement) -> list[dict[str, JsonValue]]:
    gpus = measurement.facts.get("gpus")
    return [each for each in gpus if isinstance(each, dict)] if isinstance(gpus, list) else []


def hidden_mutations(count: int, seed: int, names: Sequence[str], kinds: Sequence[Kind] = KINDS) -> Iterator[Mutation]:
    """Yield the hidden ones of ``count`` random mutations, as many of each kind."""
    random, records = Random(seed), [Record.load(name) for name in names]
    by_record = {record.name: record.mutations() for record in records}
    for number in range(count):
        record, kind = random.choice(records), kinds[number % len(kinds)]
        if (choices := by_record[record.name].get(kind)) and record.is_hidden(mutation := random.choice(choices)):
            yield mutation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found, count, accepted = Counter[tuple[str, str, str]](), 0, 0
    for record in filter(lambda record: record.is_accepted, map(Record.load, record_paths())):
        accepted += 1
        for mutation in chain.from_iterable(record.mutations().values()):
            count += 1
            if record.is_hidden(mutation):
                found[mutation.key] += 1
                if found[mutation.key] == 1:
                    print(f"ACCEPTED: {mutation}", flush=True)
    print(f"{count:,} mutations of {accepted} records, {sum(found.values()):,} hidden")
    if options.json:
        hidden = [
            {"check": check, "kind": kind, "name": name, "records": found[check, kind, name]}
            for check, kind, name in sorted(found)
        ]
        result = {"mutations": count, "records": accepted, "hidden": sum(found.values()), "examples": hidden}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
