"""Compares what the judge says of many records with golden files: outcomes, limits, decisions, findings, insights.

    python tools/guard.py               # all shapes and 2,000 mutations
    python tools/guard.py --groups c d  # the shapes of some groups, without mutations
    python tools/guard.py --write m     # makes the golden file of a group that has none; it rewrites none

A shape is a record or another input of the judge (tests/guard); a mutation is the intent to change one metric of one.
tests/golden/changed-outcomes.yaml lists the differences that are wanted, each with ``key`` (SHAPE: OBSERVATION),
``before``, ``after`` (null: not there) and ``reason``; ``*`` in SHAPE stands for any text. No entry may allow that the
judge becomes laxer (see ``_refusal``), and none may be unused.
tests/test_guard.py compares the shapes, of some groups every third, and every twentieth mutation. Exits with 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, TypeAdapter, model_validator

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.guard.changes import Intent, intents
from tests.guard.observed import Observed, observe
from tests.guard.shapes import GROUPS, shapes

from seatrial.model import Frozen, Trial

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "golden" / "guard"
CHANGED = ROOT / "tests" / "golden" / "changed-outcomes.yaml"
MUTATIONS = "l"  # letter of the group of mutations
MUTATION_COUNT = 2000
# Group → mutations of each of its records, of which MUTATION_COUNT are drawn
_MUTATIONS_PER_SHAPE = {"a": 8, "c": 4, "d": 4, "e": 4, "f": 1, "g": 1, "h": 20, "j": 4}
_BAD = ("FAIL", "ERROR", "UNJUDGED", "REJECTED", "INCOMPLETE", "UsageError", "refused")
_VERDICT_PLACE = re.compile(r"(result \d+ )?verdict \S+ \S+")  # check and subject of a verdict
_EXIT_CODE = re.compile(r"(.* )?exit code [1-9]\d*")
_MAX_SHOWN = 40  # differences
_WHOLE_SHAPE = "shape"  # observation of a shape that is not made any more
Changes = Mapping[str, str | None]  # observation → its value, None if it is not there


class Difference(Frozen):
    """One observation of a shape that differs from the golden file. None: not there."""

    shape: str
    observation: str
    before: str | None
    after: str | None
    refusal: str = ""  # why no entry can allow it

    @property
    def key(self) -> str:
        return f"{self.shape}: {self.observation}"

    def __str__(self) -> str:
        refusal = f"\n  not allowed: {self.refusal}" if self.refusal else ""
        return f"{self.key}\n  before: {self.before}\n  after:  {self.after}{refusal}"


class Entry(Frozen):
    """A wanted difference, as listed in changed-outcomes.yaml."""

    key: str = Field(pattern=rf"^[{''.join(GROUPS)}{MUTATIONS}]/.*: [^*]+$")
    before: str | None
    after: str | None
    reason: str = Field(min_length=1)

    @property
    def _shape_and_observation(self) -> tuple[str, str]:
        shape, _, observation = self.key.rpartition(": ")
        return shape, observation

    @model_validator(mode="after")
    def _is_narrow(self) -> Entry:
        shape, observation = self._shape_and_observation
        if "*" in (self.before, self.after):
            raise ValueError(f"{self.key}: * stands for any text in the name of the shape only")
        if observation == _WHOLE_SHAPE and "*" in shape:
            raise ValueError(f"{self.key}: each shape that is not made any more needs an entry of its own")
        if self.after is not None and (
            refusal := _refusal(observation, self.before, self.after, {}, {"decision": "REJECTED"})
        ):
            raise ValueError(f"{self.key}: {refusal}")
        return self

    def allows(self, difference: Difference) -> bool:
        shape, observation = self._shape_and_observation
        return (
            not difference.refusal
            and (observation, self.before, self.after) == (difference.observation, difference.before, difference.after)
            and re.fullmatch(re.escape(shape).replace(r"\*", ".*"), difference.shape) is not None
        )


class Mutation(Frozen):
    """An intent, and what it changes in the observations of its shape."""

    shape: str
    intent: Intent
    changes: Changes


def _first_word(text: str | None) -> str:
    return re.split(r"[ ,;]", text or "", maxsplit=1)[0]


@dataclass
class Comparison:
    """The differences from the golden files that ``entries`` do not allow, and how often each entry was needed."""

    entries: Sequence[Entry]
    differences: list[Difference] = field(default_factory=list)
    needed: Counter[str] = field(default_factory=Counter)  # key of the entry
    compared: int = 0  # shapes and mutations

    def add(self, shape: str, before: Observed, after: Observed, known: Collection[Changes] = ()) -> Changes:
        """Compare the observations of a shape; return what changed. ``known``: changes that are listed already."""
        self.compared += 1
        changed = changes(before, after)
        for observation, value in changed.items():
            old = before.get(observation)
            refusal = _refusal(observation, old, value, before, after)
            if not refusal and any(observation in each and each[observation] == value for each in known):
                continue
            self.add_difference(
                Difference(shape=shape, observation=observation, before=old, after=value, refusal=refusal)
            )
        return changed

    def add_difference(self, difference: Difference) -> None:
        allowing = [entry for entry in self.entries if entry.allows(difference)]
        self.needed.update(entry.key for entry in allowing)
        if not allowing:
            self.differences.append(difference)

    def unused(self, groups: Collection[str]) -> list[Entry]:
        """The entries for ``groups`` that allow no difference; the group of a key is its first character."""
        return [entry for entry in self.entries if entry.key[0] in groups and not self.needed[entry.key]]


def changes(before: Observed, after: Observed) -> Changes:
    names = dict.fromkeys((*before, *after))
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def _refusal(observation: str, before: str | None, after: str | None, all_before: Observed, all_after: Observed) -> str:
    """Why a difference is never allowed: the judge became laxer; empty if it did not.

    A bad verdict may vanish only if the same check and subject has a new one, or if the record is now refused. A check
    may be measured again less often only if the record is REJECTED.
    """
    if observation.startswith("measured again ") and all_after.get("decision") == "REJECTED":
        return ""
    if observation == "decision" and after == "ACCEPTED":
        return f"the decision {before} became ACCEPTED"
    if not _is_bad(observation, before) or _is_bad(observation, after):
        return ""
    if after is None and ("refused" in all_after or _has_new_verdict(observation, all_before, all_after)):
        return ""
    return f"{observation} was {_first_word(before)}, and is now {_first_word(after) or 'empty or not there'}"


def _is_bad(observation: str, text: str | None) -> bool:
    if observation == "nodes at fault" or observation.startswith("measured again "):
        return bool(text)
    return _first_word(text) in _BAD or _EXIT_CODE.fullmatch(f"{observation} {text}") is not None


def _has_new_verdict(observation: str, before: Observed, after: Observed) -> bool:
    """Whether the check and the subject of a verdict have a bad verdict that they did not have before."""
    place = _VERDICT_PLACE.match(observation)
    return place is not None and any(
        _is_bad(name, value) and not _is_bad(name, before.get(name))
        for name, value in after.items()
        if (other := _VERDICT_PLACE.match(name)) and other.group() == place.group()
    )


def read_entries() -> tuple[Entry, ...]:
    """The entries of changed-outcomes.yaml. Raises ValidationError."""
    return TypeAdapter(tuple[Entry, ...]).validate_python(yaml.safe_load(CHANGED.read_text(encoding="utf-8")) or ())


def compare(groups: Iterable[str], entries: Sequence[Entry], mutation_step: int = 0, shape_step: int = 1) -> Comparison:
    """Compare every ``shape_step``-th shape of ``groups``, and every ``mutation_step``-th mutation; 0: no mutation."""
    comparison = Comparison(entries)
    mutations: dict[str, list[tuple[int, Mutation]]] = {}
    if mutation_step:
        for number, line in enumerate(read(MUTATIONS)):
            if number % mutation_step == 0:
                mutation = Mutation.model_validate(line)
                mutations.setdefault(mutation.shape, []).append((number, mutation))
    for letter in groups:
        golden: dict[str, Observed] = {line["shape"]: line["observed"] for line in read(letter)}
        for position, (name, made) in enumerate(shapes(letter)):
            shape = f"{letter}/{name}"
            if (before := golden.pop(shape, None)) is None or position % shape_step:
                continue  # a record that was added later, or one between two steps
            changed = comparison.add(shape, before, _observed(made))
            for number, mutation in mutations.get(shape, ()):
                assert isinstance(made, Trial)
                intent = mutation.intent
                text = f"{MUTATIONS}/{number} {shape}, {intent.check} {intent.subject} {intent.metric} {intent.kind}"
                after = observe(intent.apply(made))
                comparison.add(text, _patched(before, mutation.changes), after, (changed,))
        for shape in golden:
            lost = Difference(shape=shape, observation=_WHOLE_SHAPE, before="made", after=None)
            comparison.add_difference(lost)
    return comparison


def _observed(made: Trial | Observed) -> Observed:
    return observe(made) if isinstance(made, Trial) else made


def _patched(observed: Observed, changed: Changes) -> Observed:
    return {name: value for name, value in {**observed, **changed}.items() if value is not None}


def write(letter: str) -> None:
    """Make the golden file of a group that has none. Raises FileExistsError if it has one."""
    path = _golden_file(letter)
    if path.exists():
        raise FileExistsError(f"golden files are never rewritten: to make {path.name} anew, delete it by hand")
    lines = (
        _mutations(_drawn_intents())
        if letter == MUTATIONS
        else ({"shape": f"{letter}/{name}", "observed": _observed(made)} for name, made in shapes(letter))
    )
    text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    path.write_bytes(lzma.compress(text.encode(), preset=9))


def _drawn_intents() -> dict[str, list[Intent]]:
    """Shape → the intents of its mutations."""
    possible = [
        (f"{letter}/{name}", intent)
        for letter, count in _MUTATIONS_PER_SHAPE.items()
        for name, made in shapes(letter)
        if isinstance(made, Trial)
        for intent in intents(f"{letter}/{name}", made, count)
    ]
    drawn: dict[str, list[Intent]] = {}
    for shape, intent in random.Random(0).sample(possible, min(MUTATION_COUNT, len(possible))):
        drawn.setdefault(shape, []).append(intent)
    return drawn


def _mutations(chosen: Mapping[str, Sequence[Intent]]) -> Iterator[dict[str, object]]:
    for letter in GROUPS:
        for name, made in shapes(letter):
            shape = f"{letter}/{name}"
            if isinstance(made, Trial) and shape in chosen:
                before = observe(made)
                for intent in chosen[shape]:
                    changed = changes(before, observe(intent.apply(made)))
                    yield Mutation(shape=shape, intent=intent, changes=changed).model_dump()


def read(letter: str) -> Iterator[dict[str, Any]]:
    """The lines of a golden file."""
    with lzma.open(_golden_file(letter), "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def _golden_file(letter: str) -> Path:
    return FOLDER / f"{letter}.jsonl.xz"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, help="only these groups, without mutations")
    parser.add_argument("--write", choices=(*GROUPS, MUTATIONS), help="make the golden file of a group that has none")
    options = parser.parse_args()
    if options.write:
        try:
            write(options.write)
        except FileExistsError as error:
            parser.error(str(error))
        return 0
    comparison = compare(options.groups or GROUPS, read_entries(), mutation_step=0 if options.groups else 1)
    unused = comparison.unused(options.groups or (*GROUPS, MUTATIONS))
    for difference in comparison.differences[:_MAX_SHOWN]:
        print(difference)
    for entry in unused:
        print(f"{CHANGED.name}: no longer needed: {entry.key}")
    for entry in comparison.entries:
        print(f"{comparison.needed[entry.key]} differences allowed by {entry.key}: {entry.reason}")
    print(f"{comparison.compared} shapes and mutations compared, {len(comparison.differences)} differences")
    return 1 if comparison.differences or unused else 0


if __name__ == "__main__":
    sys.exit(main())
