"""Counts, op by op, the bytes that one block moves through memory and keeps for its backward pass;
nothing is computed.

    python -m tests.harness.block_traffic model=mamba_b
    python -m tests.harness.block_traffic model=mamba_b off=[fused_scan]

Eager, bf16 autocast, latents of 4 × 32 × 32, the fused operators on. Each op reads each of its
inputs once and writes each of its outputs once; views cost nothing. Ops are PyTorch's CPU ops on
fake tensors, and each operator of accel/kernels is one. Bytes are the slope between two batch
sizes, so weights, their casts (calls of _to_copy) and gradients add none.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel.kernels.operator import OPERATORS
from scripts.commands import format_table, split_words
from training.config.build import build
from training.config.compose import compose, report_user_errors
from training.config.schema import KERNEL_KEYS

BATCHES = (2, 4)
LATENTS: dict[str, Any] = {"channels": 4, "height": 32, "width": 32, "num_classes": 1000}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul")


def find_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def count_bytes(tensor: Tensor) -> int:
    """Bytes that reading the tensor takes: an expanded dimension is read once."""
    values = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        values *= length if stride or not length else 1
    return values * tensor.element_size()


class Traffic(TorchDispatchMode):
    """Inside, counts by op the calls and the bytes of inputs, each tensor once, and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.written: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        # an operator without a kernel calls others, which are counted instead
        if func.namespace == "fastlatent" and OPERATORS[name].kernel is None:
            with self:
                return OPERATORS[name].definition(*args)
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or func.namespace == "prim" or name == "_unsafe_view"):
            written = {id(t): count_bytes(t) for t in find_tensors(out)}
            moved = {id(t): count_bytes(t) for t in find_tensors((args, kwargs))} | written
            if sum(moved.values()) and not name.startswith(("empty", "new_empty")):
                self.calls[name] += 1
                self.bytes[name] += sum(moved.values())
                self.written[name] += sum(written.values())
        return out


class BlockTraffic(NamedTuple):
    """Bytes that one block keeps and moves per sample, and calls of each op."""

    kept: float
    """Bytes kept for the backward pass, each storage once."""
    calls: tuple[Counter[str], Counter[str]]
    """Calls of each op, forward and backward."""
    moves: tuple[dict[str, float], dict[str, float]]
    """Bytes that each op moves, forward and backward."""

    def count_moved(self, op: str) -> float:
        """Bytes that an op moves in both passes."""
        return sum(way.get(op, 0.0) for way in self.moves)

    def sum_ops(self, ops: tuple[str, ...] | None) -> tuple[list[int], list[float]]:
        """Calls and bytes of the products, or with None of all other ops, forward and backward."""
        belongs = (lambda op: op not in PRODUCTS) if ops is None else ops.__contains__
        calls = [sum(n for op, n in way.items() if belongs(op)) for way in self.calls]
        return calls, [sum(n for op, n in way.items() if belongs(op)) for way in self.moves]


def build_uninitialised(build_model: Callable[[], Any]) -> Any:
    """Builds a model without values on the CPU; under a FakeTensorMode without memory."""
    with torch.device("meta"):
        model = build_model()
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype)))
        for name, b in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty(b.shape, dtype=b.dtype))
    return model


def switch_kernels(model: nn.Module, off: tuple[str, ...] = ()) -> Any:
    """Switches the fused operators on, except those named in `off`."""
    for module in model.modules():
        for switch in KERNEL_KEYS:
            if hasattr(module, switch):
                setattr(module, switch, switch not in off)
    return model


def run_block(model: Any, batch: int) -> tuple[int, Traffic, Traffic]:
    """Runs both passes of a model's second block; returns the bytes that the forward pass keeps,
    and what each pass moves."""
    block = model.blocks[1]
    tokens = model.tokens
    dim = model.dim
    branch = torch.empty(batch, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    gate = torch.empty(batch, dim, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.empty(batch, tokens, dim, requires_grad=True)
    cond = torch.empty(batch, model.modulations, dim, dtype=torch.bfloat16, requires_grad=True)
    weights = {p.untyped_storage()._cdata for p in (*block.parameters(), *block.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in weights:
            kept[storage] = tensor
        return tensor

    forward = Traffic()
    backward = Traffic()
    with (
        torch.amp.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        forward,
    ):
        outputs = block(branch, gate, residual, cond)
    with backward:
        torch.autograd.grad(
            outputs,
            [branch, gate, residual, cond, *block.parameters()],
            list(map(torch.empty_like, outputs)),
        )
    return sum(t.untyped_storage().nbytes() for t in kept.values()), forward, backward


def count_block(build_model: Callable[[], Any], off: tuple[str, ...] = ()) -> BlockTraffic:
    """Counts the second block of a model: the slope between two batch sizes, so that weights and
    their casts drop out."""
    with FakeTensorMode():
        model = switch_kernels(build_uninitialised(build_model), off)
        small, large = (run_block(model, batch) for batch in BATCHES)
    step = BATCHES[1] - BATCHES[0]

    def slope(less: Traffic, more: Traffic) -> dict[str, float]:
        return {op: (more.bytes[op] - less.bytes[op]) / step for op in more.bytes}

    moves = (slope(small[1], large[1]), slope(small[2], large[2]))
    return BlockTraffic((large[0] - small[0]) / step, (large[1].calls, large[2].calls), moves)


@dataclass(frozen=True)
class TrafficConfig:
    """The model; any other word is an override of the training configuration."""

    off: list[str] = field(default_factory=list)
    """Fused operators that are off, such as fused_scan."""


def main() -> None:
    with report_user_errors():
        cfg, words = split_words(TrafficConfig, sys.argv[1:], __doc__ or "")
        node = compose(words).cfg.model
        counted = count_block(lambda: build(node, "model", **LATENTS), tuple(cfg.off))

    tokens = LATENTS["height"] * LATENTS["width"] // node["patch_size"] ** 2
    rows: list[tuple[Any, ...]] = [
        ("op", "calls, forward", "bytes a token", "calls, backward", "bytes a token")
    ]
    for op in sorted(counted.moves[0] | counted.moves[1], key=lambda op: -counted.count_moved(op)):
        pairs = [
            (calls[op], round(moved.get(op, 0.0) / tokens))
            for calls, moved in zip(*counted[1:], strict=True)
        ]
        rows.append((op, *pairs[0], *pairs[1]))
    print(format_table(rows))
    for what, ops in (("products", PRODUCTS), ("everything else", None)):
        calls, moved = counted.sum_ops(ops)
        print(
            f"{what}: {calls[0]} + {calls[1]} calls, {moved[0] / tokens:,.0f} + "
            f"{moved[1] / tokens:,.0f} bytes a token"
        )
    print(f"kept for the backward pass: {counted.kept / 1e6:.2f} MB a sample")


if __name__ == "__main__":
    main()
