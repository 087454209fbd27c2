"""`attention=flash3` and `flash4`: the kernels that PyTorch uses on request, and those it reports.

The tests ask PyTorch's own registry, with planted implementations that have no kernels, so that
they run on a CPU.
"""

from collections import Counter

import pytest
import torch
from torch.nn import attention

from accel.evidence import Evidence
from accel.machine import is_installed
from accel.techniques import attention_backend
from accel.techniques.attention_backend import FLASH, AttentionBackend
from tests.harness.steps import assemble, make_call
from tests.harness.words import CPU, CUDA


class Handle:
    """Planted kernels; counts the activated ones."""

    active = 0

    def __init__(self):
        Handle.active += 1

    def remove(self):
        Handle.active -= 1


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    """Makes both implementations available on any machine."""
    monkeypatch.setattr(
        attention._registry, "_FLASH_ATTENTION_IMPLS", {"FA3": Handle, "FA4": Handle}
    )
    monkeypatch.setattr(
        attention_backend, "find_implementation_obstacle", lambda wanted, device: None
    )
    yield
    attention.restore_flash_attention_impl(_raise_warn=False)
    assert Handle.active == 0


def observe(value, op=FLASH):
    """The ledger's row for two attention layers in whose block `op` ran twice."""
    technique = AttentionBackend(value, CUDA)
    technique.on_process()
    technique.layers = [[torch.nn.Identity()] * 2]
    calls = [make_call(ops=Counter({op: 2}))]
    return technique.observe(Evidence(Counter([f"{op}_backward"]), blocks=[calls]))


def test_the_values_are_set_both_ways():
    for value, name in (("flash3", "FA3"), ("flash4", "FA4"), ("flash", None)):
        AttentionBackend(value, CUDA).on_process()
        assert attention.current_flash_attention_impl() == name
        assert Handle.active == (name is not None)


@pytest.mark.parametrize(
    ("value", "op", "active"),
    [
        ("flash3", FLASH, "flash3"),
        ("flash", FLASH, "flash"),
        ("flash3", "aten::_scaled_dot_product_attention_math", "math"),
        # the registry names FA3 while the op of the CPU ran
        ("flash3", "aten::_scaled_dot_product_flash_attention_for_cpu", "flash"),
    ],
)
def test_the_ledger_names_the_kernels_that_pytorch_reports(value, op, active):
    assert observe(value, op).active == active


def test_the_ledger_believes_pytorch_and_not_the_request(monkeypatch):
    assert observe("flash3").evidence == "flash3 in 2 of 2 layers; PyTorch says that FA3 is active"
    attention.restore_flash_attention_impl(_raise_warn=False)
    monkeypatch.setattr(AttentionBackend, "on_process", lambda self: None)
    assert observe("flash3").active == "flash"
    attention.activate_flash_attention_impl("FA4")
    assert observe("flash").active == "flash4"


def test_layers_ask_for_flash_and_a_refusal_brings_back_pytorchs_own():
    model, step, stack, loader = assemble("dit", attention="flash3")
    assert model.blocks[0].layers[0].attention_backend == "flash"
    forward = step.forward

    def refuse(*inputs):
        if attention.current_flash_attention_impl():
            raise RuntimeError("FA3 SDPA forward unsupported: inputs must be CUDA tensors")
        return forward(*inputs)

    step.forward = refuse
    with pytest.warns(UserWarning, match="flash3 attention does not take"):
        ledger = stack.warm_up(lambda: step([next(loader)]), model.blocks)
    row = next(r for r in ledger if r.key == "attention")
    assert (row.active, row.missing) == ("flash", True)
    assert attention.current_flash_attention_impl() is None


def test_a_package_that_does_not_load_is_a_sentence(monkeypatch):
    def fail():
        raise ImportError("libcudart.so.12\nmore")

    monkeypatch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, "FA3", fail)
    with pytest.raises(
        ValueError, match=r"^runtime\.attention=flash3: .*libcudart.*; reinstall it or use [^\n]*$"
    ):
        AttentionBackend("flash3", CUDA).on_process()


@pytest.mark.parametrize(
    ("value", "capability", "absent", "sentence"),
    [
        ("flash3", (10, 0), None, "FlashAttention-3 needs compute capability 9.x; "),
        ("flash4", (12, 0), None, "FlashAttention-4 needs compute capability 9.x or 10.x; "),
        ("flash4", (9, 0), "listing", "does not list FA4; "),
        ("flash3", (9, 0), "package", "needs flash_attn_interface, which is not installed"),
    ],
)
def test_what_they_need_is_said_in_a_sentence(value, capability, absent, sentence, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    listed = [] if absent == "listing" else ["FA3", "FA4"]
    monkeypatch.setattr(attention_backend, "list_flash_attention_impls", lambda: listed)
    package = None if absent == "package" else object()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: package)
    obstacle = AttentionBackend(value, CUDA).find_obstacle()
    assert sentence in obstacle
    assert "use runtime.attention=flash" in obstacle
    assert "this run is on cpu" in AttentionBackend(value, CPU).find_obstacle()


def test_a_package_without_the_module_is_not_installed():
    assert is_installed("json.decoder")
    assert not is_installed("json.cute.interface")
    assert not is_installed("no_such_package.cute")


def test_both_are_known_to_this_pytorch(monkeypatch):
    monkeypatch.undo()
    names = {implementation.name for implementation in attention_backend.IMPLEMENTATIONS.values()}
    assert names == set(attention.list_flash_attention_impls())
