"""Counts, op by op, the bytes that one block moves through memory and keeps for its backward pass;
nothing is computed.

    python -m tests.harness.block_traffic model=mamba_b

Eager, bf16 autocast, latents of 4 × 32 × 32, the fused operators on. Each op reads each of its
inputs once and writes each of its outputs once; views cost nothing. Ops are PyTorch's CPU ops on
fake tensors, and each operator of accel/kernels is one. Bytes are the slope between two batch
sizes, so weights, their casts (calls of _to_copy) and gradients add none.
"""

import sys
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel.kernels.operator import OPERATORS
from accel.saved_tensors import count_saved
from scripts.commands import format_table
from training.config.build import build
from training.config.compose import compose, report_user_errors
from training.config.schema import KERNEL_KEYS

BATCHES = (2, 4)
LATENTS = {"channels": 4, "height": 32, "width": 32, "num_classes": 1000}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul")


def find_tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def count_bytes(tensor):
    """Bytes that reading the tensor takes: an expanded dimension is read once."""
    values = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        values *= length if stride or not length else 1
    return values * tensor.element_size()


class Traffic(TorchDispatchMode):
    """Inside, counts by op the bytes of inputs, each tensor once, and outputs."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()
        self.written = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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
                self.bytes[name] += sum(moved.values())
                self.written[name] += sum(written.values())
        return out


class BlockTraffic(NamedTuple):
    """Bytes that one block keeps and moves per sample."""

    kept: float
    """Bytes kept for the backward pass, each storage once."""
    moves: list[dict[str, float]]
    """Bytes that each op moves, forward and backward."""


def build_uninitialised(build_model):
    """Builds a model without values on the CPU; under a FakeTensorMode without memory."""
    with torch.device("meta"):
        model = build_model()
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype)))
        for name, b in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty(b.shape, dtype=b.dtype))
    return model


def switch_kernels(model):
    """Switches the fused operators on, and attention to the backend that a GPU takes."""
    for module in model.modules():
        for switch in KERNEL_KEYS:
            if hasattr(module, switch):
                setattr(module, switch, True)
        if hasattr(module, "attention_backend"):
            module.attention_backend = "flash"
    return model


def run_block(model, batch):
    """Runs both passes of a model's second block; returns the bytes that the forward pass keeps,
    and what each pass moves."""
    block = model.blocks[1]
    tokens = model.tokens
    dim = model.dim
    branch = torch.empty(batch, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    gate = torch.empty(batch, dim, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.empty(batch, tokens, dim, requires_grad=True)
    cond = torch.empty(batch, model.modulations, dim, dtype=torch.bfloat16, requires_grad=True)
    forward = Traffic()
    backward = Traffic()
    with torch.amp.autocast("cpu", torch.bfloat16), count_saved(block) as saved, forward:
        outputs = block(branch, gate, residual, cond)
    with backward:
        torch.autograd.grad(
            outputs,
            [branch, gate, residual, cond, *block.parameters()],
            list(map(torch.empty_like, outputs)),
        )
    return sum(saved.storages.values()), forward, backward


def count_block(build_model):
    """Counts the second block of a model: the slope between two batch sizes, so that weights and
    their casts drop out."""
    with FakeTensorMode():
        model = switch_kernels(build_uninitialised(build_model))
        small, large = (run_block(model, batch) for batch in BATCHES)
    step = BATCHES[1] - BATCHES[0]
    moves = [
        {op: (more.bytes[op] - less.bytes[op]) / step for op in more.bytes}
        for less, more in zip(small[1:], large[1:], strict=True)
    ]
    return BlockTraffic((large[0] - small[0]) / step, moves)


def main():
    with report_user_errors():
        node = compose(sys.argv[1:]).cfg.model
        counted = count_block(lambda: build(node, "model", **LATENTS))

    tokens = LATENTS["height"] * LATENTS["width"] // node["patch_size"] ** 2
    ops = {
        op: [way.get(op, 0.0) / tokens for way in counted.moves]
        for op in counted.moves[0] | counted.moves[1]
    }
    rows = [("op", "bytes a token, forward", "backward")]
    for op in sorted(ops, key=lambda op: -sum(ops[op])):
        rows.append((op, *map(round, ops[op])))
    for name, products in (("products", True), ("everything else", False)):
        moved = [way for op, way in ops.items() if (op in PRODUCTS) == products]
        rows.append((name, *(round(sum(way)) for way in zip(*moved, strict=True))))
    print(format_table(rows))
    print(f"kept for the backward pass: {counted.kept / 1e6:.2f} MB a sample")


if __name__ == "__main__":
    main()
