"""Evidence of one step: what the probe and the profiler note of it."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode

from accel.evidence import BlockProbe, Evidence, observe_step
from accel.kernels.attention.attend import attend
from accel.ledger import UNSEEN, UNUSED, LedgerRow
from accel.techniques.attention_backend import AttentionBackend
from accel.techniques.cuda_graph import CudaGraph
from accel.techniques.cudnn_benchmark import CONVOLUTION, CudnnBenchmark
from accel.techniques.fused_kernels import FusedScan, Proof
from tests.harness.pretended_gpu import make_profiler_event
from tests.harness.steps import checkpoint_values, make_call, tiny_training
from tests.harness.words import CPU, CUDA

# The probe.


def test_the_probe_leaves_the_model_as_it_was():
    training = tiny_training()
    modules = list(training.model.blocks)
    evidence = observe_step(training.take_step, training.model.blocks)
    assert list(training.model.blocks) == modules
    assert [len(calls) for calls in evidence.blocks] == [1, 1]
    with pytest.raises(ZeroDivisionError):
        observe_step(lambda: 1 / 0, training.model.blocks)
    assert list(training.model.blocks) == modules


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_the_kept_bytes_are_those_of_inputs_and_of_kept_results(precision, size):
    B = 8
    L = 16
    D = 64
    heads = 2
    shapes = ((B, L, D), (B, D), (B, L, D), (B, 6, D))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    saved = {}
    for policy in (None, "blocks", "selective"):
        block = tiny_training("dit", **checkpoint_values(policy)).model.blocks[1]
        notes = []
        with torch.amp.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            # While the outputs live, so does what the block keeps.
            outputs = BlockProbe(block, notes)(*inputs, grid=(4, 4))
        saved[policy] = notes[-1].saved_bytes
        del outputs
    input_bytes = notes[-1].input_bytes
    hidden = block.layers[1].w2.in_features
    # The policy keeps the results of qkv, attention, out_proj, w13 and w2. Attention also keeps the
    # logarithms of its sums in fp32; or, computed by products in bf16, its scores.
    results = size * B * L * (3 * D + D + D + 2 * hidden + D)
    results += B * heads * L * (size * L if precision == "bf16" else 4)
    assert saved["blocks"] == input_bytes == sum(tensor.nbytes for tensor in inputs)
    assert saved["selective"] == input_bytes + results
    assert saved[None] > saved["selective"]


# Operations of the host.


def test_a_product_counts_once_however_often_it_is_entered():
    a = torch.randn(4, 4)
    image = torch.randn(1, 2, 4, 4, requires_grad=True)
    weight = torch.randn(2, 2, 3, 3)

    def run():
        with BaseTorchDispatchMode(), torch.amp.autocast("cpu", torch.bfloat16):
            torch.mm(a, a)
            torch.nn.functional.linear(a, a, a[0])
            torch.nn.functional.conv2d(image, weight).sum().backward()

    names = ("aten::mm", "aten::addmm", "aten::convolution", "aten::convolution_backward")
    assert observe_step(run, None).products == {(name, "BFloat16"): 1 for name in names}


@pytest.mark.slow
def test_flex_stays_compiled_in_evaluation():
    q, k, v = torch.randn(3, 1, 2, 256, 16)
    windows = torch.randint(0, 5, (256,), dtype=torch.int32)
    # Of the four blocks of scores, two are skipped and two are masked.
    windows[:128] += 5
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        output = attend(q, k, v, "flex", windows)
        evidence = observe_step(lambda: attend(q, k, v, "flex", windows), None)
    assert any(op.startswith("## Call CompiledFxGraph") for op in evidence.ops)
    assert not {"aten::bmm", "aten::matmul", "aten::_softmax"} & evidence.ops.keys()
    # It compiles itself, which makes no compiled block.
    assert evidence.compiled_calls == 0
    torch.testing.assert_close(output, attend(q, k, v, "math", windows), rtol=1e-4, atol=1e-5)


# The profiler on a GPU.


def observe_events(events, monkeypatch, device=CUDA):
    """The evidence of a step of which the profiler recorded `events`."""
    monkeypatch.setattr("accel.evidence.record_events", lambda run, device: events)
    return observe_step(lambda: None, None, device)


def test_a_gpu_whose_kernels_nobody_saw_is_not_an_idle_one(monkeypatch):
    host = [make_profiler_event("aten::mm"), make_profiler_event("step", annotation=True)]
    kernels = [
        make_profiler_event("ssd_kernel", on_gpu=True),
        make_profiler_event("step", on_gpu=True, annotation=True),
    ]
    seen = observe_events(host + kernels, monkeypatch)
    assert (seen.kernels_unseen, seen.busy_ms) == (False, 1.0)
    # The device repeats the host's annotations.
    assert (seen.ops["ssd_kernel"], seen.ops["step"]) == (1, 1)
    for device, unseen in ((CUDA, True), (CPU, False)):
        evidence = observe_events(host, monkeypatch, device)
        assert (evidence.kernels_unseen, evidence.busy_ms) == (unseen, None)


@pytest.mark.parametrize(
    ("technique", "op", "off"),
    [
        (FusedScan(True, CUDA), "fastlatent::ssd_gated", False),
        (CudaGraph(True, CUDA), "aten::copy_", False),
        (AttentionBackend("flex", CUDA), "Torch-Compiled Region: 0/0", "math"),
        (CudnnBenchmark(True, CUDA), CONVOLUTION, UNUSED),
    ],
)
def test_where_no_kernel_was_seen_nothing_is_said_to_be_off(technique, op, off):
    """`on_unavailable=error` would end good runs beside another profiler, or in a container without
    permission."""
    technique.switches = [torch.nn.Identity()]
    technique.layers = [technique.switches]
    technique.proof = Proof(True, "proved")
    evidence = Evidence(ops=Counter([op]), blocks=[[make_call(ops=Counter([op]))]])
    assert technique.observe(evidence).active == off
    evidence.kernels_unseen = True
    active, note = technique.observe(evidence)
    assert active == UNSEEN
    assert "saw no kernel" in note
    assert not LedgerRow(technique.key, technique.value, active, note).missing


def test_an_optimizer_that_compiles_itself_is_no_compiled_block(monkeypatch):
    """torchao's optimizers do."""
    names = ("Optimizer.step#AdamW4bit.step", "Torch-Compiled Region: 0/0")
    events = [make_profiler_event(name) for name in names]
    assert observe_events(events, monkeypatch, CPU).compiled_calls == 0
