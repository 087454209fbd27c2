"""Attention with `auto` on a CPU: what it chooses, and that each choice equals the definition."""

import pytest
import torch

from accel.evidence import observe_step
from accel.kernels.attention.attend import MAX_PRODUCT_TOKENS, attend
from scripts.plan.counting import count_pass
from tests.harness.steps import compile_values, ledger_of, tiny_training

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
PRODUCT = "aten::baddbmm"
LONG = MAX_PRODUCT_TOKENS + 1
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def make_groups(tokens):
    return torch.arange(tokens, dtype=torch.int32) % 3


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tokens", "chosen"),
    [
        (torch.bfloat16, 16, PRODUCT),
        (torch.bfloat16, MAX_PRODUCT_TOKENS, PRODUCT),
        (torch.bfloat16, LONG, FLASH),
        (torch.float32, 16, FLASH),
        (torch.float16, 16, FLASH),
    ],
)
def test_auto_on_a_cpu_chooses_by_dtype_and_length(dtype, tokens, chosen, grouped):
    groups = make_groups(tokens) if grouped else None
    # As in a layer, heads lie within tokens.
    qkv = torch.randn(3, 2, tokens, 3, 16).to(dtype).transpose(2, 3).requires_grad_()
    grad = torch.randn(2, 3, tokens, 16).to(dtype)

    def run():
        y = attend(*qkv, groups=groups)
        return y, torch.autograd.grad(y, qkv, grad)[0]

    ops = observe_step(run, None).ops
    assert [op for op in (FLASH, PRODUCT) if op in ops] == [chosen]

    exact = qkv.detach().double().requires_grad_()
    scores = exact[0] @ exact[1].mT / 4.0
    if grouped:
        scores = scores.masked_fill(groups[:, None] != groups, -torch.inf)
    y = scores.softmax(-1) @ exact[2]
    expected = (y, torch.autograd.grad(y, exact, grad.double())[0])
    for found, value in zip(run(), expected, strict=True):
        assert found.dtype == dtype
        assert (found.double() - value).norm() < ROUNDING[dtype] * value.norm()


@pytest.mark.parametrize("grouped", [False, True])
def test_products_compile_as_one_graph_and_do_not_see_the_batch(grouped):
    groups = make_groups(16) if grouped else None
    q, k, v = torch.randn(3, 8, 2, 16, 32, dtype=torch.bfloat16)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    expected = attend(q, k, v, groups=groups)
    assert torch.equal(compiled(q, k, v, groups=groups), expected)
    assert torch.equal(attend(q[3:4], k[3:4], v[3:4], groups=groups), expected[3:4])


@pytest.mark.usefixtures("quick_compiler", "any_precision")
@pytest.mark.parametrize(
    ("asked", "active", "scope"),
    [("auto", "products", None), ("auto", "products", "blocks"), ("math", "math", None)],
)
def test_the_ledger_tells_products_from_a_kernel(asked, active, scope):
    values = {"attention": asked, "precision": "bf16"} | compile_values(scope)
    row = ledger_of("dit", **values)["attention"]
    assert (row.active, row.missing) == (active, False)
    assert f"{active} in 2 of 2 layers" in row.evidence


@pytest.mark.usefixtures("any_precision")
def test_a_plan_for_a_gpu_counts_no_scores():
    def count(attention, gpu):
        training = tiny_training("dit", precision="bf16", attention=attention)
        return count_pass(training.cfg, training.loader.spec, gpu).kept

    assert count("auto", True) == count("flash", False) != count("auto", False)
