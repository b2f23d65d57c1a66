"""A child process that imports the training code and waits for its task: ``python -m seatrial.train.spare_child KEY``.

See bench/spare_children.py.
"""

from __future__ import annotations

import sys

from seatrial.bench import spare_children
from seatrial.util.gc_pause import gc_paused

if __name__ == "__main__":
    with gc_paused():
        from seatrial.train import loop  # noqa: F401 - all that a training imports
    spare_children.run_task(sys.argv[1])
