"""The rank that wrote a log line, from the prefixes of torchrun, srun, mpirun and launchers, or the name of the log."""

from __future__ import annotations

import re

_IN_LINE = re.compile(
    r"\[(?:rank|Rank |RANK:|PG (?:ID )?\d{1,5} (?:PG GUID \S{1,60} )?Rank )(?P<torch>\d{1,6})\]"
    r"|^\[\d{1,6},(?P<mpirun>\d{1,6})\]<std(?:out|err)>:"
    r"|^ {0,6}(?P<srun>\d{1,6}): "
)
# rank3.log, rank_3.err, torchrun's attempt_0/3/stderr.log, srun --output=%t in slurm-7_3.out
_IN_NAME = re.compile(
    r"rank[-_.]?(?P<name>\d{1,6})(?!\d)[^/]{0,40}$"
    r"|attempt_\d{1,4}/(?P<torchrun>\d{1,6})/std(?:out|err)\.log"
    r"|slurm-\d{1,12}[._](?P<task>\d{1,6})\.(?:out|err)"
)


def line_rank(line: str, source: str) -> int | None:
    """The rank that wrote ``line``, a line of the log ``source`` (path and line number); None if it is not known."""
    match = _IN_LINE.search(line[:200]) or _IN_NAME.search(source.rpartition(":")[0])
    return next((int(rank) for rank in match.groups() if rank), None) if match else None
