"""Tests whether this node meets the requirements of a job: ``python -m seatrial.bench.preflight JOB.json ATTEMPT``.

The test runs before any check, in the environment of the workers: their Python, virtual environment and container. It
writes facts to ``preflight/NODE.json`` in the attempt's folder. If a requirement is not met, the process ends with exit
code 1 and one line, ``preflight: NODE: …``. Otherwise, with further arguments ``-m MODULE ARGUMENT…``, it runs MODULE.

This module uses only syntax of old versions of Python, and at first imports only seatrial's version and the standard
library. So a Python that is too old can run this module and report its version.
"""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import socket
import sys
import tempfile
from importlib import metadata
from typing import Any

import seatrial

_OLDEST_PYTHON = (3, 11)


class Problem(Exception):
    """A requirement that this node does not meet; the message is a clause without a full stop.

    ``command``: the first command to run on this node.
    """

    def __init__(self, clause: str, command: str) -> None:
        super().__init__(clause)
        self.command = command


def main(arguments: list[str]) -> None:
    """Test the requirements of the job on this node, write the facts, and run the module in ``arguments``, if any."""
    job_file, attempt, *module_arguments = arguments
    node = os.environ.get("SLURMD_NODENAME") or os.environ.get("SEATRIAL_NODE") or socket.gethostname()
    facts: dict[str, Any] = {"python": sys.version.split()[0], "executable": sys.executable, "prefix": sys.prefix}
    facts["image_id"], facts["evidence"] = os.environ.get("SEATRIAL_IMAGE_ID"), container_evidence()
    problems = []
    try:
        with open(job_file, encoding="utf-8") as file:
            required = json.load(file)["preflight"]
        tests = (_try_seatrial, _try_interfaces, _try_torch, _try_hf_cache) if required else ()
        for test in tests:
            try:
                test(required, facts)
            except Problem as problem:
                problems.append(problem)
        folder = os.path.join(os.path.dirname(job_file), f"attempt{attempt}", "preflight")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"{node}.json"), "w", encoding="utf-8") as file:
            json.dump({"node": node, **facts, "problems": [str(problem) for problem in problems]}, file)
    except OSError as error:
        path = error.filename or job_file
        clause = f"the run directory is not readable and writable: {path}: {error.strerror}"
        problems.append(Problem(clause, f"ls -ld {os.path.dirname(job_file)}"))
    if problems:
        text = "; ".join(str(problem) for problem in problems)
        sys.exit(f"preflight: {node}: {text}. Run first, on this node: {problems[0].command}")
    if module_arguments:
        _run_module(module_arguments[1:])


def container_evidence() -> list[str]:
    """Return the evidence that this process runs in a container: files, variables and another mount namespace."""
    evidence = [path for path in ("/.dockerenv", "/run/.containerenv") if os.path.exists(path)]
    names = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "ENROOT_ROOTFS")
    evidence += [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
    namespace, host = os.readlink("/proc/self/ns/mnt"), os.environ.get("SEATRIAL_HOST_NAMESPACE")
    return evidence + ([f"{namespace} is not the host's {host}"] if host and host != namespace else [])


def _try_seatrial(required: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raise Problem if Python is too old, seatrial has another version, or a package that seatrial needs is missing."""
    command = f"{sys.executable} -m pip list"
    if sys.version_info < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        raise Problem(f"{sys.executable} is Python {facts['python']}, expected {oldest} or newer", command)
    facts["seatrial"] = seatrial.__version__
    if seatrial.__version__ != required["version"]:
        raise Problem(
            f"{sys.executable} has seatrial {seatrial.__version__}, expected {required['version']}, which started the "
            "trial",
            command,
        )
    for dependency in _dependencies():
        try:
            metadata.version(dependency)
        except metadata.PackageNotFoundError:
            raise Problem(f"{sys.executable} lacks {dependency}, which seatrial needs", command) from None


def _dependencies() -> list[str]:
    """Return the names of the packages that seatrial requires without an extra."""
    try:
        requirements = metadata.requires("seatrial") or []
    except metadata.PackageNotFoundError:  # found through PYTHONPATH, not installed
        return []
    names = (re.match(r"[\w.-]+", text) for text in requirements if "extra ==" not in text)
    return [name[0] for name in names if name]


def _try_interfaces(required: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raise Problem if the network interfaces in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME do not exist.

    Gloo takes a list of names, of which all must exist. NCCL takes a list of prefixes, of which one must match; ``=``
    before the list makes them exact names, and with ``^`` the list excludes interfaces (NCCL user guide).
    """
    interfaces = facts["interfaces"] = sorted(name for _, name in socket.if_nameindex())
    listed, problems = ", ".join(interfaces), []
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "")
    missing = [name for name in gloo.split(",") if name and name not in interfaces]
    if missing:
        problems.append(f"GLOO_SOCKET_IFNAME={gloo}: this node has no interface {', '.join(missing)}, it has {listed}")
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "") if required["gpus"] else ""
    names, is_exact = tuple(nccl.lstrip("=").split(",")), nccl.startswith("=")
    matches = [name for name in interfaces if (name in names if is_exact else name.startswith(names))]
    if nccl and not nccl.startswith("^") and not matches:
        problems.append(f"NCCL_SOCKET_IFNAME={nccl}: this node has no such interface, it has {listed}")
    if problems:
        raise Problem("; ".join(problems), "ip -br address")


