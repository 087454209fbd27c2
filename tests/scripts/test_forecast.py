"""The plan of memory against a whole step of the whole model, whose live tensors are counted."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel.composite_optimizer import collect_state
from accel.techniques.compilation import PARTITIONER, Compile
from data.loader import Batch
from scripts.plan.memory import Question, forecast
from training.assemble import assemble
from training.config.compose import compose
from training.failures import count_lasting_bytes

CPU = torch.device("cpu")
LATENTS = [
    "data=synthetic",
    "data.channels=4",
    "data.height=16",
    "data.width=16",
    "data.count=8",
    "data.num_classes=9",
]
CHECKPOINTING = [
    f"runtime.gradient_checkpointing=true runtime.checkpoint_policy={p}"
    for p in ("blocks", "every_2")
]
CHECKPOINTING += ["runtime.gradient_checkpointing=true runtime.checkpoint_policy=selective", ""]


class Counter(TorchDispatchMode):
    """Looks after every operation which of the storages that it has seen are still there."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.look(tensors)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def look(self, made: Iterable[Any]) -> None:
        for tensor in made:
            storage = tensor.untyped_storage()
            self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.seen = {address: pair for address, pair in self.seen.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.seen.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.look(leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
        return found


def counted_peak(words: list[str]) -> float:
    """Bytes of tensors that live at the same time at most, in the second step of the whole
    model."""
    training = assemble(compose(words).cfg, CPU)
    spec = training.loader.spec
    samples = training.micro_batch

    def batches() -> list[Batch]:
        numbers = torch.zeros(samples, dtype=torch.int64)
        return [
            Batch(
                torch.zeros(samples, spec.channels, spec.height, spec.width),
                numbers,
                numbers,
                numbers,
            )
            for _ in range(training.cfg.accumulation_steps)
        ]

    training.step(batches())
    given = batches()
    states = (collect_state(training.step.optimizer, p) for p in training.step.parameters)
    kept = [t for entries in states for t in entries.values() if isinstance(t, torch.Tensor)]
    of_model = [*training.model.parameters(), *training.model.buffers()]
    with Counter(
        [*of_model, *training.state.ema.averages, *kept, *(t for b in given for t in b)]
    ) as counter:
        training.step(given)
    return float(counter.peak - count_lasting_bytes(training).on_host)


def sampled(seed: int) -> list[str]:
    draw = random.Random(seed)
    family = draw.choice(["ssd_mlp", "mamba", "dit", "conv", "zigzag"])
    accumulation = draw.choice([1, 2, 4])
    compiled = draw.random() < 0.2
    words = [
        f"model={family}_xs model.dim=64 model.head_dim=32 model.depth={draw.randint(4, 7)}",
        f"batch_size={accumulation * draw.choice([2, 5, 16])} accumulation_steps={accumulation}",
        f"runtime={draw.choice(['eager', 'fast'])} "
        f"runtime.precision={draw.choice(['fp32', 'bf16'])}",
        f"optim={draw.choice(['adamw', 'adamw', 'adafactor', 'muon', 'sgd', 'adamw_8bit'])}",
        f"runtime.weights={draw.choice(['fp32', 'fp32', 'bf16'])}",
        f"runtime.offload_optimizer={draw.choice(['false', 'false', 'true'])}",
        "runtime.compile=true" if compiled else draw.choice(CHECKPOINTING),
    ]
    return [*LATENTS, *(" ".join(words)).split()]


def marked(seed: int) -> Any:
    """Compiled ones take long, so most run with the slow tests."""
    return pytest.param(
        seed,
        marks=[pytest.mark.slow] if "runtime.compile=true" in sampled(seed) or seed % 4 else [],
    )


@pytest.mark.parametrize("seed", [marked(seed) for seed in range(30)])
@pytest.mark.usefixtures("techniques_of_a_gpu")
def test_the_predicted_peak_is_the_counted_one(seed: int, monkeypatch: pytest.MonkeyPatch):
    words = sampled(seed)
    if "optim=adamw_8bit" in words:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(Compile, "backend", PARTITIONER)

    cfg = compose(words).cfg
    spec = assemble(cfg, CPU).loader.spec
    found = forecast(Question(cfg, spec, gpu=False))
    counted = counted_peak(words)
    assert found.needs.total == pytest.approx(counted, rel=0.05), (words, found.phases)
