"""Versions of what training stands on, read from metadata and files: nothing is imported and nothing is run."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from seatrial.discover.file_readers import FieldReader, path_under, printable, read_text
from seatrial.model import Frozen

_RUNTIMES = ("docker", "podman", "nerdctl", "apptainer", "singularity", "enroot", "ctr", "crictl")
# What a training job imports, or what its speed depends on; nvidia-* wheels are added as they are found.
_PACKAGES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "flash-attn",
    "numpy",
    "peft",
    "tokenizers",
    "torch",
    "transformer-engine",
    "transformers",
    "triton",
)


class SoftwareFacts(Frozen):
    """Versions. What is None is not there or could not be read: ``unread`` says which.

    ``cuda`` is what torch was built for, ``nccl`` maps every NCCL that was found to its version: a wheel by its name,
    a library of the system by its path. Which of them torch loads is measured by the collectives, not read here.
    """

    seatrial: str | None
    python: str
    interpreter: str
    torch: str | None
    cuda: str | None
    nccl: dict[str, str]
    driver: str | None
    packages: dict[str, str]
    runtimes: dict[str, str]
    unread: dict[str, str] = {}


def read(root: Path = Path("/")) -> SoftwareFacts:
    attempt = FieldReader()
    packages = attempt("packages", _packages) or {}
    return SoftwareFacts(
        seatrial=attempt("seatrial", lambda: _version("seatrial")),
        python=platform.python_version(),
        interpreter=printable(sys.executable),
        torch=attempt("torch", lambda: _version("torch")),
        cuda=attempt("cuda", torch_cuda_version),
        nccl={name: version for name, version in packages.items() if "nccl" in name} | _system_nccl(root),
        driver=attempt("driver", lambda: driver_version(read_text(root / "proc/driver/nvidia/version"))),
        packages=packages,
        runtimes=_runtimes(root),
        unread=attempt.unreadable,
    )


def driver_version(content: str) -> str:
    """The driver's version from /proc/driver/nvidia/version. Raises ValueError on a text that names none."""
    found = re.search(r"^NVRM version:.*?Kernel Module.*?\s(\d+(?:\.\d+)+)\s", content, re.MULTILINE)
    if not found:
        raise ValueError(f"/proc/driver/nvidia/version: expected an NVRM version, found {content[:60]!r}")
    return found[1]


def torch_cuda_version() -> str:
    """The CUDA version that the installed torch was built for. Raises OSError, or ValueError for a CPU build."""
    _version("torch")
    path = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    found = re.search(r"^cuda\b[^=\n]*=\s*(None|['\"]([\w.]+)['\"])", read_text(path), re.MULTILINE)
    if not found:
        raise ValueError(f"{path} does not say for which CUDA torch was built")
    if not found[2]:
        raise ValueError("this torch was built without CUDA")
    return found[2]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise ValueError(f"not installed for {sys.executable}") from None


def _packages() -> dict[str, str]:
    """The installed distributions that matter here, by normalised name (PEP 503)."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", str(distribution.metadata["Name"])).lower()
        if (name in _PACKAGES or name.startswith("nvidia-")) and distribution.version:
            found.setdefault(name, distribution.version)  # the first on sys.path is the one that is imported
    return dict(sorted(found.items()))


def _system_nccl(root: Path) -> dict[str, str]:
    """The NCCL libraries of the system, by path: ``libnccl.so.2.27.3`` carries its version in its name."""
    libraries = sorted([*root.glob("usr/lib/*/libnccl.so.*.*.*"), *root.glob("usr/lib64/libnccl.so.*.*.*")])
    return {
        "/" + printable(str(path.relative_to(root))): printable(path.name.removeprefix("libnccl.so."))
        for path in libraries
    }


def _runtimes(root: Path) -> dict[str, str]:
    """The container runtimes on the PATH, and where."""
    folders = os.pathsep.join(str(path_under(root, folder)) for folder in os.get_exec_path())
    found = {name: shutil.which(name, path=folders) for name in _RUNTIMES}
    return {name: "/" + str(Path(path).relative_to(root)) for name, path in found.items() if path}
