"""The plan of memory against a whole step of the whole model, whose live tensors are counted."""

import random

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel.composite_optimizer import collect_state
from accel.techniques.compilation import PARTITION_BACKEND, Compile
from common.config.compose import compose
from scripts.plan.memory import forecast
from scripts.plan.question import Question
from tests.harness.words import CPU, slow
from training.assemble import assemble
from training.preflight.memory import count_lasting_bytes, make_blank_batch

LATENTS = (
    "data=synthetic data.channels=4 data.height=16 data.width=16 data.count=8 data.num_classes=9"
)
CHECKPOINTING = [
    f"runtime.gradient_checkpointing=true runtime.checkpoint_policy={policy}"
    for policy in ("blocks", "every_2", "selective")
]


class CountLive(TorchDispatchMode):
    """Finds the most bytes of storages that are alive after an operation. `bytes` has also those of
    some that no longer are; they are left out when it passes the peak."""

    def __init__(self, tensors):
        super().__init__()
        self.live = {}
        self.bytes = self.peak = 0
        self.add(tensors)

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def add(self, values):
        for tensor in values:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                _, before = self.live.get(storage._cdata, (None, 0))
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.bytes += storage.nbytes() - before
        if self.bytes > self.peak:
            self.live = {key: pair for key, pair in self.live.items() if not pair[0].expired()}
            self.bytes = sum(size for _, size in self.live.values())
            self.peak = max(self.peak, self.bytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.add(tree_leaves(results))
        return results


def count_peak(words):
    """Most bytes of tensors alive at the same time in the second step of the whole model."""
    training = assemble(compose(words).cfg, CPU)

    def make_batches():
        return [
            make_blank_batch(training, training.micro_batch)
            for _ in range(training.cfg.accumulation_steps)
        ]

    training.step(make_batches())
    batches = make_batches()
    states = [collect_state(training.step.optimizer, p) for p in training.step.parameters]
    lasting = [*training.model.parameters(), *training.model.buffers()]
    with CountLive(tree_leaves((lasting, training.state.ema.averages, states, batches))) as counter:
        training.step(batches)
    return float(counter.peak - count_lasting_bytes(training).on_host)


def draw_words(seed):
    draw = random.Random(seed)
    family = draw.choice(["ssd_mlp", "mamba", "dit", "conv", "zigzag"])
    accumulation = draw.choice([1, 2, 4])
    compiled = draw.random() < 0.2
    hybrid = "model.attention_every=2" if family == "mamba" and seed % 2 else ""
    words = [
        LATENTS,
        f"model={family}_xs model.dim=64 model.head_dim=32 model.depth={draw.randint(4, 7)}",
        hybrid,
        f"batch_size={accumulation * draw.choice([2, 5, 16])} accumulation_steps={accumulation}",
        f"runtime={draw.choice(['eager', 'fast'])} "
        f"runtime.precision={draw.choice(['fp32', 'bf16'])}",
        f"optim={draw.choice(['adamw', 'adamw', 'adafactor', 'muon', 'sgd', 'adamw_8bit'])}",
        f"runtime.weights={draw.choice(['fp32', 'fp32', 'bf16'])}",
        f"runtime.offload_optimizer={draw.choice(['false', 'false', 'true'])}",
        "runtime.compile=true" if compiled else draw.choice([*CHECKPOINTING, ""]),
    ]
    return " ".join(words).split()


FAST = (3, 12, 13, 14, 29)
"""Seeds that together have every value except compile, which takes long. The others are slow."""


@pytest.mark.parametrize("seed", [seed if seed in FAST else slow(seed) for seed in range(30)])
@pytest.mark.usefixtures("techniques_of_a_gpu")
def test_the_predicted_peak_is_the_counted_one(seed, monkeypatch):
    words = draw_words(seed)
    if "optim=adamw_8bit" in words:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(Compile, "backend", PARTITION_BACKEND)
    cfg = compose(words).cfg
    plan = forecast(Question(cfg, assemble(cfg, CPU).loader.spec, gpu=False))
    assert plan.needs.total == pytest.approx(count_peak(words), rel=0.05), (words, plan.phases)
