"""A rank reads prepared data that another job is just rewriting."""

from __future__ import annotations

from seatrial.drill.base import Drill, DrillTrial, Expected
from seatrial.drill.faults import FAULTY_RANK

DRILL = Drill(
    name="dataset-cache-race",
    title=f"the prepared data is incomplete when rank {FAULTY_RANK} reads it, "
    "as if another job wrote it at that moment",
    machine="cpu",
    trial=DrillTrial(checks={"train.fsdp": {"hf": False}}),
    expected=Expected(
        check="train.fsdp",
        cause="data.cache_incomplete",
        place=r"/train\.fsdp/native/data/blocks-[0-9a-f]+",  # every rank that reads the file afterwards fails
        command=r"ls -la \S* ?\S+/data/blocks-[0-9a-f]+; findmnt",
        action="fix-config",
    ),
    fault="truncated_cache",
)
