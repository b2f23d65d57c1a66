"""Computes data/noise.yaml: the spread of each speed between runs of one machine, for `seatrial compare`.

    python tools/noise.py [--check]

``--check`` exits with 1 if the file is not what the records give. Samples inside one record say nothing about this
spread: the clock, the temperature and the load of the host differ between runs more than within one.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.records import ROOT, record_path

from seatrial.handover.compare import Noise, NoiseData, pooled
from seatrial.handover.side import Speed, speed_values
from seatrial.model import Trial
from seatrial.pipeline.run_directory import load_trial
from seatrial.report.identity import gpus_of

FILE = Path(__file__).parents[1] / "src" / "seatrial" / "data" / "noise.yaml"
REPEATS = ROOT / "tests" / "fixtures" / "records" / "2026-11-29-1xh200-repeats"  # no input of the guard
# Healthy runs of one machine, of one build of seatrial and on the same GPUs, one after the other
GROUPS: tuple[tuple[Path, ...], ...] = (
    tuple(sorted(REPEATS.glob("*.json.gz"))),
    *(
        tuple(record_path(f"{folder}/{name}") for name in names.split())
        for folder, names in (
            ("2026-11-21-2xh200", "acceptance repeat"),
            ("2026-11-21-4xh200", "repeat-1 repeat-2"),
            ("2026-11-22-2xh200", "transfer-host-1 transfer-host-2"),
            ("2026-11-22-2xh200-restructured", "before-quick before-acceptance"),
            ("2026-11-22-2xh200-restructured", "final-quick final-acceptance"),
            ("2026-11-22-4xh200", "fabric-1 acceptance fabric-2"),
            ("2026-11-23-1xh200", "quick acceptance"),
            ("2026-11-23-1xh200-second", "quick acceptance"),
            ("2026-11-23-1xh200-third", "quick acceptance readmit"),
            ("2026-11-23-1xh200-fourth", "quick acceptance"),
            ("2026-11-23-2xh200", "quick-1 acceptance"),
            ("2026-11-23-slurm-1xh200", "acceptance quick"),
            ("2026-11-28-1xh100", "acceptance quick"),
            ("2026-11-28-2xh200-second", "quick acceptance"),
            ("2026-11-28-4xh100", "acceptance quick"),
        )
    ),
)
HEAD = """\
# The relative standard deviation of each speed between runs of one machine, for `seatrial compare`: made by
# tools/noise.py from the records named there. freedom: degrees of freedom, see `pooled` in handover/compare.py.
"""


def noise(groups: Iterable[Sequence[Trial]]) -> dict[str, Noise]:
    """Check and metric → its spread, pooled over the groups; each group has records of one machine."""
    tables: dict[Speed, list[list[list[float]]]] = defaultdict(list)
    for trials in groups:
        rows: dict[tuple[Speed, str], list[dict[str, float]]] = defaultdict(list)
        for trial in trials:
            for speed, by_part in speed_values(trial).items():
                rows[speed, repr(trial.config["checks"][speed[0]].get("options"))].append(by_part)
        for (speed, _options), of_runs in rows.items():
            parts = [part for part in of_runs[0] if all(each.get(part, 0) > 0 for each in of_runs)]
            tables[speed].append([[each[part] for part in parts] for each in of_runs])
    found: dict[str, Noise] = {}
    for speed, of_groups in sorted(tables.items()):
        if pool := pooled(of_groups):
            found[" ".join(speed[:2])] = pool.model_copy(update={"spread": float(f"{pool.spread:.3g}")})
    return found


def data() -> NoiseData:
    """The content of the file. Raises ValueError for a group with different GPUs."""
    loaded = [[load_trial(path) for path in group] for group in GROUPS]
    for group in loaded:
        if len({tuple(sorted(gpu.uuid for gpu in gpus_of(trial).values())) for trial in group}) > 1:
            raise ValueError(f"not one machine: {[trial.command for trial in group]}")
    counts = f"{len(loaded[0])} of 1×H200, {sum(map(len, loaded[1:]))} of {len(loaded) - 1} other machines"
    return NoiseData(source=f"repeated runs of one machine ({counts})", speeds=noise(loaded))


def text() -> str:
    content = data()
    lines = [f"source: {content.source}", "speeds:"]
    for name, each in content.speeds.items():
        lines.append(f"  {name}: {yaml.safe_dump(each.model_dump(), default_flow_style=True, sort_keys=False).strip()}")
    return HEAD + "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args(arguments).check:
        return int(text() != FILE.read_text(encoding="utf-8"))
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
