"""Faults that only a GPU would show, found on a CPU: captured steps and grids."""

import importlib
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from torch.utils._pytree import tree_leaves

import accel.kernels
from accel.kernels.counter_noise.draws import Purpose
from accel.kernels.registry import MAX_SAMPLES_PER_LAUNCH, OPERATORS
from accel.techniques.cuda_graph import CapturedUpdate
from common.files import ROOT
from data.loader import Batch
from tests.harness.captions import save_digits
from tests.harness.operators import CASES, Sizes
from tests.harness.planted_objectives import EXTRA_TERM
from tests.harness.pretended_gpu import Launching, pretend_graphs, run_backward
from tests.harness.pretended_worker import COMPILED, STEP_COUNT
from tests.harness.pretended_worker import STEPS as WORKER_STEPS
from tests.harness.refusals import expect_refusal
from tests.harness.steps import allow_any_precision, tiny_training
from tests.harness.words import CPU

OPERATOR_CASES = ["ssd, gated", "gated_norm", "add_norm", "local_mix", "swiglu", "qk_rope"]


# A captured step.

STEPS = {
    "plain": ([], {}),
    "accumulation": (["accumulation_steps=2"], {}),
    "fp16": ([], {"precision": "fp16"}),
    "an extra term": (EXTRA_TERM, {}),
    "spikes and drop path": (
        ["guards.spike_sigmas=6", "guards.spike_window=8", "model.drop_path=0.1"],
        {},
    ),
    "bf16 weights": ([], {"weights": "bf16"}),
    "power-function averages": (["ema.snapshots=4"], {}),
    "checkpointing": ([], {"gradient_checkpointing": True}),
    "Adam": (["optim._target_=torch.optim.Adam"], {}),
    "captions": (["data=resident", "data.path=captions", "model.conditioning=text"], {}),
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
    tensors = [average.averages for average in [training.state.ema, *training.state.power_averages]]
    columns = [
        torch.cat([leaf.view(-1) for leaf in tree_leaves(output)]) for output in (*outputs, tensors)
    ]
    return [column.tolist() for column in columns], training


@pytest.mark.parametrize("kind", STEPS)
def test_a_replayed_step_does_what_the_step_does(kind, monkeypatch, tmp_path):
    """Bit for bit, through an evaluation and a resume in place: no tensor of the step has moved."""
    if kind == "captions":
        monkeypatch.chdir(tmp_path)
        save_digits(tmp_path / "captions", count=64)
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
    with expect_refusal(r"cannot be captured \(operation not permitted"):
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

    for info in pkgutil.walk_packages(accel.kernels.__path__, "accel.kernels."):
        if info.name.endswith("_triton"):
            module = importlib.import_module(info.name)
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                monkeypatch.setattr(module, name, Kernel(name))
    return launches


def launch(names, samples, length):
    """Records the calls while operators run forward and backward, on tensors without memory."""
    sizes = Sizes((1, length), samples, heads=2, dtype=torch.float32, device="meta")
    launching = Launching()
    with launching:
        for name in names:
            case = CASES[name](sizes)
            run_backward(case.fused(*case.inputs))
    return launching


@pytest.mark.parametrize(
    ("samples", "length"), [(MAX_SAMPLES_PER_LAUNCH, 4), (MAX_SAMPLES_PER_LAUNCH // 4, 1024)]
)
def test_the_largest_batch_can_be_launched(samples, length, grids):
    from accel.kernels.counter_noise import kernels_triton

    launch(OPERATOR_CASES, samples, length)
    positions = torch.empty(200_000, dtype=torch.int64, device="meta")
    kernels_triton.launch("normal", 0, Purpose.NOISE, positions, 4096)
    wide = [(name, grid) for name, grid in grids if max([1, *grid[1:]]) > MAX_SAMPLES_PER_LAUNCH]
    assert not wide
    assert ("ssd_read_kernel" in {name for name, _ in grids}) is (length == 1024)


@pytest.mark.parametrize(
    ("samples", "length", "kernel"), [(80_000, 4, "ssd_decays"), (20_000, 1024, "ssd")]
)
def test_a_batch_that_cannot_be_launched_is_refused_in_a_sentence(samples, length, kernel, grids):
    with expect_refusal(rf"{kernel} got 80,000 samples, or chunks of samples, .* 65,535"):
        launch(["ssd, gated"], samples, length)
    assert {name for name, _ in grids} <= {"ssd_decays_kernel"}


def test_every_operator_with_a_kernel_is_launched(grids):
    """The tests above leave out none of them."""
    lengths = (4, 1024)
    launched = {name for length in lengths for name, *_ in launch(OPERATOR_CASES, 2, length).calls}
    with_kernel = {name for name, operator in OPERATORS.items() if operator.kernel}
    planted = {name for name in with_kernel if name.startswith("planted")}
    # The selective scan's kernel is mamba-ssm's.
    others = {"selective_scan", "selective_scan_backward"}
    assert with_kernel - planted - launched <= others


# Whole steps on fake CUDA tensors, and Inductor's code for CUDA, where nothing is computed, but
# devices, shapes, waits of the host, graphs and generated code are real; `-s` shows the results.

SOURCES = ROOT / "tests" / "assets" / "pretended_cuda"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Runs all cases in a process that pretends to have an H100: name -> what it prints."""
    if sys.platform != "linux":
        pytest.skip("a library that is loaded first, by LD_PRELOAD, needs Linux")
    if torch.version.cuda is None:
        pytest.skip("this PyTorch was built without CUDA")
    folder = tmp_path_factory.mktemp("pretended")
    shim = folder / "libpretended.so"
    libraries = {shim: ("g++", "shim.cpp"), folder / "libcuda.so.1": ("gcc", "libcuda.c")}
    for library, (compiler, source) in libraries.items():
        if shutil.which(compiler) is None:
            pytest.skip(f"there is no {compiler} on the PATH")
        command = [compiler, "-shared", "-fPIC", "-o", library, SOURCES / source]
        subprocess.run(command, check=True)
    places = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {
        "PRETENDED_CUDA": str(shim),
        "LD_PRELOAD": str(shim),
        "LD_LIBRARY_PATH": os.pathsep.join(places),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.pretended_worker"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["case"]: line for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKER_STEPS)
def test_a_step_stays_on_the_device_and_the_host_never_waits(name, results):
    """A step waits for one flag where the optimizer is not fused; PyTorch's Adafactor also waits
    for its norms."""
    result = results[f"step {name}"]
    assert "failed" not in result, result["failed"]
    waits = [place for place in result["waits"] if "torch/optim/_adafactor.py" not in place]
    assert waits == ([] if result["fused"] else ["training/step.py reads a value"] * STEP_COUNT)
    assert result["fused"] is not (name.endswith("eager") or name in ("muon", "adafactor", "sgd"))
    if result["fused"] and name != "optimizer's state on the host":
        assert result["state"] == ["cuda"]


CALLED = {
    "mamba": {"add_norm", "ssd_mixed"},
    "zigzag": {"add_norm", "ssd_mixed"},
    "mamba1": {"add_norm", "selective_scan"},
    "ssd_mlp": {"add_norm", "ssd_mixed", "swiglu"},
    "hybrid": {"add_norm", "ssd_mixed", "qk_rope", "swiglu"},
    "conv": {"add_norm", "local_mix", "swiglu"},
    "dit": {"add_norm", "qk_rope", "swiglu"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_blocks_become_at_most_three_graphs_that_call_our_operators(name, results):
    """A third one where blocks of rows and of columns take turns."""
    result = results[f"compiled {name}"]
    assert "failed" not in result, result["failed"]
    assert result["breaks"] == {}
    assert 1 <= result["forward"] <= 3
    assert 1 <= result["backward"] <= 3
    assert result["kernels"] > 0
    expected = CALLED[COMPILED[name].split()[0]]
    assert expected | {f"{operator}_backward" for operator in expected} <= set(result["operators"])
