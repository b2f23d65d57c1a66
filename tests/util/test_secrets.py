from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest

from seatrial.util.secrets import REDACTED, is_secret_name, redacted, secret_values
from tests.paths import ROOT

HF = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
HEX = "0123456789abcdef0123456789abcdef01234567"  # such as a key of Weights & Biases, or a commit
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9"
PEM = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\nAAAABG5vbmUA\n-----END OPENSSH PRIVATE KEY-----"
BASIC = base64.b64encode(b"me:hunter2").decode()


SECRET_NAMES = (
    "HF_TOKEN AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN PASSWORD DB_PASSWD DB_PASS MYSQL_PWD PGPASSWORD SSHPASS "
    "WANDB_API_KEY NGC_API_KEY apikey accountKey x-api-key KEY KAGGLE_KEY GITHUB_PAT REDISCLI_AUTH DOCKER_AUTH_CONFIG "
    "AZURE_STORAGE_CONNECTION_STRING SLACK_WEBHOOK SLACK_WEBHOOK_URL SENTRY_DSN LDAP_BIND_PW VAULT_SECRET_ID SLURM_JWT "
    "SMTP_CREDENTIALS CLIENT_SECRET client-secret NPM_TOKEN NPMTOKEN API_KEY_2 PASSWORD1 RESTIC_PASSPHRASE "
    "client-key-data SEATRIAL_SET_ENV__HF_TOKEN DBPASS GITHUB_TOKENS"
)


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_variable_with_a_secret_name(name: str) -> None:
    assert is_secret_name(name)
    assert redacted({"env": {name: "x"}}) == {"env": {name: REDACTED}}
    assert redacted(f"env.{name}=long value") == f"env.{name}={REDACTED}"


OTHER_NAMES = (
    "COMPASS CUDA_BYPASS PASSTHROUGH PATH PATTERN KEYBOARD KEYRING MONKEY HOTKEYS TOKENIZERS_PARALLELISM MAX_TOKENS "
    "tokens_per_second PWD OLDPWD SSH_AUTH_SOCK XAUTHORITY GIT_AUTHOR_NAME AWS_ACCESS_KEY_ID POSTGRES_PASSWORD_FILE "
    "OS_AUTH_URL OS_AUTH_TYPE SSH_PUBLIC_KEY EOS_TOKEN pad_token flops_per_token time_to_first_token SECRETARY "
    "SSH_CONNECTION NCCL_DEBUG AuthType NUM_PASSES CREDITS P_KEY partition_key cache_key SLURM_STEP_KEY TOTAL_TOKENS"
)


@pytest.mark.parametrize("name", OTHER_NAMES.split())
def test_variable_with_another_name(name: str) -> None:
    assert not is_secret_name(name)
    assert redacted({"env": {name: "x"}, "text": f"{name}=abc1 and {name}: abc1"}) == {
        "env": {name: "x"},
        "text": f"{name}=abc1 and {name}: abc1",
    }


