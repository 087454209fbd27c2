"""What a GPU would break, seen on a CPU: captured steps, grids, what the profiler is asked, devices
of a step."""

from __future__ import annotations

import importlib
import pkgutil
import tomllib
import warnings
from collections import Counter
from copy import deepcopy

import pytest
import torch
from torch._subclasses import FakeTensorMode

import accel.kernels
from accel.evidence import FLEX, BlockEvidence, Evidence, observe_step, record_events
from accel.kernels.add_norm import fused_add_norm
from accel.kernels.counter_noise import Purpose
from accel.kernels.fused_ssd import fused_bidirectional_ssd
from accel.kernels.local_mix import fused_local_mix
from accel.kernels.operator import MOST_SAMPLES, OPERATORS
from accel.kernels.qk_rope import fused_qk_rope
from accel.kernels.swiglu import fused_swiglu
from accel.ledger import UNSEEN, UNUSED, LedgerRow
from accel.proof import Proof
from accel.techniques.attention_backend import AttentionBackend
from accel.techniques.cuda_graph import CapturedUpdate, CudaGraph
from accel.techniques.cudnn_benchmark import CONVOLUTION, CudnnBenchmark
from accel.techniques.fused_kernels import FusedScan
from common.files import ROOT
from data.loader import Batch
from tests.harness.pretended_gpu import Launching, backward, pretend_graphs, profiler_event
from tests.harness.steps import allow_any_precision, tiny_training
from tests.harness.words import CPU

CUDA = torch.device("cuda")


# A captured step.

STEPS = {
    "plain": ([], {}),
    "accumulation": (["accumulation_steps=2"], {}),
    "fp16": ([], {"precision": "fp16"}),
    "spikes and drop path": (
        ["guards.spike_sigmas=6", "guards.spike_window=8", "model.drop_path=0.1"],
        {},
    ),
    "bf16 weights, stochastic": ([], {"weights": "bf16"}),
    "bf16 weights, Kahan": (["runtime.rounding=kahan"], {"weights": "bf16"}),
    "checkpointing": ([], {"gradient_checkpointing": True}),
    "Adam": (["optim._target_=torch.optim.Adam"], {}),
}


def told(output) -> list[float]:
    return [float(scalar) for scalar in output]


def trained(words, values, graph, change=lambda training: None):
    """Outputs of a run that evaluates, is changed, goes on, and goes back to a checkpoint of its
    own."""
    training = tiny_training("mamba", *words, fused_adamw=True, cuda_graph=graph, **values)
    training.warm_up()
    # a full window, in which the first norm is a spike and is skipped
    if training.step.spikes is not None:
        training.step.spikes.norms.copy_(1e-6 * torch.arange(8))
        training.step.spikes.count.fill_(8)
    outputs = [told(training.take_step()) for _ in range(3)]
    batch = next(training.loader)
    with training.state.averaged(), torch.no_grad():
        outputs.append(training.step.losses(batch)[0].tolist())
    checkpoint = deepcopy(training.state.state_dict())
    change(training)
    outputs += [told(training.take_step()) for _ in range(2)]
    training.state.load_state_dict(checkpoint)
    outputs += [told(training.take_step()) for _ in range(2)]
    return outputs, training


@pytest.mark.parametrize("kind", STEPS)
def test_a_replayed_step_does_what_the_step_does(kind, monkeypatch):
    """Bit for bit, through an evaluation and a resume in place: no tensor of the step has moved."""
    allow_any_precision(monkeypatch)
    pretend_graphs(monkeypatch)
    words, values = STEPS[kind]
    expected, _ = trained(words, values, graph=False)
    found, training = trained(words, values, graph=True)
    assert found == expected
    assert found[4:6] == found[6:8]
    assert training.step.update.graph.replays == 9  # two of them in warm-up


