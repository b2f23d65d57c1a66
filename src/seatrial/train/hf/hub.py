"""The Hugging Face Hub: only where a config names it, and without minutes of retries where it cannot be reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from seatrial.model import UsageError
from seatrial.train.train_config import HUB_PREFIX, TrainConfig

PROBE_S = 5.0
OFFLINE_VARIABLE = "HF_HUB_OFFLINE"
LOGIN_HINT = "Ask for access on its page, then `hf auth login` or HF_TOKEN."
LOCAL_HINT = (
    "Without the Hub: name a local folder or file in its place (on a machine with network: `hf download OWNER/NAME "
    "--local-dir DIR`, with --repo-type dataset for data), set HF_HOME to a cache that already holds it, or leave it "
    "out: weights: random, and data and tokenizer are generated"
)


def set_offline_mode(config: TrainConfig) -> None:
    """Go offline unless ``config`` needs the Hub and it answers. Must be called before transformers is imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns after each fork otherwise
    if not _named(config) or not _answers():
        os.environ[OFFLINE_VARIABLE] = "1"


def hub_repository(name: str) -> str | None:
    """OWNER/NAME of ``hub:OWNER/NAME``; None for anything else."""
    return name.removeprefix(HUB_PREFIX) if name.startswith(HUB_PREFIX) else None


def source_label(name: str | None, otherwise: str) -> str:
    """How reports label where something is from: hub, path, or ``otherwise``."""
    if name is None or name == otherwise:
        return otherwise
    return "hub" if hub_repository(name) else "path"


@contextmanager
def load_errors_explained(name: str) -> Iterator[None]:
    """Turn what transformers and datasets raise about ``name`` into a message that says what else would do."""
    try:
        yield
    except (OSError, ValueError) as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        if hub_repository(name) is None and not Path(name).exists():  # transformers takes it for one of the Hub's
            raise UsageError(
                f"cannot load {name}: it is not there; of the Hub it would be {HUB_PREFIX}OWNER/NAME"
            ) from error
        if hub_repository(name) is None:
            raise UsageError(f"cannot load {name}: {first_line}") from error
        state = " (offline)" if os.environ.get(OFFLINE_VARIABLE) == "1" else ""
        login = f"{LOGIN_HINT} " if "gated" in first_line else ""
        raise UsageError(f"cannot get {name} from the Hub{state}: {first_line}. {login}{LOCAL_HINT}") from error


def _named(config: TrainConfig) -> bool:
    names = (config.model.weights, config.data.path, config.data.tokenizer)
    return any(name and hub_repository(name) for name in names)


def _answers() -> bool:
    if os.environ.get(OFFLINE_VARIABLE) == "1":
        return False
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True  # the proxy knows, and a direct connection says nothing
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=PROBE_S):
            return True
    except OSError:
        return False
