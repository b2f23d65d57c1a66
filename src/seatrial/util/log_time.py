"""The time of a log line, to order the lines of several logs."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_MONTHS = {
    name: number
    for number, name in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1
    )
}
_PREFIX = r"^[^\n]{0,80}?"
# Formats: ISO 8601 (Slurm, journalctl -o short-iso, Python logging, NCCL 2.30), syslog and dmesg -T, glog (PyTorch)
_ISO = re.compile(
    _PREFIX
    + r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[T ](?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_SYSLOG = re.compile(
    _PREFIX + r"\b(?P<name>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(?P<day>\d{1,2}) "
    r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d{1,9}))?(?: (?P<year>\d{4}))?"
)
_GLOG = re.compile(_PREFIX + r"\b[IWEF](?P<month>\d\d)(?P<day>\d\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)\.(?P<f>\d{6})")
_DEFAULT_YEAR = datetime.now(UTC).year


def log_time(line: str) -> float | None:
    """The time of ``line`` in Unix seconds, None if it has none; the default year is the current one, the zone UTC."""
    for pattern in (_ISO, _SYSLOG, _GLOG):
        if match := pattern.search(line):
            parts = match.groupdict()
            month = int(parts["month"]) if "month" in parts else _MONTHS[parts["name"]]
            fraction = float(f"0.{parts['f']}") if parts["f"] else 0.0
            try:
                clock = (int(parts["h"]), int(parts["m"]), int(parts["s"]))
                time = datetime(int(parts.get("year") or _DEFAULT_YEAR), month, int(parts["day"]), *clock, tzinfo=UTC)
            except ValueError:
                return None
            return time.timestamp() + fraction - _zone_offset(parts.get("zone"))
    return None


def _zone_offset(zone: str | None) -> float:
    if not zone or zone == "Z":
        return 0.0
    hours, minutes = int(zone[1:3]), int(zone[-2:])
    return (1 if zone[0] == "+" else -1) * (3600.0 * hours + 60.0 * minutes)
