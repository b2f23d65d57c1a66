"""Signatures of a bundle's SHA256SUMS, made and checked by ssh-keygen without a network."""

from __future__ import annotations

import base64
import re
import tempfile
from pathlib import Path

from seatrial.handover.archive import SUMS
from seatrial.model import SeatrialError, UsageError
from seatrial.util.processes import CommandResult, run_command

ROLES = ("provider", "customer")
NAMESPACE = "seatrial"  # a signature for another purpose, such as a commit of git, does not count
_TIMEOUT_S = 120.0  # a hardware key waits for a touch
_COLUMNS = 70  # of a signature file
_KEY = re.compile(r"\b\S+ key SHA256:\S+")


class NoSshKeygen(SeatrialError):
    """ssh-keygen could not be started, so that signatures can neither be made nor checked."""


def file_name(role: str) -> str:
    return f"{SUMS}.{role}.sig"


def sign(sums: bytes, key: Path) -> bytes:
    """The signature of the content of SHA256SUMS. ``key``: a private key, or the public key of one in ssh-agent.

    Raises UsageError with the text of ssh-keygen.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / SUMS
        file.write_bytes(sums)
        done = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, str(file))
        if done.code != 0:
            raise UsageError(
                f"--sign {key}: ssh-keygen could not sign: {done.err.strip() or 'no answer in time'}. For a key with a "
                "passphrase run ssh-add first, and give the public key"
            )
        return file.with_name(f"{SUMS}.sig").read_bytes()


def check(sums: bytes, signature: bytes, role: str, allowed_signers: Path | None) -> tuple[str, bool]:
    """The key that made a signature, such as ``ED25519 key SHA256:…``, and whether it is listed for ``role``.

    ``allowed_signers``: a file of the verifier, see man ssh-keygen. The key is empty if the signature does not fit the
    content of SHA256SUMS, or has another form than ssh-keygen writes, so that each changed bit is found.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, signature_file = Path(folder) / SUMS, Path(folder) / file_name(role)
        file.write_bytes(sums)
        signature_file.write_bytes(signature)
        arguments = ("-n", NAMESPACE, "-s", str(signature_file))
        done = _ssh_keygen("check-novalidate", *arguments, stdin=file)
        found = _KEY.search(done.out) if done.code == 0 and signature == _armored(signature) else None
        if not found or allowed_signers is None:
            return found[0] if found else "", False
        verified = _ssh_keygen("verify", "-f", str(allowed_signers), "-I", role, *arguments, stdin=file)
        return found[0], verified.code == 0


def _armored(signature: bytes) -> bytes:
    """The signature in the form that ssh-keygen writes; empty if it is none."""
    try:
        text = base64.b64encode(base64.b64decode(b"".join(signature.split(b"\n")[1:-2]), validate=True))
    except ValueError:
        return b""
    lines = (text[start : start + _COLUMNS] for start in range(0, len(text), _COLUMNS))
    return b"\n".join((b"-----BEGIN SSH SIGNATURE-----", *lines, b"-----END SSH SIGNATURE-----", b""))


def _ssh_keygen(action: str, *arguments: str, stdin: Path = Path("/dev/null")) -> CommandResult:
    """Raises NoSshKeygen."""
    try:
        with stdin.open("rb") as file:
            return run_command(["ssh-keygen", "-Y", action, *arguments], _TIMEOUT_S, stdin=file.fileno())
    except FileNotFoundError as error:
        raise NoSshKeygen("ssh-keygen is not on this machine: install openssh-client (8.2 or later)") from error
