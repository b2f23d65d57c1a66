"""Versions of the software that training depends on, from package metadata and files; no package is imported."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from seatrial.discover.file_readers import FieldReader, FileFacts, path_under, read_text
from seatrial.util.text import printable

_CONTAINER_RUNTIMES = ("docker", "podman", "nerdctl", "apptainer", "singularity", "enroot", "ctr", "crictl")
# Packages that a training job imports or that affect its speed; all installed nvidia-* packages are added
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


class SoftwareFacts(FileFacts):
    """Versions; a field is None also if the software is missing.

    ``cuda`` is the version that torch was built for. ``nccl`` maps each installed NCCL (package name or library path)
    to its version; the NCCL log of the collectives shows which NCCL torch loads. ``driver``: version of the loaded
    kernel module. ``runtimes``: container runtime → path of its program.
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


def read(root: Path = Path("/")) -> SoftwareFacts:
    """The versions of this interpreter's packages, and of the driver and libraries under ``root``."""
    reader = FieldReader()
    packages = reader("packages", _packages) or {}
    return SoftwareFacts(
        seatrial=reader("seatrial", lambda: _installed_version("seatrial")),
        python=platform.python_version(),
        interpreter=printable(sys.executable),
        torch=reader("torch", lambda: _installed_version("torch")),
        cuda=reader("cuda", torch_cuda_version),
        nccl={name: version for name, version in packages.items() if "nccl" in name} | _system_nccl(root),
        driver=reader("driver", lambda: driver_version(read_text(root / "proc/driver/nvidia/version"))),
        packages=packages,
        runtimes=_container_runtimes(root),
        unreadable=reader.unreadable,
    )


def driver_version(content: str) -> str:
    """The driver version in the text of /proc/driver/nvidia/version. Raises ValueError."""
    match = re.search(r"^NVRM version:.*?Kernel Module.*?\s(\d+(?:\.\d+)+)\s", content, re.MULTILINE)
    if not match:
        raise ValueError(f"/proc/driver/nvidia/version: expected an NVRM version, read {content[:60]!r}")
    return match[1]


def torch_cuda_version() -> str:
    """The CUDA version that the installed torch was built for. Raises OSError, or ValueError for a CPU build."""
    _installed_version("torch")
    path = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    match = re.search(r"^cuda\b[^=\n]*=\s*(None|['\"]([\w.]+)['\"])", read_text(path), re.MULTILINE)
    if not match:
        raise ValueError(f"{path}: no line 'cuda = VERSION'")
    if not match[2]:
        raise ValueError("the installed torch is a build without CUDA")
    return match[2]


def _installed_version(name: str) -> str:
    """The version of a package; ValueError without it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise ValueError(f"not installed for {sys.executable}") from None


def _packages() -> dict[str, str]:
    """The versions of the relevant installed packages, by normalised name (PEP 503)."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", str(distribution.metadata["Name"])).lower()
        if (name in _PACKAGES or name.startswith("nvidia-")) and distribution.version:
            versions.setdefault(name, distribution.version)  # of two versions, Python imports the first on sys.path
    return dict(sorted(versions.items()))


def _system_nccl(root: Path) -> dict[str, str]:
    """The versions of NCCL libraries in system folders, from file names such as ``libnccl.so.2.27.3``, by path."""
    libraries = sorted([*root.glob("usr/lib/*/libnccl.so.*.*.*"), *root.glob("usr/lib64/libnccl.so.*.*.*")])
    return {
        "/" + printable(str(path.relative_to(root))): printable(path.name.removeprefix("libnccl.so."))
        for path in libraries
    }


def _container_runtimes(root: Path) -> dict[str, str]:
    """The container runtimes on the PATH, name to path."""
    folders = os.pathsep.join(str(path_under(root, folder)) for folder in os.get_exec_path())
    paths = {name: shutil.which(name, path=folders) for name in _CONTAINER_RUNTIMES}
    return {name: "/" + str(Path(path).relative_to(root)) for name, path in paths.items() if path}
