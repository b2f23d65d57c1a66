from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from seatrial.model import UsageError
from seatrial.train.hf import hub
from tests.train.hf import runs

HUB_WEIGHTS = "model.weights=hub:nobody/nothing"
CLOSED = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (hub.OFFLINE_VARIABLE, "HTTPS_PROXY", "https_proxy", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", CLOSED)


def test_config_without_hub_names_is_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: pytest.fail("opened a connection"))
    hub.set_offline_mode(runs.config("sft-smollm-135m"))
    assert os.environ[hub.OFFLINE_VARIABLE] == "1"


def test_unreachable_hub_is_offline_without_delay() -> None:
    before = time.monotonic()
    hub.set_offline_mode(runs.config("sft-smollm-135m", HUB_WEIGHTS))
    assert os.environ[hub.OFFLINE_VARIABLE] == "1"
    assert time.monotonic() - before < 30


def test_reachable_hub_or_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.set_offline_mode(runs.config("sft-smollm-135m", HUB_WEIGHTS))
    assert hub.OFFLINE_VARIABLE not in os.environ
    monkeypatch.setenv("HF_ENDPOINT", CLOSED)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    hub.set_offline_mode(runs.config("sft-smollm-135m", HUB_WEIGHTS))
    assert hub.OFFLINE_VARIABLE not in os.environ


def test_load_errors_name_local_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hub.OFFLINE_VARIABLE, "1")
    with (
        pytest.raises(
            UsageError, match=r"cannot get hub:a/b from the Hub \(offline\): no such file. .*local directory.*HF_HOME"
        ),
        hub.explain_load_errors("hub:a/b"),
    ):
        raise OSError("no such file\nand much more")
    with (
        pytest.raises(UsageError, match=f"^cannot load {tmp_path}: no such file$"),
        hub.explain_load_errors(str(tmp_path)),
    ):
        raise OSError("no such file")
    with (
        pytest.raises(UsageError, match=r"^cannot load a/b: .*hub:OWNER/NAME"),
        hub.explain_load_errors("a/b"),
    ):
        raise OSError("We couldn't connect to 'https://huggingface.co'")


def test_source_labels() -> None:
    assert hub.source_label("hub:a/b", "random") == "hub"
    assert hub.source_label("/weights", "random") == "path"
    assert hub.source_label("random", "random") == "random"
    assert hub.source_label(None, "generated") == "generated"
