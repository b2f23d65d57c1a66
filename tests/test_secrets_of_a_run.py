"""Secrets planted in a run are in no file of the run directory that others may get, nor on the terminal."""

from __future__ import annotations

import base64
import gzip
import json
import sys
from pathlib import Path

import pytest

from seatrial import worker
from seatrial.checks.training.command import CHECK
from seatrial.report import FORMATS
from tests.checks.training.check_helpers import make_context
from tests.processes import CPU_ONLY, call, load, run

# Files that hold secrets: what starts the job or resumes the run, and the logs that processes of the user write
PRIVATE_FILES = ("run.json", "job.json", "job.sh", "command.log")
PEM = "-----BEGIN PRIVATE KEY-----\nplanted0pem1AAAA\nplanted0pem2BBBB\n-----END PRIVATE KEY-----"
# kind → text with the secret, and the secret
KINDS = {
    "pwd": ("MYSQL_PWD=planted1pwd", "planted1pwd"),
    "pass": ("DB_PASS=planted2pass", "planted2pass"),
    "auth": ("REDISCLI_AUTH=planted3auth", "planted3auth"),
    "connection": ("AZURE_STORAGE_CONNECTION_STRING=A=b;planted4conn", "planted4conn"),
    "webhook": ("SLACK_WEBHOOK=https://hooks.example/planted5hook", "planted5hook"),
    "dsn": ("SENTRY_DSN=https://planted6dsn@sentry.example/1", "planted6dsn"),
    "bearer": ("Authorization: Bearer planted7bearer", "planted7bearer"),
    "basic": (
        f"Authorization: Basic {base64.b64encode(b'me:planted8').decode()}",
        base64.b64encode(b"me:planted8").decode(),
    ),
    "private key": (PEM.replace("\n", "\\n"), "planted0pem1"),
    "kubeconfig": ("client-key-data: planted9key", "planted9key"),
    "kubeconfig token": ("    token: planted10token", "planted10token"),
    "netrc": ("machine nvcr.io login me password planted11netrc", "planted11netrc"),
    "account key": ("AccountName=x;AccountKey=planted12account==", "planted12account"),
    "option": ("--password planted13option", "planted13option"),
    "wandb": ("--wandb=planted14wandb", "planted14wandb"),
    "docker": ('{"auth": "planted15docker"}', "planted15docker"),
}
INHERITED = {
    "WANDB_API_KEY": "inherited1wandb0123456789",
    "AWS_SECRET_ACCESS_KEY": "inherited2aws/AbC+0123456789",
    "AWS_SESSION_TOKEN": "inherited3session0123456789==",
}
NAMED = {
    "MYSQL_PWD": "env1pwd-secret",
    "SENTRY_DSN": "https://env2dsn@sentry.example/1",
    "SLACK_WEBHOOK": "https://h/env3hook",
}
SCRIPT = """
import os, sys
print("bare", *(os.environ[name] for name in {names}))
print("argument", sys.argv[1])
"""


def secrets_in(data: bytes, secrets: list[str]) -> list[str]:
    content = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    return [secret for secret in secrets if secret.encode() in content]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """A run directory, the planted secrets, and what the run printed."""
    folder = tmp_path_factory.mktemp("secrets")
    script = folder / "print.py"
    script.write_text(SCRIPT.format(names=[*INHERITED, *NAMED]))
    texts = [text for kind, (text, _) in KINDS.items() if kind != "option"]
    arguments = ["positional-secret", *KINDS["option"][0].split(), *texts]
    options = {
        "command": [sys.executable, str(script), *arguments],
        "env": {**NAMED, "HIDDEN_TOKEN": "positional-secret"},
        "log": ["loss (?P<loss>[0-9.]+)"],  # not in the log: the error quotes its last line
    }
    trial = {
        "cluster": {"gpus_per_node": 0},
        "telemetry": {"enabled": False},
        "env": {"GITLAB_PAT": "env4pat-secret"},
        "checks": {"host.inventory": {}, "train.command": {"options": options}},
    }
    (folder / "t.yaml").write_text(json.dumps(trial))
    code, out, err = run("run", folder / "t.yaml", "--out", folder / "run", env=INHERITED)
    assert code == 3
    planted = [secret for _, secret in KINDS.values()]
    return (
        folder / "run",
        [*planted, *INHERITED.values(), *NAMED.values(), "env4pat-secret", "positional-secret"],
        out + err,
    )