def test_a_tensor_that_is_replaced_is_seen_in_a_replay(monkeypatch):
    """What the test above rests on: a replay goes on with the tensors of its capture."""
    pretend_graphs(monkeypatch)

    def replace(training):
        for state in training.step.optimizer.state.values():
            state["exp_avg"] = 3.0 * state["exp_avg"]

    assert trained([], {}, True, replace)[0][5:6] != trained([], {}, False, replace)[0][5:6]


def test_a_failed_capture_leaves_its_stream(monkeypatch):
    """PyTorch's own context does not leave it: what followed in the process would run there."""
    streams = pretend_graphs(monkeypatch)
    update = CapturedUpdate(lambda batches: (batches[0][0].sum().item(),), CPU)
    batches = [Batch(*torch.ones(4, 1))]
    update(batches)
    update.armed = True
    with pytest.raises(ValueError, match=r"cannot be captured \(operation not permitted"):
        update(batches)
    assert streams.current == "default"


# What the profiler is asked, and what it means if it sees nothing.


def test_the_profiler_is_asked_for_a_gpus_kernels(monkeypatch):
    """Without kineto this class of PyTorch's records the host alone, and gives no error."""
    asked = []
    own = torch.autograd.profiler.profile
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    activities = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    monkeypatch.setattr(torch.autograd.profiler, "_supported_activities", lambda: activities)

    def recorder(use_device=None, **how):
        asked.append(own(use_device=use_device, **how).kineto_activities)
        return own(**how)

    monkeypatch.setattr(torch.autograd.profiler, "profile", recorder)
    record_events(lambda: None, CUDA)
    record_events(lambda: None, CPU)
    assert asked == [activities, {torch.profiler.ProfilerActivity.CPU}]


def observed_as(events, monkeypatch, device=CUDA) -> Evidence:
    monkeypatch.setattr("accel.evidence.record_events", lambda run, device: events)
    return observe_step(lambda: None, None, device)


def test_a_gpu_whose_kernels_nobody_saw_is_not_an_idle_one(monkeypatch):
    host = [profiler_event("aten::mm"), profiler_event("step", annotation=True)]
    kernels = [
        profiler_event("ssd_kernel", on_gpu=True),
        profiler_event("step", on_gpu=True, annotation=True),
    ]
    seen = observed_as(host + kernels, monkeypatch)
    unseen = observed_as(host, monkeypatch)
    assert (seen.kernels_unseen, seen.busy_ms) == (False, 1.0)
    # the device repeats the host's annotations
    assert (seen.ops["ssd_kernel"], seen.ops["step"]) == (1, 1)
    assert (unseen.kernels_unseen, unseen.busy_ms) == (True, None)
    on_cpu = observed_as(host, monkeypatch, CPU)
    assert (on_cpu.kernels_unseen, on_cpu.busy_ms) == (False, None)


def evidence_of(unseen: bool, *ops: str) -> Evidence:
    call = BlockEvidence(
        1, 2, torch.float32, torch.float32, (True, True), frozenset(), Counter(ops)
    )
    return Evidence(ops=Counter(ops), blocks=[[call]], kernels_unseen=unseen)


@pytest.mark.parametrize("key", ["fused_scan", "cuda_graph", "flex", "cudnn_benchmark"])
def test_where_no_kernel_was_seen_nothing_is_said_to_be_off(key):
    """`on_unavailable=error` would end good runs beside another profiler, or in a container without
    permission."""
    if key == "fused_scan":
        technique = FusedScan(True, CUDA)
        technique.switches = [torch.nn.Identity()]
        technique.proof = Proof(True, "proved")
        op = "fastlatent::ssd_gated"
        off = False
    elif key == "cuda_graph":
        technique = CudaGraph(True, CUDA)
        op = "aten::copy_"
        off = False
    elif key == "flex":
        technique = AttentionBackend("flex", CUDA)
        op = "Torch-Compiled Region: 0/0"
        off = "math"
        technique.layers = [[torch.nn.Identity()]]
    else:
        technique = CudnnBenchmark(True, CUDA)
        op = CONVOLUTION
        off = UNUSED
    unseen, seen = (technique.observe(evidence_of(unseen, op)) for unseen in (True, False))
    assert (unseen.active, seen.active) == (UNSEEN, off)
    assert "saw no kernel" in unseen.evidence
    assert not LedgerRow(key, technique.value, UNSEEN, "").missing


