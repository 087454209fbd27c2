"""Every Triton kernel against the definition of its operator in fp64, and the layout of its
outputs, which compiled code asserts."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from accel.kernels.add_norm.kernels_triton import choose_splits, launch_forward
from accel.kernels.ssd import decays_triton, forward_triton
from tests.harness.operators import (
    CASES,
    OF_TRITON,
    ROWS,
    Case,
    Sizes,
    as_tuple,
    make_add_norm,
    make_decays,
    make_row,
    make_scan_row,
    name_rows,
    run_both_ways,
    shorten_chunks,
)
from tests.harness.pretended_gpu import Launching

PAIRS = [(row, dtype) for row in ROWS for dtype in row.dtypes]


@pytest.mark.parametrize(("row", "dtype"), PAIRS, ids=name_rows(row for row, _ in PAIRS))
def test_kernels_equal_the_definition(row, dtype, compare, monkeypatch):
    compare(make_row(row, dtype, monkeypatch), row.factor, row.skip)


@pytest.mark.parametrize("block", [32, 64])
def test_other_tiles_of_the_scan(block, compare, monkeypatch):
    choice = (block, 4, None, 2)
    monkeypatch.setattr(forward_triton, "choose_configuration", lambda *a, **k: choice)
    compare(make_row(make_scan_row(100), torch.float32, monkeypatch))


@pytest.mark.slow
def test_512_tokens(compare, monkeypatch):
    compare(make_row(make_scan_row(512, batch=1), torch.float32, monkeypatch), factor=8.0)


def test_large_decays_do_not_round_off_the_small_ones_after_them(compare, monkeypatch):
    """Steps of 30 and of 1e-3 with A = 1e3, over 256 tokens: three digits."""
    row = make_scan_row(256, batch=1, heads=1, most_decay=1e3)
    case = make_row(row, torch.float32, monkeypatch)
    with torch.no_grad():
        case.inputs[1] += torch.where(case.inputs[1] > 1.2, 30.0, -7.0)
    compare(case, factor=200.0)


@pytest.mark.parametrize(("length", "piece"), [(1, 1), (100, 100), (300, 256), (513, 256)])
@pytest.mark.parametrize("heads", [1, 5, 24])
def test_the_prelude_and_its_gradients(length, piece, heads, compare):
    """With steps far from both limits of softplus, and at them."""
    sizes = Sizes((1, length), heads=heads, dtype=torch.float32, padding=3, bias=0.0)
    case = make_decays(sizes, piece)
    with torch.no_grad():
        case.inputs[0] *= 30.0
    compare(case)


def test_small_steps_keep_their_digits(poison):
    """softplus(-15) is 3e-7: log(1 + exp) would lose it."""
    dt = torch.full((1, 4, 2, 1), -15.0)
    zero = torch.zeros(2, 1)
    poison()
    steps, _ = decays_triton.launch_forward(dt, zero, zero, 4)
    torch.testing.assert_close(steps, torch.full_like(steps, 3.0590227e-7), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("output", [0, 1])
def test_an_output_of_add_norm_without_gradient_costs_none(output, compare):
    fused, definition, inputs, _ = make_add_norm(Sizes((7, 9), dtype=torch.float32))
    needed, rest = (inputs, []) if output == 0 else (inputs[:3], inputs[3:])
    compare(
        Case(lambda *t: fused(*t, *rest)[output], lambda *t: definition(*t, *rest)[output], needed)
    )


def test_the_stream_is_never_written_in_place():
    inputs = make_add_norm(Sizes(dtype=torch.float32)).inputs
    before = inputs[2].clone()
    launch_forward(*inputs, None, None, 1e-6, True, False)
    assert torch.equal(inputs[2], before)


@pytest.mark.parametrize(("batch", "length", "block"), [(256, 256, 2), (8, 100, 4), (2, 1, 16)])
def test_stretches_cover_every_row_once(batch, length, block):
    splits, rows = choose_splits(batch, length, block, processors=132)
    assert rows % block == 0
    assert splits * rows >= length > (splits - 1) * rows


@pytest.mark.parametrize("operator", [*OF_TRITON, "ssd in chunks"])
def test_outputs_begin_at_a_multiple_of_16_bytes_and_share_no_memory(operator, monkeypatch):
    """With an odd number of heads, half of a tensor of heads begins between two such addresses."""
    sizes = Sizes((1, 7), dtype=torch.float32)
    if operator == "ssd in chunks":
        operator = "ssd"
        sizes = Sizes((1, 39), heads=1, dtype=torch.float32)
        shorten_chunks(monkeypatch, 32)
    fused, _, inputs, _ = CASES[operator](sizes)
    with Launching() as launching:
        run_both_ways(fused, inputs)
    assert launching.calls

    # fake tensors promise compiled code where outputs lie
    for name, arguments, outputs in launching.calls:
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            promised = as_tuple(getattr(torch.ops.fastlatent, name)(*fake))
        addresses = [t.untyped_storage().data_ptr() for t in outputs if t.numel()]
        assert len(set(addresses)) == len(addresses)
        for output, expected in zip(outputs, promised, strict=True):
            assert output.storage_offset() * output.element_size() % 16 == 0, name
            assert (output.shape, output.dtype) == (expected.shape, expected.dtype), name
            assert output.stride() == expected.stride(), name