@pytest.mark.parametrize(
    "value",
    [
        *(HF, "ghp_" + "a1" * 18, "github_pat_" + "a1" * 20, "AKIAIOSFODNN7EXAMPLE", JWT, "sk-proj-" + "a1" * 20),
        *("nvapi-" + "a1" * 20, "dckr_pat_" + "a1" * 12, "wandb_v1_" + "a1" * 20),
    ],
)
def test_value_with_the_form_of_a_secret(value: str) -> None:
    assert redacted({"env": {"A": value}, "note": [f"got {value}, expected"]}) == {
        "env": {"A": REDACTED},
        "note": [f"got {REDACTED}, expected"],
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("curl -H 'Authorization: Bearer abc123def456' x", "curl -H 'Authorization: Bearer REDACTED' x"),
        ("got header Bearer abc123def456", "got header Bearer REDACTED"),
        (f"authorization: basic {BASIC}", "authorization: basic REDACTED"),
        (f"proxy sent Basic {BASIC}", "proxy sent Basic REDACTED"),
        (f"key:\n{PEM}\nend", "key:\nREDACTED(private key)\nend"),
        (json.dumps(PEM), '"REDACTED(private key)"'),
        (PEM.partition("\n")[2], "REDACTED(private key)"),  # the end of a log
        (
            "users:\n- user:\n    client-key-data: LS0tLS1CRUdJTg==\n",
            "users:\n- user:\n    client-key-data: REDACTED\n",
        ),
        ("    token: sha256~abc1", "    token: REDACTED"),
        ("machine nvcr.io login me password s3cr3t", "machine nvcr.io login me password REDACTED"),
        ("machine h\n  login me\n  password s3cr3t\n", "machine h\n  login me\n  password REDACTED\n"),
        ("AccountName=x;AccountKey=abc1==;Endpoint=y", "AccountName=x;AccountKey=REDACTED"),
        ("train.py --password hunter --steps 5", "train.py --password REDACTED --steps 5"),
        ("train.py '--password=two words' --steps 5", "train.py '--password=REDACTED' --steps 5"),
        ("train.py --wandb=0123456789abcdef --token abc", "train.py --wandb=REDACTED --token REDACTED"),
        ('["train.py", "--wandb=0123456789abcdef"]', '["train.py", "--wandb=REDACTED"]'),
        (
            '{"auths": {"nvcr.io": {"auth": "bWU6aHVudGVyMg=="}}}',
            '{"auths": {"nvcr.io": {"auth": "REDACTED"}}}',
        ),
        (r"{\"password\": \"two words\"}", r"{\"password\": \"REDACTED\"}"),
        ("A=1\nDB_PASS=two words; and more\nB=2", "A=1\nDB_PASS=REDACTED\nB=2"),
        ('declare -x MYSQL_PWD="a b"', "declare -x MYSQL_PWD=REDACTED"),
        ("connect(api_key='abc1', retries=3)", "connect(api_key='REDACTED', retries=3)"),
        ("X-Api-Key: abc1", "X-Api-Key: REDACTED"),
        ("curl -u me:hunter2 http://h", "curl -u me:REDACTED http://h"),
        ("http://me:hunter2@proxy:8080/x", "http://REDACTED@proxy:8080/x"),
        ("http://:hunter2@proxy", "http://REDACTED@proxy"),
        ("postgres://me:p@ss@db/x", "postgres://REDACTED@db/x"),
        ("https://0123456789abcdef0123@sentry.example/1", "https://REDACTED@sentry.example/1"),
        ("https://hooks.slack.com/services/T00000000/B0000/abc", "https://hooks.slack.com/services/REDACTED"),
        ("GET /blob?se=1&token=abc123", "GET /blob?se=1&token=REDACTED"),
        ("[default]\naws_secret_access_key = aB/c1+d\n", "[default]\naws_secret_access_key = REDACTED\n"),
        ('  api_key = "abc1"  # mine', '  api_key = "REDACTED"  # mine'),
        ("  db.password = two", "  db.password = REDACTED"),
        ("{'tokens': ['abc123def']}", "{'tokens': [REDACTED]}"),
        ('{"api_keys": ["abc1", "abc2"], "n": 1}', '{"api_keys": [REDACTED], "n": 1}'),
        ('[{"name": "DB_PASSWORD", "value": "abc1"}]', '[{"name": "DB_PASSWORD", "value": "REDACTED"}]'),
        ('{"name":"DB_PASSWORD","value":"abc1"}', '{"name":"DB_PASSWORD","value":"REDACTED"}'),
        ("- name: DB_PASSWORD\n  value: abc1\n", "- name: DB_PASSWORD\n  value: REDACTED\n"),
        ("https://abcdef123456:@github.com/o/r", "https://REDACTED@github.com/o/r"),
        ("key=AbCdEf0123456789AbCdEf", "key=REDACTED"),
        (f"x = '{'a1' * 300}' password: '{'b1' * 300}', n", f"x = '{'a1' * 300}' password: 'REDACTED', n"),
        ("SECRET=" + "a1 " * 300 + "\nnext", "SECRET=REDACTED\nnext"),
        (f'wandb.login(key="{HEX}")', 'wandb.login(key="REDACTED")'),
        (f"login(relogin=True, key='{HEX}')", "login(relogin=True, key='REDACTED')"),
        (f"$ wandb login --relogin {HEX}", "$ wandb login --relogin REDACTED"),
        (
            f"API key must be 40 characters long, yours was 41: {HEX}0",
            "API key must be 40 characters long, yours was 41: REDACTED",
        ),
        (f"invalid API key: '{HEX}'", "invalid API key: 'REDACTED'"),
        (f"https://a/b?sv=1&sig={HEX}%3D&se=2", "https://a/b?sv=1&sig=REDACTED&se=2"),
        (rf'"https://a/b?sv=1\u0026sig={HEX}%3D"', r'"https://a/b?sv=1\u0026sig=REDACTED"'),
        (f"https://s3/x?X-Amz-Signature={HEX}&X-Amz-Date=1", "https://s3/x?X-Amz-Signature=REDACTED&X-Amz-Date=1"),
        ("https://s3/x?X-Amz-Credential=abc/1/us&X-Amz-Date=1", "https://s3/x?X-Amz-Credential=REDACTED"),
        ("https://s3/x?X-Amz-Security-Token=FwoGZXIv", "https://s3/x?X-Amz-Security-Token=REDACTED"),
        (f"https://cdn/x?Expires=1&Signature={HEX}~&Id=2", "https://cdn/x?Expires=1&Signature=REDACTED~&Id=2"),
        ("postgres://user:p@ss/w@host/db", "postgres://REDACTED@host/db"),
        ("postgres://user:p/ss@host, http://user:p@h2", "postgres://REDACTED@host, http://REDACTED@h2"),
        (f"got {HF[:9]}\u200b{HF[9:]}\u202e", f"got {REDACTED}"),
        ("pass\u2060word=hun\u00adter2", "password=REDACTED"),
        ("the password is hunter2.", "the password is REDACTED"),
        ("login root password is hunter2", "login root password is REDACTED"),
        ("Your token was: abc123def456", "Your token was: REDACTED"),
        ("--password is 'p@ss word'", "--password is 'REDACTED'"),
    ],
)
def test_forms_in_text(text: str, expected: str) -> None:
    assert redacted(text) == expected
    assert redacted(expected) == expected


