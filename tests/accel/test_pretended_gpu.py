"""Faults that only a GPU would show, found on a CPU: captured steps, grids, devices of a step."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from copy import deepcopy

import pytest
import torch
from torch._subclasses import FakeTensorMode

import accel.kernels
from accel.kernels.add_norm import fused_add_norm
from accel.kernels.counter_noise import Purpose
from accel.kernels.fused_ssd import fused_bidirectional_ssd
from accel.kernels.local_mix import fused_local_mix
from accel.kernels.operator import MAX_SAMPLES_PER_LAUNCH, OPERATORS
from accel.kernels.qk_rope import fused_qk_rope
from accel.kernels.swiglu import fused_swiglu
from accel.techniques.cuda_graph import CapturedUpdate
from data.loader import Batch
from tests.harness.pretended_gpu import Launching, run_backward, pretend_graphs
from tests.harness.steps import allow_any_precision, tiny_training
from tests.harness.words import CPU

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


def train(words, values, graph, change=lambda training: None):
    """Trains, evaluates, calls `change`, trains on, goes back to a checkpoint and trains again;
    returns all outputs and the run."""
    training = tiny_training("mamba", *words, fused_adamw=True, cuda_graph=graph, **values)
    training.warm_up()
    # In a full window the first norm is a spike, and the step is skipped.
    if training.step.spikes is not None:
        training.step.spikes.norms.copy_(1e-6 * torch.arange(8))
        training.step.spikes.count.fill_(8)
    outputs = [training.take_step() for _ in range(3)]
    batch = next(training.loader)
    with training.state.use_averages(), torch.no_grad():
        outputs.append(training.step.compute_losses(batch)[0])
    checkpoint = deepcopy(training.state.state_dict())
    change(training)
    outputs += [training.take_step() for _ in range(2)]
    training.state.load_state_dict(checkpoint)
    outputs += [training.take_step() for _ in range(2)]
    return [[float(value) for value in output] for output in outputs], training


@pytest.mark.parametrize("kind", STEPS)
def test_a_replayed_step_does_what_the_step_does(kind, monkeypatch):
    """Bit for bit, through an evaluation and a resume in place: no tensor of the step has moved."""
    allow_any_precision(monkeypatch)
    pretend_graphs(monkeypatch)
    words, values = STEPS[kind]
    expected, _ = train(words, values, graph=False)
    outputs, training = train(words, values, graph=True)
    assert outputs == expected
    assert outputs[4:6] == outputs[6:8]
    # Two of the replays are in warm-up.
    assert training.step.update.graph.replays == 9


def test_a_tensor_that_is_replaced_is_seen_in_a_replay(monkeypatch):
    """The test above rests on this: a replay uses the tensors of its capture."""
    pretend_graphs(monkeypatch)

    def replace(training):
        for state in training.step.optimizer.state.values():
            state["exp_avg"] = 3.0 * state["exp_avg"]

    assert train([], {}, True, replace)[0][5] != train([], {}, False, replace)[0][5]


def test_a_failed_capture_leaves_its_stream(monkeypatch):
    """PyTorch's own context stays in it, and everything after would run there."""
    streams = pretend_graphs(monkeypatch)
    update = CapturedUpdate(lambda batches: (batches[0][0].sum().item(),), CPU)
    batches = [Batch(*torch.ones(4, 1))]
    update(batches)
    update.armed = True
    with pytest.raises(ValueError, match=r"cannot be captured \(operation not permitted"):
        update(batches)
    assert streams.current == "default"


# A grid has 65,535 programs in its second and third dimension.


@pytest.fixture
def grids(monkeypatch):
    """Kernel and grid of each launch; nothing is launched."""
    pytest.importorskip("triton")
    launches = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **how: launches.append((self.name, grid))

    for info in pkgutil.iter_modules(accel.kernels.__path__):
        if info.name.endswith("_triton"):
            module = importlib.import_module(f"accel.kernels.{info.name}")
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                monkeypatch.setattr(module, name, Kernel(name))
    return launches


def call_operators(samples: int, length: int = 4):
    """Calls every operator on tensors without memory; yields its outputs."""

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


def launch_operators(samples: int, length: int) -> Launching:
    """Records the calls while every operator runs forward and backward."""
    launching = Launching()
    with launching:
        for outputs in call_operators(samples, length):
            run_backward(outputs)
    return launching


@pytest.mark.parametrize(
    ("samples", "length"), [(MAX_SAMPLES_PER_LAUNCH, 4), (MAX_SAMPLES_PER_LAUNCH // 4, 1024)]
)
def test_the_largest_batch_can_be_launched(samples, length, grids):
    launch_operators(samples, length)
    from accel.kernels.counter_noise_triton import launch

    launch("normal", 0, Purpose.NOISE, torch.empty(200_000, dtype=torch.int64, device="meta"), 4096)
    wide = [(name, grid) for name, grid in grids if max([1, *grid[1:]]) > MAX_SAMPLES_PER_LAUNCH]
    assert not wide
    launched = {name for name, _ in grids}
    assert {
        "ssd_decays_backward_kernel",
        "add_norm_backward_kernel",
        "counter_noise_kernel",
    } <= launched
    assert ("ssd_read_kernel" in launched) is (length == 1024)


def test_a_batch_that_cannot_be_launched_is_refused_in_a_sentence(grids):
    with (
        Launching(),
        pytest.raises(
            ValueError, match=r"ssd_decays got 80,000 samples, or chunks of samples, .* 65,535"
        ),
    ):
        next(call_operators(80_000))
    with (
        Launching(),
        pytest.raises(ValueError, match=r"ssd got 80,000 samples, or chunks of samples"),
    ):
        next(call_operators(20_000, 1024))
    assert {name for name, _ in grids} == {"ssd_decays_kernel"}


def test_every_operator_with_a_kernel_is_launched(grids):
    """The tests above leave out none of them."""
    launched = {name for length in (4, 1024) for name, _, _ in launch_operators(2, length).calls}
    with_kernel = {
        name
        for name, operator in OPERATORS.items()
        if operator.kernel and not name.startswith("planted")
    }
    # The scan has the norm in its epilogue; the selective scan's kernel is mamba-ssm's.
    others = {"gated_norm", "selective_scan", "selective_scan_backward"}
    assert with_kernel - launched <= others


# Two devices.


@pytest.mark.parametrize("words", [[], ["guards.spike_sigmas=6"]])
def test_parameters_on_the_host_train_with_a_loss_on_the_gpu(words, monkeypatch):
    """`parallel.cpu_offload` keeps them there. Fake tensors stand for those of the GPU, up to the
    update."""
    training = tiny_training("mamba", *words, fused_adamw=True)
    step = training.step
    seen = []
    batch = next(training.loader)
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_gpu = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in batch]
        monkeypatch.setattr(step, "compute_losses", lambda batch: (torch.empty(8, device="cuda"), None))
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
        output = step.take_step([Batch(*on_gpu)])
    assert seen == ["cpu"] * 3
    assert {scalar.device.type for scalar in output} == {"cuda"}


# Harmless warnings of a GPU.


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
    # Any other warning is an error.
    with pytest.raises(UserWarning):
        warnings.warn_explicit(message.swapcase()[::-1], UserWarning, "torch/somewhere.py", 1)
