"""The kernels prove themselves on a GPU; run by `pytest -m gpu`."""

from __future__ import annotations

import json

import pytest
import torch

from accel import proof
from tests.harness.steps import tiny_training
from training.config.schema import KERNEL_KEYS

pytestmark = pytest.mark.gpu
SCAN = ("fused_add_norm", "fused_scan", "fused_conv")
USES = {
    "mamba": SCAN,
    "zigzag": SCAN,
    "ssd_mlp": (*SCAN, "fused_swiglu"),
    "conv": ("fused_add_norm", "fused_conv", "fused_swiglu"),
    "dit": ("fused_add_norm", "fused_swiglu", "fused_rope"),
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def trained(family="mamba", *words, **values):
    return tiny_training(
        family, "data=synthetic", "batch_size=16", *words, device=torch.device("cuda"), **values
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("family", USES)
def test_every_kernel_passes_its_parity_test(family, precision):
    training = trained(family, **dict.fromkeys(KERNEL_KEYS, True), precision=precision)
    rows = {row.key: row for row in training.warm_up() if row.key in KERNEL_KEYS}
    for key in USES[family]:
        assert training.kernels["found"][key]["refusal"] is None
        assert rows[key].active is True, rows[key].evidence
    assert all(rows[key].active == "unused" for key in set(KERNEL_KEYS) - set(USES[family]))


def test_an_odd_number_of_heads_compiles():
    """Compiled code asserts where the outputs of an operator begin."""
    keys = dict.fromkeys(USES["ssd_mlp"], True)
    training = trained("ssd_mlp", "model.dim=96", precision="bf16", compile=True, **keys)
    rows = {row.key: row for row in training.warm_up()}
    assert rows["fused_scan"].active is True, rows["fused_scan"].evidence
    assert rows["compile"].active is True, rows["compile"].evidence


@pytest.mark.parametrize("compiled", [False, True])
def test_auto_times_a_block_and_a_second_run_remembers(compiled, monkeypatch):
    values = dict.fromkeys(KERNEL_KEYS, "auto") | {"precision": "bf16", "compile": compiled}
    first = trained(**values)
    for key in USES["mamba"]:
        found = first.kernels["found"][key]
        assert found["refusal"] is None
        assert found["times"]["on"] > 0
        assert found["kept_mb"]["on"] <= found["kept_mb"]["off"]
    assert {row.key: row.active for row in first.warm_up() if row.key in SCAN} == first.kernels[
        "chosen"
    ]
    monkeypatch.setattr(proof, "run_trials", None)
    assert trained(**values).kernels == first.kernels


def test_a_captured_run_chooses_before_its_capture(run, tmp_path):
    summary = run("runtime=max", "runtime.device=cuda")
    assert summary["ledger"]["cuda_graph"]["active"] is True
    chosen = json.loads((tmp_path / "run" / proof.KERNELS_FILE).read_text())["chosen"]
    assert {key: summary["ledger"][key]["active"] for key in chosen} == chosen
