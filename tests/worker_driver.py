"""A worker process on a fake GPU: ``worker_driver.py RUN/jobs/JOB/job.json ATTEMPT``.

NVML is a fake whose second GPU counts an uncorrectable error during the check; torch is not asked for a device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from seatrial import worker
from seatrial.checks import catalog
from seatrial.checks.declare import Answer, metric, value
from seatrial.model import Job
from tests.fakes.nvml_under_load import BeforeAfter, gpu_under_load, nvml_with_events

ERRORS = BeforeAfter(0, 1)


def measure(context: Any, _options: Any) -> Iterator[Answer]:
    ERRORS.now = ERRORS.after
    yield value("gb_s", 1, context.subject)
    if context.run_dir.name == "broken":
        raise RuntimeError("on purpose")


def main() -> None:
    path, attempt = Path(sys.argv[1]), sys.argv[2]
    job = Job.model_validate_json(path.read_text(encoding="utf-8"))
    sys.modules["pynvml"] = nvml_with_events(gpu_under_load(nvmlDeviceGetTotalEccErrors=ERRORS))  # type: ignore[assignment]
    measured = metric("gb_s", unit="GB/s")
    checks = {
        name: replace(catalog()[name], measure=measure, declared=(*catalog()[name].declared, measured))
        for name in job.checks
    }
    worker.catalog = lambda: checks  # type: ignore[assignment, attr-defined]
    worker._open_device = lambda *_: (job.device, 1, "GPU-1") if job.device == "cuda" else (job.device, None, "")
    worker.run_checks(job, path.parents[2], path.parent / f"attempt{attempt}")


if __name__ == "__main__":
    main()
