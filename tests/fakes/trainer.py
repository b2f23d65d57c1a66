"""A command for train.command: ``python trainer.py OUT [FAULT]`` writes a log, a trainer_state.json and weights.

FAULT: exit, signal, hang, silent, flat, nan, short, no-weights, full or ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STEPS = 6


def main(out: Path, fault: str) -> None:
    print(f"visible: {os.environ.get('CUDA_VISIBLE_DEVICES')} rank: {os.environ.get('RANK')}", flush=True)
    if fault == "exit":
        sys.exit("RuntimeError: CUDA error: no kernel image is available")
    if fault == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "full":
        sys.exit("OSError: [Errno 28] No space left on device")
    if fault == "hang":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (out / "child.pid").write_text(str(child.pid))
        time.sleep(600)
    history = []
    for step in range(1, STEPS + 1 - (fault == "short")):
        loss = 5.0 if fault == "flat" else 6.0 - step / 2
        grad_norm = float("nan") if fault == "nan" and step == 3 else 1.0
        history.append({"step": step, "loss": loss, "grad_norm": grad_norm})
        if fault != "silent":
            for _rank in range(2 if fault == "ranks" else 1):
                print(f"step {step} loss {loss:.3f} grad {grad_norm} tok/s {1000 + step:,}", flush=True)
    end = {"step": len(history), "train_runtime": 2.0, "train_loss": 4.0, "train_samples_per_second": 12.5}
    state = {"global_step": len(history), "max_steps": STEPS, "log_history": [*history, end]}
    (out / "trained").mkdir()
    (out / "trained" / "trainer_state.json").write_text(json.dumps(state))
    (out / "trained" / "model.bin").write_bytes(b"" if fault == "no-weights" else b"weights")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
