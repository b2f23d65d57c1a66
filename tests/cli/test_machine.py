"""The commands discover, show checks and show skus."""

from __future__ import annotations

import json

from seatrial.checks import catalog
from seatrial.hardware.references import skus
from tests.processes import call


def test_checks_lists_every_check_on_one_line_and_the_rules_of_a_named_check() -> None:
    _, out, _ = call("show", "checks")
    lines = out.splitlines()
    for check in catalog().values():
        (line,) = [line for line in lines if line.split()[:1] == [check.name]]
        assert line.split(maxsplit=2)[1:] == [check.scope, check.title]
    _, out, _ = call("show", "checks", "device.*")
    for check in catalog().values():
        assert (check.name in out) is check.name.startswith("device.")
    assert all(rule.metric in out for rule in catalog()["device.gemm"].rules)
    code, out, _ = call("show", "checks", "--json")
    assert code == 0
    assert {entry["name"] for entry in json.loads(out)} == set(catalog())
    code, _, err = call("show", "checks", "train.cn")
    assert (code, "no check matches 'train.cn'; did you mean 'train.cnn'?" in err) == (2, True)


def test_skus_lists_models_and_the_values_of_one() -> None:
    code, out, _ = call("show", "skus", "--json")
    assert (code, len(json.loads(out))) == (0, len(skus()))
    for sku in skus():
        assert sku.name in call("show", "skus")[1]
    for model in ("h200", "gh200"):
        models = {each["name"] for each in json.loads(call("show", "skus", model, "--json")[1])}
        assert models
        assert all(model in name.lower().split() for name in models)
    code, out, _ = call("show", "skus", "gb200")
    assert code == 0
    assert "679.6 GB/s" in out
    assert "NVIDIA B200" not in out
    code, _, err = call("show", "skus", "nosuch")
    assert (code, "no GPU model matches 'nosuch'" in err) == (2, True)


def test_discover_prints_json_or_text() -> None:
    code, out, _ = call("discover", "--json")
    assert code == 0
    assert set(json.loads(out)) == {"host", "gpu"}
    assert "kernel" in call("discover")[1]