def test_launches_have_the_names_of_cuda_13():
    evidence = Evidence(
        warm_ops=Counter({"cudaGraphLaunch": 1, "__cudaLaunchKernel": 2, "cudaLaunchKernelExC": 3})
    )
    assert "5 kernels launched one by one" in CudaGraph(True, CUDA).observe(evidence).evidence


def test_what_compiles_itself_is_no_compiled_block(monkeypatch):
    """Optimizers of torchao and FlexAttention compile themselves; the run's blocks run as they
    are."""

    def compiled(*regions):
        events = [("Optimizer.step#AdamW4bit.step", 10, 30), (FLEX, 50, 20), *regions]
        found = []
        for name, start, length in sorted(events, key=lambda event: event[1]):
            event = profiler_event(name)
            event.start_ns = lambda start=start: start
            event.duration_ns = lambda length=length: length
            found.append(event)
        return observed_as(found, monkeypatch, CPU).compiled_calls

    inside = [("Torch-Compiled Region: 0/0", 15, 20), ("Torch-Compiled Region: 1/0", 55, 10)]
    assert compiled(*inside) == 0
    assert compiled(*inside, ("Torch-Compiled Region: 2/0", 80, 5)) == 1


# A grid has 65,535 programs in its second and third dimension.


@pytest.fixture
def grids(monkeypatch):
    """The grids of all launches; nothing is launched."""
    pytest.importorskip("triton")
    found = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **how: found.append((self.name, grid))

    for info in pkgutil.iter_modules(accel.kernels.__path__):
        if info.name.endswith("_triton"):
            module = importlib.import_module(f"accel.kernels.{info.name}")
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                monkeypatch.setattr(module, name, Kernel(name))
    return found


def largest(samples: int, length: int = 4):
    """Every operator on so many samples, forward and backward, on tensors without memory."""

    def normal(*shape):
        return torch.empty(*shape, device="meta", requires_grad=True)

    B = samples
    L = length
    K = 2
    P = 16
    N = 16
    D = 32
    heads = normal(B, L, K, P)
    decays = (normal(B, L, 2, K), normal(2, K), normal(2, K))
    scan = (
        heads,
        *decays,
        normal(B, L, 2, N),
        normal(B, L, 2, N),
        normal(K),
        normal(B, L, K, P),
        normal(K, P),
    )
    yield fused_bidirectional_ssd(*scan)
    yield fused_add_norm(normal(B, L, D), normal(B, D), normal(B, L, D), normal(B, D), normal(B, D))
    yield fused_local_mix(normal(B, L, D), normal(D, 1, 1, 3), normal(D), (1, L))
    yield fused_swiglu(normal(B, L, 2 * D))
    yield fused_qk_rope(normal(B, L, 3, K, P), normal(P), normal(P), None)


def launched_both_ways(samples: int, length: int) -> Launching:
    """What was called while every operator ran forward and backward."""
    launching = Launching()
    with launching:
        for outputs in largest(samples, length):
            backward(outputs)
    return launching


