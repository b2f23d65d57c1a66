"""Access to the Hugging Face Hub, for configs that name a repository; without long retries if it is unreachable."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from seatrial.model import UsageError
from seatrial.train import disk
from seatrial.train.train_config import HUB_PREFIX, TrainConfig

PROBE_TIMEOUT_S = 5.0  # for a TCP connection to the Hub
OFFLINE_VARIABLE = "HF_HUB_OFFLINE"
LOGIN_HINT = "Request access on the repository's page, then run `hf auth login` or set HF_TOKEN."
LOCAL_HINT = (
    "Without the Hub, use a local directory or file (on a machine with network access: `hf download OWNER/NAME "
    "--local-dir DIR`, with --repo-type dataset for data), set HF_HOME to a cache that has it, or remove the setting, "
    "for random weights, generated data and a trained tokenizer"
)


def set_offline_mode(config: TrainConfig) -> None:
    """Set offline mode if ``config`` does not need the Hub or cannot reach it. Call before importing transformers."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # otherwise tokenizers warns after each fork
    if not needs_hub(config) or not _is_reachable():
        os.environ[OFFLINE_VARIABLE] = "1"


def hub_repository(name: str) -> str | None:
    """OWNER/NAME of ``hub:OWNER/NAME``; None for other names."""
    return name.removeprefix(HUB_PREFIX) if name.startswith(HUB_PREFIX) else None


def source_label(name: str | None, default: str) -> str:
    """The source of ``name`` for reports: hub, path, or ``default``."""
    if name is None or name == default:
        return default
    return "hub" if hub_repository(name) else "path"


@contextmanager
def explain_load_errors(name: str) -> Iterator[None]:
    """Context manager: converts errors of loading ``name`` by transformers or datasets to UsageErrors with remedies."""
    try:
        yield
    except (OSError, ValueError) as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        if hub_repository(name) is None and not Path(name).exists():  # transformers looks up such a name on the Hub
            raise UsageError(
                f"cannot load {name}: no such file or directory; a Hub repository is written {HUB_PREFIX}OWNER/NAME"
            ) from error
        if hub_repository(name) is None:
            raise UsageError(f"cannot load {name}: {first_line}") from error
        state = " (offline)" if os.environ.get(OFFLINE_VARIABLE) == "1" else ""
        login = f"{LOGIN_HINT} " if "gated" in first_line else ""
        raise UsageError(f"cannot get {name} from the Hub{state}: {first_line}. {login}{LOCAL_HINT}") from error


def require_writable_cache() -> None:
    """Raise UsageError if downloads from the Hub cannot be written to the cache of Hugging Face."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    folder = Path(os.environ.get("HF_HOME") or default).expanduser()
    disk.require_writable(folder, "HF_HOME" if os.environ.get("HF_HOME") else "the cache of Hugging Face (HF_HOME)")


def needs_hub(config: TrainConfig) -> bool:
    """Whether weights, data or tokenizer are a repository of the Hub."""
    names = (config.model.weights, config.data.path, config.data.tokenizer)
    return any(name and hub_repository(name) for name in names)


def _is_reachable() -> bool:
    if os.environ.get(OFFLINE_VARIABLE) == "1":
        return False
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True  # a direct connection does not test the proxy
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False
