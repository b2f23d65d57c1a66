"""host.versions: components that are older than the first version without known serious vulnerabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seatrial.checks.check import Check, Context, Options, facts
from seatrial.checks.declare import Answer, Answers, absent, value, warning
from seatrial.hardware.minimum_versions import MinimumVersions, UnknownVersionError, minimum_versions
from seatrial.model import Phase, Scope

if TYPE_CHECKING:
    from seatrial.discover.versions import InstalledVersions


def measure(context: Context, _options: Options) -> Answers:
    """Yield the versions of the components, and for each component whether a version is older than its minimum."""
    from seatrial.discover import settings, versions

    context.progress("reading versions")
    installed = versions.read(context.root)
    texts = {name: [] if isinstance(found, str) else [*map(str, found)] for name, found in installed.items()}
    yield from facts({"versions": texts})
    if not settings.is_gpu_node(context.root):
        yield absent("*", "no NVIDIA GPU on this machine")
        return
    for name, minimum in minimum_versions().items():
        yield _outdated(f"{name}_outdated", installed[name], minimum)


def _outdated(name: str, installed: InstalledVersions, minimum: MinimumVersions) -> Answer:
    """Whether a version is older than its minimum; absent if no version could be compared."""
    if isinstance(installed, str):
        return absent(name, installed)
    outdated: list[str] = []
    reasons: list[str] = []  # why versions could not be compared
    for version in installed:
        try:
            if minimum.models and version.model not in minimum.models:
                raise UnknownVersionError(f"model {version.model or 'unknown'} is not listed")
            if required := minimum.minimum_for(version.version):
                outdated.append(f"{version} is older than {required}")
        except UnknownVersionError as error:
            reasons.append(str(error))
    if len(reasons) == len(installed):
        return absent(name, "; ".join(dict.fromkeys(reasons)))
    return value(name, bool(outdated), evidence=outdated)


CHECK = Check(
    name="host.versions",
    title="Versions without known serious vulnerabilities",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    measure=measure,
    limit_s=60,
    declared=tuple(
        warning(
            f"{name}_outdated",
            "no",
            f"{minimum.title} is older than the first fixed version: {minimum.risk}. "
            f"{', '.join(minimum.advisories)}, {minimum.published}.",
            f"{minimum.fix}. Advisory: {minimum.source}",
        )
        for name, minimum in minimum_versions().items()
    ),
)
