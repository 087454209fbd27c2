"""Prints how fast a training step could be, from its bytes and FLOPs; nothing is computed, and no
GPU is needed.

    python -m scripts.bench floor
    python -m scripts.bench floor model=mamba_b card=h200

The floor is the time of the blocks' matrix products at the rate that a card reaches in large
products, plus the time of all other bytes at the rate at which it copies: nothing overlaps, and
nothing waits. The step runs in bf16 autocast with the fused operators on. If the words name a
model, the command first lists the bytes that each op of one block moves.

Each op reads each of its inputs once and writes each of its outputs once; views cost nothing. Ops
are PyTorch's CPU ops on fake tensors, and each operator of accel/kernels is one; partial sums
inside an operator do not count. Bytes are the slope between two batch sizes, so weights, their
casts (calls of _to_copy) and gradients add none: they are counted by the parameter. The model's
second block stands for all blocks; the layers before and after the blocks do not count.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel.kernels.registry import OPERATORS
from accel.saved_tensors import count_saved
from common.config.compose import compose
from common.config.schema import KERNEL_KEYS, TrainConfig
from common.environment import CARDS
from common.errors import UserError
from common.text import format_table
from models.denoiser import Denoiser
from scripts.bench import TABLES, Figures, Words
from scripts.bench.rows import format_entries
from scripts.commands import split_words
from scripts.plan.counting import build_blank_model
from training.inputs import foresee_latents

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul")
SUMS = ("everything else", "products")
"""Names of the sums over all other ops and over all products."""
FREE = ("_unsafe_view", "device", "empty", "empty_like", "empty_strided", "new_empty")
"""Ops besides views that move no bytes."""

RATES = TABLES["rates"]
PARAMETER_BYTES = 78
"""Bytes that a step moves for each parameter. AdamW reads weight, gradient and two moments, and
writes all but the gradient (28); the norm reads the gradient (4); a bf16 gradient is cast, and
added to the fp32 one (8); a weight is cast to bf16 (6). The average takes three ops
(training/optim/ema.py): a difference (12), its product with a number (8), and a sum (12)."""
SETTING = ("data=synthetic", "batch_size=256")
"""Overrides that come before the user's: latents of 4 × 32 × 32, and a batch of 256."""


@dataclass(frozen=True)
class FloorConfig:
    """Keys of the command `floor`."""

    card: str = "h100"
    """Name of the card: h100 or h200."""
    model: str | None = None
    """Name of a model, such as mamba_b: lists the ops of its block, and its floor alone. null: the
    models of `floors` in pages.yaml, each compared with the first of its size."""


class BlockTraffic(NamedTuple):
    """Bytes that one block keeps and moves per sample."""

    model: Denoiser
    """The model of the block, on fake tensors."""
    kept: int
    """Bytes kept for the backward pass, each storage once."""
    moves: list[Counter[str]]
    """Name of an op, or of a sum in `SUMS` -> bytes that it moves, forward and backward."""