def test_arguments_in_a_list() -> None:
    arguments = (
        "train",
        "--password",
        "hunter2",
        "--token=abc",
        "DB_PASS=two words",
        "--key",
        "--verbose",
        "--wandb",
        "k1",
    )
    expected = ("train", "--password", REDACTED, f"--token={REDACTED}", f"DB_PASS={REDACTED}", "--key", "--verbose")
    assert redacted(arguments) == (*expected, "--wandb", REDACTED)
    odd = ["$ecret9", "*abc", "no-way-in", "{abc", "<abc", "true-love", "%abc", "123456", "1.2.3-4"]
    assert [redacted(["--password", value])[1] for value in odd] == [REDACTED] * len(odd)
    assert redacted([PEM, "next"]) == [f"{REDACTED}(private key)", "next"]


@pytest.mark.parametrize(
    "document",
    [
        {"env": {"TOKENIZERS_PARALLELISM": "false", "NCCL_DEBUG": "INFO", "HF_HOME": "/shared/hf", "PATH": "/bin"}},
        {"expect": {"tokens_per_second_per_gpu.native": "> 500"}, "keys": ["hf_accelerate", "sk-learn"]},
        ["http://10.0.0.1:8080/a@b", "a@b.org", "cluster.nodes=2", "bsz=4", "ssh://git@host/x"],
        {"token": "a fact, not a variable", "count": 5, "nothing": None, "env": {"TOKEN": ""}},
        {"tolerations": [{"key": "nvidia.com/gpu"}], "env": {"GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json"}},
        ["basic functionality", "bearer authentication", "Basic Networking", "PASS: 3", "PASS=3 FAIL=0", "key: value"],
        ["expected key=value, such as cluster.nodes=2", "password: must have 8 characters", "token: unexpected"],
        [
            '--user="$(id -u):$(id -g)"',
            "--user 1000:1000",
            "--password=$DB_PASS",
            "--wandb=disabled",
            "--token <TOKEN>",
        ],
        ["--password", "--verbose"],
        "KEY_FILE=/run/secrets/key PASS_DIR=/x SSH_AUTH_SOCK=/run/x",
        "auth/munge: error: Invalid credential",
        ["KeyError: 'loss_0'", "AuthException: code_1", "PASS: 12/12", "pass=99.5%", "key=0x1a", "key: a.b/c"],
        ["key: default_pg/0//0//worker/123abcd", "TCPStore get key=default_pg/0//cpu//store_based_barrier_key:1"],
        ["key=layers.0.weight2", "P_KEY: 0x8001", "partition key: 0xffff", "SLURM_STEP_KEY=1234567", "PASS=abc123def"],
        ["host key: SHA256:AbCdEf0123456789AbCdEf0123456789AbCdEf01234", f"cache key={'0a' * 32}"],
        ["rdma://gpu-node-0001.example@mlx5_0", "rdma://gpu0001:18515@mlx5_0", "sk-learn-estimators-version-1"],
        ["if password == x:", "{'tokens': ['Hello', 'world']}", "tokens: [128000, 9906]", '{"key": "example.com/gpu"}'],
        ["the password is required", "login with password is disabled", "--password is required", "token is 128009"],
        ["the secret is in default/regcred", "password was not set", f"the key is {HEX}", f"API key ok, commit {HEX}"],
        [f"commit {HEX} changes the key", f"git key={HEX}", "login(key=value)", "login(key='$WANDB_API_KEY')"],
        ["signal sig=15 sig=SIGTERM", "http://h/x?sig=15&n=1", "Signature=(x: Tensor)", "X-Amz-Date=20260101T000000Z"],
        ["docker://ubuntu:22.04@sha256:0a0a", "tcp://[fd00::1]:29500/a@b", "http://h:8080/a/b@c", "http://h/a:b@c"],
        ["wandb login", "API key must be 40 characters long, yours was 41", "NCCL key=value", "\u200bword\u202e"],
        [{"name": "all_reduce", "value": "abc"}, {"tokens": ["Hello", "tokenizers"]}, {"key": "layers.0.weight2"}],
    ],
)
def test_other_values_stay(document: Any) -> None:
    assert redacted(document) == document


