"""Kernels prove themselves on a GPU; `pytest -m gpu` runs these tests."""

import pytest
import torch

from accel.trial import kernels
from common.config.schema import KERNEL_KEYS
from common.files import read_object
from tests.harness.steps import read_ledger, tiny_training

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("empty_cache")]
SCAN = ("fused_add_norm", "fused_scan", "fused_conv")
USES = {
    "mamba": SCAN,
    "zigzag": SCAN,
    "ssd_mlp": (*SCAN, "fused_swiglu"),
    "conv": ("fused_add_norm", "fused_conv", "fused_swiglu"),
    "dit": ("fused_add_norm", "fused_swiglu", "fused_rope"),
}


def assemble_on_gpu(family="mamba", *words, **values):
    words = ["data=synthetic", "batch_size=16", *words]
    return tiny_training(family, *words, device=torch.device("cuda"), **values)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("family", USES)
def test_every_kernel_passes_its_parity_test(family, precision):
    training = assemble_on_gpu(family, **dict.fromkeys(KERNEL_KEYS, True), precision=precision)
    rows = read_ledger(training)
    for key in USES[family]:
        assert training.kernels["found"][key]["refusal"] is None
        assert rows[key].active is True, rows[key].evidence
    assert all(rows[key].active == "unused" for key in set(KERNEL_KEYS) - set(USES[family]))


def test_an_odd_number_of_heads_compiles():
    """Compiled code asserts how the outputs of an operator are aligned."""
    keys = dict.fromkeys(USES["ssd_mlp"], True)
    training = assemble_on_gpu("ssd_mlp", "model.dim=96", precision="bf16", compile=True, **keys)
    rows = read_ledger(training)
    assert rows["fused_scan"].active is True, rows["fused_scan"].evidence
    assert rows["compile"].active is True, rows["compile"].evidence


@pytest.mark.parametrize("compiled", [False, True])
def test_auto_times_a_block_and_a_second_run_remembers(compiled, monkeypatch):
    values = dict.fromkeys(KERNEL_KEYS, "auto") | {"precision": "bf16", "compile": compiled}
    first = assemble_on_gpu(**values)
    for key in USES["mamba"]:
        found = first.kernels["found"]
        assert found[key]["refusal"] is None
        assert found[f"{key}, timed"]["on_ms"] > 0
    rows = read_ledger(first)
    assert {key: rows[key].active for key in SCAN} == first.kernels["chosen"]
    monkeypatch.setattr(kernels, "ask_child", None)
    assert assemble_on_gpu(**values).kernels == first.kernels


def test_a_captured_run_chooses_before_its_capture(run, run_dir):
    summary = run("runtime=max", "runtime.device=cuda")
    assert summary["ledger"]["cuda_graph"]["active"] is True
    chosen = read_object(run_dir / kernels.KERNELS_FILE)["chosen"]
    assert {key: summary["ledger"][key]["active"] for key in chosen} == chosen
