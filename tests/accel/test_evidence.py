"""Evidence of one step: what the probe and the profiler note of it."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel.evidence import (
    EIGHT_BIT,
    FLEX_NAME,
    BlockProbe,
    Evidence,
    observe_ops,
    observe_step,
    record_events,
)
from accel.kernels.attend import attend
from accel.ledger import UNSEEN, UNUSED, LedgerRow
from accel.proof import Proof
from accel.techniques.attention_backend import AttentionBackend
from accel.techniques.cuda_graph import CudaGraph
from accel.techniques.cudnn_benchmark import CONVOLUTION, CudnnBenchmark
from accel.techniques.fused_kernels import FusedScan
from tests.harness.pretended_gpu import make_profiler_event
from tests.harness.steps import checkpoint_values, make_call, tiny_training
from tests.harness.words import CPU

CUDA = torch.device("cuda")


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
            outputs = BlockProbe(block, notes)(*inputs)
        saved[policy] = notes[-1].saved_bytes
        del outputs
    input_bytes = notes[-1].input_bytes
    hidden = block.layers[1].w2.in_features
    # The policy keeps the results of qkv, attention, out_proj, w13 and w2; attention also keeps the
    # logarithms of its sums, in fp32.
    results = size * B * L * (3 * D + D + D + 2 * hidden + D) + 4 * B * heads * L
    assert saved["blocks"] == input_bytes
    assert saved["selective"] == input_bytes + results
    assert saved[None] > saved["selective"]


# Operations of the host.


def test_a_product_counts_once_however_often_it_is_entered():
    class Entered(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            return op(*args, **(kwargs or {}))

    a = torch.randn(4, 4)
    image = torch.randn(1, 2, 4, 4, requires_grad=True)
    weight = torch.randn(2, 2, 3, 3)

    def run():
        with Entered(), torch.amp.autocast("cpu", torch.bfloat16):
            torch.mm(a, a)
            torch.nn.functional.linear(a, a, a[0])
            torch.nn.functional.conv2d(image, weight).sum().backward()

    names = ("aten::mm", "aten::addmm", "aten::convolution", "aten::convolution_backward")
    assert observe_step(run, None).products == {(name, "BFloat16"): 1 for name in names}


def test_an_8_bit_product_counts_in_the_place_of_those_around_it_and_in_it():
    eight = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scale = torch.ones(())

    def run():
        torch._scaled_mm(eight, eight.t(), scale, scale, out_dtype=torch.bfloat16)
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    assert observe_step(run, None).products == {
        (EIGHT_BIT, "Float8_e4m3fn"): 1,
        ("aten::mm", "float"): 1,
    }


def test_flex_stays_compiled_in_evaluation():
    q, k, v = torch.randn(3, 1, 2, 256, 16)
    windows = torch.randint(0, 5, (256,), dtype=torch.int32)
    # Of the four blocks of scores, two are skipped and two are masked.
    windows[:128] += 5
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        output = attend(q, k, v, "flex", windows)
        ops = observe_ops(lambda: attend(q, k, v, "flex", windows))
    assert any(op.startswith("## Call CompiledFxGraph") for op in ops)
    assert not {"aten::bmm", "aten::matmul", "aten::_softmax"} & ops.keys()
    torch.testing.assert_close(output, attend(q, k, v, "math", windows), rtol=1e-4, atol=1e-5)


# The profiler on a GPU.


def test_the_profiler_is_asked_for_a_gpus_kernels(monkeypatch):
    """Without kineto PyTorch's class records the host alone, and gives no error."""
    requested = []
    profile = torch.autograd.profiler.profile
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    activities = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    monkeypatch.setattr(torch.autograd.profiler, "_supported_activities", lambda: activities)

    def record(use_device=None, **how):
        requested.append(profile(use_device=use_device, **how).kineto_activities)
        return profile(**how)

    monkeypatch.setattr(torch.autograd.profiler, "profile", record)
    record_events(lambda: None, CUDA)
    record_events(lambda: None, CPU)
    assert requested == [activities, {torch.profiler.ProfilerActivity.CPU}]


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
    ids=lambda value: getattr(value, "key", ""),
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


def test_launches_have_the_names_of_cuda_13():
    launches = {"cudaGraphLaunch": 1, "__cudaLaunchKernel": 2, "cudaLaunchKernelExC": 3}
    evidence = Evidence(warm_ops=Counter(launches))
    assert "5 kernels launched one by one" in CudaGraph(True, CUDA).observe(evidence).evidence


@pytest.mark.parametrize("blocks", [0, 1])
def test_what_compiles_itself_is_no_compiled_block(blocks, monkeypatch):
    """torchao's optimizers and FlexAttention compile themselves, in runs whose blocks are not
    compiled."""
    regions = [
        ("Optimizer.step#AdamW4bit.step", 10, 30),
        ("Torch-Compiled Region: 0/0", 15, 20),
        (FLEX_NAME, 50, 20),
        ("Torch-Compiled Region: 1/0", 55, 10),
        ("Torch-Compiled Region: 2/0", 80, 5),
    ]
    events = []
    for name, start, length in regions[: 4 + blocks]:
        event = make_profiler_event(name)
        event.start_ns = lambda start=start: start
        event.duration_ns = lambda length=length: length
        events.append(event)
    assert observe_events(events, monkeypatch, CPU).compiled_calls == blocks