@pytest.mark.parametrize(("samples", "length"), [(MOST_SAMPLES, 4), (MOST_SAMPLES // 4, 1024)])
def test_the_largest_batch_can_be_launched(samples, length, grids):
    launched_both_ways(samples, length)
    from accel.kernels.counter_noise_triton import launch

    launch("normal", 0, Purpose.NOISE, torch.empty(200_000, dtype=torch.int64, device="meta"), 4096)
    wide = [(name, grid) for name, grid in grids if max([1, *grid[1:]]) > MOST_SAMPLES]
    assert not wide
    launched = {name for name, _ in grids}
    assert {
        "ssd_decays_backward_kernel",
        "add_norm_backward_kernel",
        "counter_noise_kernel",
    } <= launched
    assert ("ssd_read_kernel" in launched) == (length == 1024)


def test_a_batch_that_cannot_be_launched_is_refused_in_a_sentence(grids):
    with (
        Launching(),
        pytest.raises(
            ValueError, match=r"ssd_decays got 80,000 samples, or chunks of samples, .* 65,535"
        ),
    ):
        next(largest(80_000))
    with (
        Launching(),
        pytest.raises(ValueError, match=r"ssd got 80,000 samples, or chunks of samples"),
    ):
        next(largest(20_000, 1024))
    assert {name for name, _ in grids} == {"ssd_decays_kernel"}


def test_every_operator_with_a_kernel_is_launched(grids):
    """So none is left out of the tests above."""
    launched = {name for length in (4, 1024) for name, _, _ in launched_both_ways(2, length).calls}
    with_kernel = {
        name
        for name, operator in OPERATORS.items()
        if operator.kernel and not name.startswith("planted")
    }
    # The scan has the norm in its epilogue; the kernel of the others is mamba-ssm's.
    others = {"gated_norm", "selective_scan", "selective_scan_backward"}
    assert with_kernel - launched <= others


# Two devices.


@pytest.mark.parametrize("words", [[], ["guards.spike_sigmas=6"]])
def test_parameters_on_the_host_train_with_a_loss_on_the_gpu(words, monkeypatch):
    """`parallel.cpu_offload` keeps them there. On tensors that only pretend to be on a GPU, up to
    the update."""
    training = tiny_training("mamba", *words, fused_adamw=True)
    step = training.step
    seen = []
    if step.spikes is not None:
        step.spikes.norms = step.spikes.norms.clone()
    batch = next(training.loader)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        on_gpu = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in batch]
        monkeypatch.setattr(step, "losses", lambda batch: (torch.empty(8, device="cuda"), None))
        monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)
        monkeypatch.setattr(step.ema, "update", lambda weight: seen.append(weight.device.type))
        if step.spikes is not None:
            for name in ("norms", "count"):
                like = getattr(step.spikes, name)
                setattr(step.spikes, name, torch.zeros(like.shape, dtype=like.dtype, device="cuda"))

        def update():
            seen.extend(
                t.device.type for t in (step.optimizer.grad_scale, step.optimizer.found_inf)
            )

        monkeypatch.setattr(step.optimizer, "step", update)
        for parameter in step.parameters:
            parameter.grad = torch.zeros_like(parameter)
        output = step.one_step([Batch(*on_gpu)])
    assert mode is not None
    assert seen == ["cpu"] * 3
    assert {scalar.device.type for scalar in output} == {"cuda"}


# What a GPU says without harm.


@pytest.mark.parametrize(
    "message",
    [
        "Synchronization debug mode is a prototype feature and does not yet detect all "
        "synchronizing operations",
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. "
        "Consider setting",
        "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the "
        "primary context...",
        "The AccumulateGrad node's stream does not match the stream of the node that produced "
        "the incoming gradient.",
        "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:1.)",
        "cuDNN attention has been runtime disabled. (Triggered internally at sdp_utils.cpp:1.)",
    ],
)
def test_harmless_warnings_of_a_gpu_fail_no_test(message):
    warnings.warn_explicit(message, UserWarning, "torch/somewhere.py", 1)
    with pytest.raises(UserWarning):  # and the tests' filters are at work
        warnings.warn_explicit(message.swapcase()[::-1], UserWarning, "torch/somewhere.py", 1)


def test_the_filters_are_those_of_pyproject():
    ini = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert ini["filterwarnings"][0] == "error"