def _try_torch(required: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raise Problem if torch cannot be imported, or cannot use the expected number of GPUs with NCCL."""
    if not required["torch"]:
        return
    gpu_count, command = required["gpus"], f"{sys.executable} -m torch.utils.collect_env"
    gc.disable()
    try:
        import torch
        import torch.distributed
    except Exception as error:  # ImportError, OSError of a library, or any error of a broken package
        text = _first_line(error)
        raise Problem(
            f"{sys.executable} cannot import torch: {type(error).__name__}: {text}", f"{sys.executable} -m pip list"
        ) from error
    finally:
        gc.freeze()  # the import makes a million permanent objects; collecting them would take 0.8 s of CPU time
        gc.enable()
    facts["torch"], facts["cuda"] = torch.__version__, torch.version.cuda
    if not gpu_count:
        return
    expected = f"{gpu_count} GPU{'s' if gpu_count > 1 else ''} per node expected"
    if torch.version.cuda is None:
        raise Problem(f"torch {torch.__version__} of {sys.executable} is built without CUDA, {expected}", command)
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        facts["gpus"] = torch.cuda.device_count()
    except Exception as error:
        raise Problem(
            f"torch {torch.__version__} cannot use CUDA, {expected}: {_first_line(error)}", command
        ) from error
    if facts["gpus"] < gpu_count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        setting = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise Problem(f"torch can use {facts['gpus']} GPUs{setting}, {expected}", command)
    if not torch.distributed.is_nccl_available():
        raise Problem(f"torch {torch.__version__} of {sys.executable} is built without NCCL, {expected}", command)
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no message")[:300]


def _try_hf_cache(required: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raise Problem if HF_HOME (the Hugging Face cache), or its nearest existing parent folder, is not writable."""
    path = os.environ.get("HF_HOME")
    # Without HF_HOME, only a config with a model of the Hub needs a cache: the default one, which is not tested
    if not required["hf_cache"] or not path:
        return
    facts["hf_home"], existing = path, os.path.abspath(path)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        clause = f"HF_HOME {path}, the Hugging Face cache, is not writable: {existing}: {error.strerror}"
        raise Problem(clause, f"ls -ld {existing}; df -h {existing}") from error


def _run_module(arguments: list[str]) -> None:
    """Replace this program by ``MODULE ARGUMENT…``.

    If torch is already imported here, torchrun (by bench.run_module) runs in this process, which saves a second import.
    """
    if arguments[0] == "seatrial.bench.run_module" and "torch" in sys.modules:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:  # a new process image: torch has started threads in this one
        os.execv(sys.executable, [sys.executable, "-m", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
