"""`attention=flash3` and `flash4`: which kernels PyTorch is told to use, and which it says it uses.

PyTorch's own registry is asked, with implementations planted in it that have no kernels: on a CPU
there are none.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn import attention

from accel.evidence import BlockEvidence, Evidence
from accel.techniques import attention_backend
from accel.techniques.attention_backend import FLASH, AttentionBackend
from tests.harness.steps import assemble
from tests.harness.words import CPU

CUDA = torch.device("cuda")


class Handle:
    """Of planted kernels; counts those that are in place."""

    active = 0

    def __init__(self):
        Handle.active += 1

    def remove(self):
        Handle.active -= 1


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    """Both implementations can be had, on any machine."""
    monkeypatch.setattr(
        attention._registry, "_FLASH_ATTENTION_IMPLS", {"FA3": Handle, "FA4": Handle}
    )
    monkeypatch.setattr(
        attention_backend, "find_implementation_obstacle", lambda wanted, device: None
    )
    yield
    attention.restore_flash_attention_impl(_raise_warn=False)
    assert Handle.active == 0


def observed(value, op=FLASH, layers=2):
    """What the ledger says of two attention layers in whose block `op` ran twice."""
    technique = AttentionBackend(value, CUDA)
    technique.on_process()
    technique.layers = [[torch.nn.Identity()] * layers]
    call = BlockEvidence(
        1, 2, torch.float32, torch.float32, (True, True), frozenset(), Counter({op: layers})
    )
    return technique.observe(Evidence(blocks=[[call]]))


def test_the_values_are_set_both_ways():
    for value, name in (
        ("flash3", "FA3"),
        ("flash4", "FA4"),
        ("flash3", "FA3"),
        ("flash", None),
        ("auto", None),
    ):
        AttentionBackend(value, CUDA).on_process()
        assert attention.current_flash_attention_impl() == name
        assert Handle.active == (name is not None)


def test_the_ledger_names_the_kernels_that_pytorch_reports(monkeypatch):
    assert observed("flash3").active == "flash3"
    assert observed("flash3").evidence == "flash3 in 2 of 2 layers; PyTorch says that FA3 is active"
    assert observed("flash4").active == "flash4"
    assert observed("flash") == ("flash", "flash in 2 of 2 layers")
    # another backend ran
    assert observed("flash3", op="aten::_scaled_dot_product_attention_math").active == "math"
    monkeypatch.setattr(AttentionBackend, "on_process", lambda self: None)
    attention.restore_flash_attention_impl(_raise_warn=False)
    assert observed("flash3").active == "flash"  # never activated
    attention.activate_flash_attention_impl("FA4")
    assert observed("flash").active == "flash4"  # and one that nobody asked for


def test_on_a_cpu_no_such_kernel_is_claimed():
    """Where the registry says FA3 and the op of the CPU ran."""
    assert (
        observed("flash3", op="aten::_scaled_dot_product_flash_attention_for_cpu").active == "flash"
    )


def test_layers_ask_for_flash_and_a_refusal_brings_back_pytorchs_own(monkeypatch):
    model, step, stack, loader = assemble("dit", attention="flash3")
    assert {block.layers[0].attention_backend for block in model.blocks} == {"flash"}
    own = step.forward
    refused = []

    def refusing(*inputs):
        if attention.current_flash_attention_impl():
            refused.append(True)
            raise RuntimeError("FA3 SDPA forward unsupported: inputs must be CUDA tensors")
        return own(*inputs)

    step.forward = refusing
    with pytest.warns(UserWarning, match="flash3 attention does not take"):
        ledger = stack.warm_up(lambda: step([next(loader)]), model.blocks)
    row = next(r for r in ledger if r.key == "attention")
    assert (row.active, row.missing, refused) == ("flash", True, [True])
    assert attention.current_flash_attention_impl() is None


def test_a_package_that_does_not_load_is_a_sentence(monkeypatch):
    def broken():
        raise ImportError("libcudart.so.12: cannot open shared object file\nmore")

    monkeypatch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, "FA3", broken)
    with pytest.raises(
        ValueError, match=r"^runtime\.attention=flash3: .*libcudart.*; reinstall it or use [^\n]*$"
    ):
        AttentionBackend("flash3", CUDA).on_process()


@pytest.mark.parametrize(
    ("value", "device", "capability", "listed", "package", "sentence"),
    [
        (
            "flash3",
            CPU,
            None,
            True,
            True,
            "FlashAttention-3 needs an NVIDIA GPU; this run is on cpu; ",
        ),
        ("flash3", CUDA, (10, 0), True, True, "FlashAttention-3 needs compute capability 9.x; "),
        (
            "flash4",
            CUDA,
            (12, 0),
            True,
            True,
            "FlashAttention-4 needs compute capability 9.x or 10.x; ",
        ),
        ("flash4", CUDA, (9, 0), False, True, "does not list FA4; "),
        (
            "flash3",
            CUDA,
            (9, 0),
            True,
            False,
            "needs flash_attn_interface, which is not installed: build it from",
        ),
        ("flash4", CUDA, (10, 0), True, False, "not installed: pip install flash-attn-4, or "),
        ("flash4", CUDA, (10, 3), True, True, None),
    ],
)
def test_what_they_need_is_said_in_a_sentence(
    value, device, capability, listed, package, sentence, monkeypatch
):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        attention_backend, "list_flash_attention_impls", lambda: ["FA3", "FA4"] if listed else []
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if package else None)
    found = AttentionBackend(value, device).find_obstacle()
    assert found is None if sentence is None else sentence in found
    assert (
        sentence is None
        or found.endswith("use runtime.attention=flash on this GPU.")
        or found.endswith("=flash.")
    )


def test_a_package_without_the_module_is_not_installed():
    assert attention_backend.is_installed("json.decoder")
    assert not attention_backend.is_installed("json.cute.interface")
    assert not attention_backend.is_installed("no_such_package.cute")


def test_both_are_known_to_this_pytorch(monkeypatch):
    monkeypatch.undo()
    names = {found.name for found in attention_backend.IMPLEMENTATIONS.values()}
    assert names == set(attention.list_flash_attention_impls())
