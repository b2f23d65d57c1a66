from __future__ import annotations

from typing import Any

import pytest

from seatrial.util.secrets import REDACTED, redacted, secret_values

HF = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PASSWORD", "DB_PASSWD", "WANDB_API_KEY", "apikey", "GITHUB_PAT", "KEY"],
)
def test_variable_with_a_secret_name(name: str) -> None:
    assert redacted({"env": {name: "x"}}) == {"env": {name: REDACTED}}
    assert redacted(f"env.{name}=long value") == f"env.{name}={REDACTED}"


@pytest.mark.parametrize(
    "value", [HF, "ghp_" + "a1" * 18, "github_pat_" + "a1" * 20, "AKIAIOSFODNN7EXAMPLE", JWT, "sk-proj-" + "a1" * 20]
)
def test_value_with_the_form_of_a_secret(value: str) -> None:
    assert redacted({"env": {"A": value}, "note": [f"got {value}, expected"]}) == {
        "env": {"A": REDACTED},
        "note": [f"got {REDACTED}, expected"],
    }


def test_url_keeps_its_host() -> None:
    assert redacted("http://me:hunter2@proxy:8080/x") == f"http://{REDACTED}@proxy:8080/x"
    assert redacted("http://:hunter2@proxy") == f"http://{REDACTED}@proxy"


@pytest.mark.parametrize(
    "document",
    [
        {"env": {"TOKENIZERS_PARALLELISM": "false", "NCCL_DEBUG": "INFO", "HF_HOME": "/shared/hf", "PATH": "/bin"}},
        {"expect": {"tokens_per_second_per_gpu.native": "> 500"}, "keys": ["hf_accelerate", "sk-learn"]},
        ["http://10.0.0.1:8080/a@b", "a@b.org", "cluster.nodes=2", "bsz=4"],
        {"token": "a fact, not a variable", "count": 5, "nothing": None, "env": {"TOKEN": ""}},
    ],
)
def test_other_values_stay(document: Any) -> None:
    assert redacted(document) == document


def test_known_values_are_replaced_everywhere() -> None:
    document = {"env": {"MY_TOKEN": "tricky-value", "PASSWORD": "abc"}, "checks": [{"env": {"DB_SECRET": "inner1"}}]}
    values = secret_values(document)
    assert values == {"tricky-value", "inner1"}, "a short value also occurs by chance"
    assert redacted({"error": "login failed: tricky-value/inner1/abc"}, values) == {
        "error": f"login failed: {REDACTED}/{REDACTED}/abc"
    }
    assert redacted(("a", "tricky-value"), values) == ("a", REDACTED)
