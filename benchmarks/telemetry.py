"""Does the sampler change what it watches? Trials without and with telemetry, in turn; medians compared.

    python benchmarks/telemetry.py --gpus-per-node 4 --pairs 3

Prints a line for each figure and exits with 1 where one of all-reduce from 64 MiB on, or of training, moved by 1 % or
more. ``noise`` is how far the runs without telemetry lie apart: a change below it says nothing. Smaller messages are
shown, and judge nobody: the launch of each operation from Python bounds them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from seatrial.model import CLUSTER, Trial, parse_bytes

MOST = 0.01  # the change that is allowed
LEAST_BYTES = 64 * 2**20
CHECKS = ("collectives.all_reduce", "train.ddp")
Figures = dict[str, float]


def figures(trial: Trial) -> Figures:
    """What the trial measured of throughput: a higher value is better in all of them."""
    metrics = [metric for one in trial.measurements if one.check in CHECKS for metric in one.metrics]
    wanted = [m for m in metrics if m.subject == CLUSTER and m.name.startswith(("busbw.", "tokens_per_second_per_gpu"))]
    return {metric.name: metric.value for metric in wanted}


def judged(name: str) -> bool:
    return not name.startswith("busbw.") or parse_bytes(name.removeprefix("busbw.")) >= LEAST_BYTES


def run(folder: Path, enabled: bool, arguments: list[str]) -> Trial:
    only = [word for check in CHECKS for word in ("--only", check)]
    switch = ["--set", f"telemetry.enabled={str(enabled).lower()}"]
    program = [sys.executable, "-m", "seatrial", "run", "quick", *only, *switch, "--out", str(folder), *arguments]
    subprocess.run(program, check=False, stdout=subprocess.DEVNULL)  # INCOMPLETE, since --only leaves checks out
    return Trial.model_validate_json((folder / "trial.json").read_text(encoding="utf-8"))


def compare(off: list[Figures], on: list[Figures]) -> bool:
    """Print the table; whether no figure that is judged has moved too far."""
    print(f"{'figure':<28} {'without':>12} {'with':>12} {'change':>8} {'noise':>7}")
    good = bool(off and on and off[0])
    for name in off[0]:
        without, with_it = ([one[name] for one in runs if name in one] for runs in (off, on))
        if len(without) < len(off) or len(with_it) < len(on):
            print(f"{name:<28} not measured in every run")
            good = False
            continue
        change = median(with_it) / median(without) - 1
        noise = (max(without) - min(without)) / median(without)
        far = judged(name) and abs(change) >= MOST
        remark = " TOO FAR" if far else "" if judged(name) else " not judged"
        print(f"{name:<28} {median(without):12.2f} {median(with_it):12.2f} {change:+8.2%} {noise:7.2%}{remark}")
        good = good and not far
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="trials without, and as many with telemetry")
    parser.add_argument("--out", type=Path, help="keep the runs here")
    options, arguments = parser.parse_known_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="seatrial-telemetry-"))
    trials: dict[bool, list[Trial]] = {False: [], True: []}
    for number in range(options.pairs):
        for enabled in (False, True):
            name = f"{number}-{'on' if enabled else 'off'}"
            print(f"{name} …", file=sys.stderr)
            trials[enabled].append(run(folder / name, enabled, arguments))
    good = compare(*([figures(trial) for trial in trials[enabled]] for enabled in (False, True)))
    shares = [trial.telemetry.cpu_share for trial in trials[True] if trial.telemetry]
    known = [share for share in shares if share is not None]
    print(f"sampler: {max(known):.2%} of one core" if known else "sampler: its own cost is not known")
    print(f"runs: {folder}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