def test_no_secret_in_files_and_output(finished: tuple[Path, list[str], str]) -> None:
    folder, secrets, output = finished
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"trial.json", "report.html", "junit.xml", "command.sh", "rank0.jsonl"}
    leaks = {path.name: secrets_in(path.read_bytes(), secrets) for path in files if path.name not in PRIVATE_FILES}
    assert {name: found for name, found in leaks.items() if found} == {}
    assert secrets_in(output.encode(), secrets) == []
    for format in FORMATS:
        assert secrets_in(call("judge", folder, "--format", format)[1].encode(), secrets) == []


def test_the_secrets_reached_the_command(finished: tuple[Path, list[str], str]) -> None:
    folder, _, _ = finished
    (log,) = folder.rglob("command.log")
    assert secrets_in(log.read_bytes(), list(INHERITED.values())) == list(INHERITED.values())
    assert secrets_in((folder / "run.json").read_bytes(), ["env4pat-secret"]) == ["env4pat-secret"]


def test_redactions_name_the_variables(finished: tuple[Path, list[str], str]) -> None:
    (measurement,) = [each for each in load(finished[0]).measurements if each.check == "train.command"]
    tail = str([metric.evidence for metric in measurement.metrics if metric.name == "exit_code"])
    assert all(f"REDACTED({name})" in tail for name in (*INHERITED, *NAMED, "HIDDEN_TOKEN"))
    assert "last line: argument REDACTED(HIDDEN_TOKEN)" in str(measurement.error)


def test_all_files_are_private(finished: tuple[Path, list[str], str]) -> None:
    folder, _, _ = finished
    assert {path.stat().st_mode & 0o7777 for path in (folder, *folder.rglob("*")) if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o7777 for path in folder.rglob("*") if path.is_file()} == {0o600}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_in_the_output_of_a_command(tmp_path: Path, kind: str) -> None:
    """In the tail, which begins inside the secret, and in the error, which quotes the last line."""
    text, secret = KINDS[kind]
    text = text.replace("\\n", "\n")
    begin = text.index(secret) + len(secret) // 2
    filler = "x" * (600 - len(f"{text[begin:]}\n\n{text}"))
    (tmp_path / "output").write_text(f"{text}\n{filler}\n{text}\n")
    options = {"command": ["cat", str(tmp_path / "output")], "log": ["loss (?P<loss>[0-9.]+)"]}
    measured = worker.measure(CHECK, make_context(tmp_path), options)
    assert filler in str([metric.evidence for metric in measured.metrics if metric.name == "exit_code"])
    assert "last line" in str(measured.error)
    assert secrets_in(measured.model_dump_json().encode(), [secret, secret[len(secret) // 2 :]]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_in_a_log_that_is_explained(tmp_path: Path, kind: str) -> None:
    text, secret = KINDS[kind]
    (tmp_path / "log").write_text(f"Error: {text}\nRuntimeError: {text}\n")
    _, out, err = call("explain", tmp_path / "log")
    assert "Error: " in out
    assert secrets_in((out + err).encode(), [secret]) == []


def test_an_error_does_not_print_the_value_of_a_variable(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(CPU_ONLY + "checks: {host.inventory: }\n")
    for variable, value in (
        ("SEATRIAL_SET_CLUSTER__NODES", "planted-value"),
        ("SEATRIAL_SET_ENV__PLAIN", "!planted-value x"),
        ("SEATRIAL_SET_ENV__PLAIN", "planted-value\x07"),
        ("SEATRIAL_SET_ENV", "planted-value"),
        ("SEATRIAL_SET_CHECKS__HOST.INVENTORY__EXPECT__CPUS", "planted-value"),
        ("SEATRIAL_SET_LIMITS__STARTUP_S", "planted-value"),
    ):
        code, out, err = call("run", tmp_path / "t.yaml", "--out", tmp_path / "run", env={variable: value})
        assert (code, "planted-value" in out + err) == (2, False)
        assert f"${variable}" in err
    code, out, err = call("run", tmp_path / "t.yaml", "--set", "env.A={planted-value: [", "--out", tmp_path / "run")
    assert (code, "planted-value" in out + err, "--set env.A" in err) == (2, False, True)
