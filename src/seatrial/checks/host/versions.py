"""host.versions: components that are older than the first version without known serious vulnerabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from seatrial.checks.check import Check, Context, Options, facts
from seatrial.checks.declare import Answers, absent, value, warning
from seatrial.hardware.minimum_versions import MinimumVersions, UnknownVersionError, minimum_versions
from seatrial.model import Phase, Scope

if TYPE_CHECKING:
    from seatrial.discover.versions import ComponentVersions, InstalledVersion


def measure(context: Context, _options: Options) -> Answers:
    """Yield the versions of the components, and for each component whether a version is older than its minimum."""
    from seatrial.discover import settings, versions

    context.progress("reading versions")
    installed = versions.read(context.root)
    yield from facts({"versions": {name: _version_texts(component.versions) for name, component in installed.items()}})
    if not settings.is_gpu_node(context.root):
        yield absent("*", "no NVIDIA GPU on this machine")
        return
    for name, minimum in minimum_versions().items():
        outdated, unknown_reason = compare(installed[name], minimum)
        if unknown_reason:
            yield absent(f"{name}_outdated", unknown_reason)
        else:
            yield value(f"{name}_outdated", bool(outdated), evidence=outdated)


def compare(installed: ComponentVersions, minimum: MinimumVersions) -> tuple[list[str], str]:
    """Return the outdated versions as texts, and why no version could be compared ("" if at least one was compared)."""
    if installed.reason:
        return [], installed.reason
    any_compared = False
    outdated: list[str] = []
    not_compared_reasons: list[str] = []
    for version in installed.versions:
        if minimum.models and version.model not in minimum.models:
            not_compared_reasons.append(f"model {version.model or 'unknown'} is not listed")
            continue
        try:
            required = minimum.minimum_for(version.version)
        except UnknownVersionError as error:
            not_compared_reasons.append(str(error))
            continue
        any_compared = True
        if required:
            outdated += [f"{text} is older than {required}" for text in _version_texts([version])]
    return outdated, "" if any_compared else "; ".join(dict.fromkeys(not_compared_reasons))


def _version_texts(installed: Sequence[InstalledVersion]) -> list[str]:
    return [f"{version.place} {version.model} {version.version}".strip() for version in installed]


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