def test_variables_of_kubernetes_and_lists() -> None:
    token = "AbCdEf0123456789AbCdEf"
    assert redacted({"name": "DB_PASSWORD", "value": "hunter-two"}) == {"name": "DB_PASSWORD", "value": REDACTED}
    assert redacted({"tokens": [token], "passwords": ("hunter-two",)}) == {
        "tokens": [REDACTED],
        "passwords": (REDACTED,),
    }


@pytest.mark.parametrize(
    "part",
    [
        *("token: x1 ", "key: x1 ", "key:x1,", "token:/a:", "password: 'x1 ", "'key=x1 ", "tokens: ['x', ", "NAME ,"),
        *(
            "\n",
            " ",
            "\\",
            "login ",
            "login(key",
            "://a:b/",
            "key is ",
            "A\n",
            "Zm9v" * 16 + "\n",
            "eyJ-",
            "sk-",
            "basic ",
            "://a:",
            "-----BEGIN ",
        ),
    ],
)
def test_time_is_linear(part: str) -> None:
    for text in (
        "error: " + part * (400_000 // len(part)),
        f"{part * (400_000 // len(part))}-----END PRIVATE KEY-----x",
        f"password=/{part * (400_000 // len(part))}",
    ):
        begin = time.process_time()
        redacted(text)
        assert time.process_time() - begin < 2, "quadratic: 10 s and more"


def test_known_values_are_replaced_everywhere() -> None:
    document = {"env": {"MY_TOKEN": "tricky-value", "PASSWORD": "abc"}, "checks": [{"env": {"DB_SECRET": "inner-1 a"}}]}
    values = secret_values(document, {"options": ["--api-key", "k-12345678"]})
    assert values == {"tricky-value": "MY_TOKEN", "inner-1 a": "DB_SECRET", "k-12345678": "api-key"}, "abc is too short"
    assert redacted({"error": "login failed: tricky-value/inner-1%20a/abc/k-12345678"}, values) == {
        "error": f"login failed: {REDACTED}(MY_TOKEN)/{REDACTED}(DB_SECRET)/abc/{REDACTED}(api-key)"
    }
    assert redacted(("a", "tricky-value"), values) == ("a", f"{REDACTED}(MY_TOKEN)")


def test_values_of_inherited_variables_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("TWO_SECRET", 'it\'s "odd"')
    monkeypatch.setenv("COMPASS", "north-by-northwest")
    text = "a 0123456789abcdef " + json.dumps('it\'s "odd"') + " north-by-northwest"
    assert redacted(text, secret_values()) == f'a {REDACTED}(WANDB_API_KEY) "{REDACTED}(TWO_SECRET)" north-by-northwest'


def test_parts_of_inherited_secrets_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://me:pass%40word-9z@db/x")
    monkeypatch.setenv("GIT_REMOTE", "https://0123456789abcdef:@github.com/o/r")
    monkeypatch.setenv("SIGNING_SECRET", f"{PEM}\n  second line of secret\nshort")
    values = secret_values()
    assert redacted("a pass@word-9z b pass%40word-9z c 0123456789abcdef", values) == "a REDACTED b REDACTED c REDACTED"
    assert redacted("[rank0]: b3BlbnNzaC1rZXktdjEA\n[rank0]: second line of secret\n[rank0]: short", values) == (
        f"[rank0]: {REDACTED}(SIGNING_SECRET)\n[rank0]: {REDACTED}(SIGNING_SECRET)\n[rank0]: short"
    )
    assert redacted("-----BEGIN PRIVATE KEY-----\nb3RoZXI\n", values) == f"{REDACTED}(private key)"


@pytest.mark.parametrize(
    "value",
    [
        *("/shared/models/base", "123456789012", "1.25e+10", "all_reduce", "kubernetes", "$OTHER_VAR", "production"),
        *("password", "node0001", "gpu-node-0001", "mlx5_0:1", "mlx5_bond_0", "0000:1b:00.0"),
    ],
)
def test_ordinary_values_of_secret_variables_are_not_replaced_in_text(value: str) -> None:
    document = {"launcher": "kubernetes", "env": {"MY_KEY": value}}
    assert secret_values(document, vocabulary={"all_reduce"}) == {}


def test_random_text_that_begins_with_a_slash_is_no_path() -> None:
    secret = "/AbCdEf0123456789+AbCdEf0123456789AbCdEf"
    assert secret_values({"env": {"AWS_SECRET_ACCESS_KEY": secret}}) == {secret: "AWS_SECRET_ACCESS_KEY"}


@pytest.mark.parametrize(
    "record", sorted((ROOT / "docs" / "results").rglob("*.trial.json")), ids=lambda path: path.name
)
def test_a_shipped_record_has_no_secret(record: Path) -> None:
    document = json.loads(record.read_text(encoding="utf-8"))
    assert redacted(document) == document
