"""The time of a log line, to order the lines of several logs."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
# kubectl logs --prefix puts the names of pod and container before the time
_PREFIX = r"^(?:\[pod/[^\]\n]{1,150}\] )?[^\n]{0,80}?"
_CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d{1,9}))?"
_FORMATS = (
    # ISO 8601 (Slurm, journalctl, dmesg --time-format=iso, Python's logging, NCCL 2.30, kubectl, docker), Go's log
    re.compile(
        _PREFIX
        + r"(?P<year>\d{4})(?P<sep>[-/])(?P<month>\d\d)(?P=sep)(?P<day>\d\d)[T ]"
        + _CLOCK
        + r"(?P<zone>Z|[+-]\d\d:?\d\d)?"
    ),
    # syslog, journalctl -o short, dmesg -T
    re.compile(
        _PREFIX + rf"\b(?P<name>{'|'.join(_MONTHS)}) {{1,2}}(?P<day>\d{{1,2}}) " + _CLOCK + r"(?: (?P<year>\d{4}))?"
    ),
    # glog: PyTorch writes months of one digit, Kubernetes of two
    re.compile(_PREFIX + r"\b[IWEF](?P<month>\d{1,2}?)(?P<day>\d\d) " + _CLOCK),
    # journalctl -o short-unix and -o export
    re.compile(r"^(?P<unix>\d{10})\.\d{6} |^__REALTIME_TIMESTAMP=(?P<unix2>\d{10})\d{6}$"),
)
_DAY_S = 86400.0


def log_time(line: str) -> float | None:
    """The time in ``line``, in Unix seconds; None if the line has none, or has only seconds since boot (dmesg).

    A time without a zone counts as UTC. A time without a year is of this year, or of the previous year if it would be
    more than a day in the future.
    """
    for pattern in _FORMATS:
        if match := pattern.search(line):
            parts = match.groupdict()
            if seconds := parts.get("unix") or parts.get("unix2"):
                return float(seconds)
            return _calendar_time(parts)
    return None


def _calendar_time(parts: dict[str, str | None]) -> float | None:
    now = datetime.now(UTC)
    month = int(parts["month"] or 0) if "month" in parts else _MONTHS.index(parts["name"] or "") + 1
    day, hour, minute, second = (int(parts[name] or 0) for name in ("day", "h", "m", "s"))
    fraction = float(f"0.{parts['f']}") if parts["f"] else 0.0
    year = parts.get("year")
    try:
        seconds = datetime(int(year or now.year), month, day, hour, minute, second, tzinfo=UTC).timestamp()
        if not year and seconds > now.timestamp() + _DAY_S:
            seconds = datetime(now.year - 1, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError:  # no date, such as 29 February of another year
        return None
    return seconds + fraction - _zone_offset(parts.get("zone"))


def _zone_offset(zone: str | None) -> float:
    if not zone or zone == "Z":
        return 0.0
    hours, minutes = int(zone[1:3]), int(zone[-2:])
    return (1 if zone[0] == "+" else -1) * (3600.0 * hours + 60.0 * minutes)