def find_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def find_inputs(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """Finds the tensors that an op reads, or the parts that it reads. The kernels of `qk_rope` read
    queries and keys of qkv (B, L, 3, K, P), but no values; without a norm the backward kernel reads
    nothing of it."""
    tensors = find_tensors((args, kwargs))
    if name.startswith("qk_rope"):
        parts = 0 if name == "qk_rope_backward" and args[4] is None else 2
        tensors = [t[:, :, :parts] if t.ndim == 5 else t for t in tensors]
    return tensors


def count_bytes(tensor: Tensor) -> int:
    """Counts the bytes that reading the tensor takes: an expanded dimension is read once."""
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    values = math.prod(length for length, stride in lengths if stride or not length)
    return values * tensor.element_size()


class Traffic(TorchDispatchMode):
    """Inside, counts by op the bytes of inputs, each tensor once, and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[str]()
        self.written = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        # An operator without a kernel calls others, which are counted instead.
        if func.namespace == "fastlatent" and OPERATORS[name].kernel is None:
            with self:
                return OPERATORS[name].definition(*args)

        out = func(*args, **(kwargs or {}))
        if not (func.is_view or name in FREE):
            outputs = find_tensors(out)
            tensors = [*find_inputs(name, args, kwargs), *outputs]
            moved = sum({id(t): count_bytes(t) for t in tensors}.values())
            self.bytes.update({SUMS[name in PRODUCTS]: moved, name: moved})
            self.written[name] += sum(map(count_bytes, outputs))
        return out


def switch_kernels(model: Denoiser) -> Denoiser:
    """Switches the fused operators on, and attention to the backend that a GPU takes."""
    switches = dict.fromkeys(KERNEL_KEYS, True) | {"attention_backend": "flash"}
    for module in model.modules():
        for key, value in switches.items():
            if hasattr(module, key):
                setattr(module, key, value)
    return model


def run_block(model: Denoiser, batch: int) -> tuple[int, Traffic, Traffic]:
    """Runs both passes of a model's second block; returns the bytes that the forward pass keeps,
    and what each pass moves."""
    block = model.blocks[:2][-1]
    shape = (batch, model.tokens, model.dim)
    make = partial(torch.empty, requires_grad=True)
    inputs = [
        make(shape, dtype=torch.bfloat16),
        make(batch, model.dim, dtype=torch.bfloat16),
        make(shape),
        make(batch, model.modulations, model.dim, dtype=torch.bfloat16),
    ]
    forward = Traffic()
    backward = Traffic()
    with torch.amp.autocast("cpu", torch.bfloat16), count_saved(block) as saved, forward:
        outputs = block(*inputs, grid=model.grid)
    with backward:
        seeds = list(map(torch.empty_like, outputs))
        torch.autograd.grad(outputs, [*inputs, *block.parameters()], seeds)
    return sum(saved.storages.values()), forward, backward


def count_block(cfg: TrainConfig) -> BlockTraffic:
    """Counts the second block of a run's model: the slope between two batch sizes, so that weights
    and their casts drop out."""
    spec = foresee_latents(cfg, math.inf)[0]
    with FakeTensorMode():
        model = switch_kernels(build_blank_model(cfg.model, spec))
        small, large = (run_block(model, batch) for batch in (2, 3))
    moves = [more.bytes - less.bytes for less, more in zip(small[1:], large[1:], strict=True)]
    return BlockTraffic(model, large[0] - small[0], moves)


def find_floor(cfg: TrainConfig, card: str) -> tuple[Figures, BlockTraffic]:
    """Finds the floor of a run's training step on a card. Returns its size (`parameters_m` in
    millions, `tflop`) with the milliseconds that it takes at best (`floor_ms`: the sum of those of
    matrix products, of the blocks' other ops (`traffic_ms`), and of what does not depend on the
    batch (`fixed_ms`: casts, optimizer and average)); and the bytes of its block. UserError if the
    card has no measured rates."""
    if card not in RATES:
        raise UserError(
            f"card={card}: its rates are not measured; choose one of {', '.join(RATES)}."
        )
    copied, computed = RATES[card]
    traffic = count_block(cfg)
    model = traffic.model
    batch_size = cfg.batch_size

    # Count the step. In the backward pass each product has two.
    parameters = sum(p.numel() for p in model.parameters())
    flops = 3.0 * model.flops_per_sample() * batch_size
    weights = sum(m.weight.numel() for m in model.blocks.modules() if isinstance(m, nn.Linear))
    moved = sum(way[SUMS[0]] for way in traffic.moves) * batch_size * model.depth
    ms = {
        "products_ms": 6.0 * weights * batch_size * model.tokens / computed / 1e9,
        "traffic_ms": moved / copied / 1e6,
        "fixed_ms": PARAMETER_BYTES * parameters / copied / 1e6,
    }
    floor_ms = sum(ms.values())
    figures = {
        "floor_ms": floor_ms,
        "parameters_m": parameters / 1e6,
        "tflop": flops / 1e12,
        "images_per_s": 1e3 * batch_size / floor_ms,
        "mfu": 1e3 * flops / floor_ms / CARDS[card].flops_16bit,
    }
    return ms | figures, traffic


def describe_floor(words: Words, card: str, step_ms: float) -> str:
    """Compares a measured step of a run with its floor, as a phrase."""
    floor_ms = find_floor(compose(words).cfg, card)[0]["floor_ms"]
    return f"{step_ms:.1f} ms are {step_ms / floor_ms:.2f} × the floor of {floor_ms:.1f} ms"


def format_block(traffic: BlockTraffic) -> str:
    """Formats a table of the bytes a token that each op of a block moves."""
    rows: list[Any] = [("op", "bytes a token, forward", "backward")]
    for op, _ in sum(traffic.moves, Counter()).most_common():
        rows.append((op, *(round(way[op] / traffic.model.tokens) for way in traffic.moves)))
    return (
        f"{format_table(rows)}\nkept for the backward pass: {traffic.kept / 1e6:.2f} MB a sample\n"
    )


def print_floors(words: Words) -> None:
    """Prints the floors of the models that the words name; for one model also its block's ops."""
    keys, overrides = split_words(FloorConfig, words, __doc__)
    entries: list[Figures] = []

    # Compare the models of a size with the first of them.
    for group in [keys.model] if keys.model else TABLES["floors"]:
        floors = []
        for name in group.split():
            cfg = compose([*SETTING, *overrides, f"model={name}"]).cfg
            floor, traffic = find_floor(cfg, keys.card)
            floors.append({"name": name} | floor)
            floors[-1]["times_first"] = floors[-1]["floor_ms"] / floors[0]["floor_ms"]
            if keys.model:
                print(format_block(traffic))
        entries += floors
    print(*format_entries("floor", entries))
