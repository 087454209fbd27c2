"""How our operators become PyTorch's: one registration for all of them, and what they all do with
tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from common.errors import UserError

LIBRARY = torch.library.Library("fastlatent", "FRAGMENT")


class Operator(NamedTuple):
    """The two ways to compute an operator; both take the arguments of its schema."""

    definition: Callable[..., Any]
    kernel: Callable[..., Any] | None
    """None: the definition calls other operators of ours, on a GPU too."""
    repeatable: bool = True
    """Two equal calls of the kernel give equal bits."""


MAX_SAMPLES_PER_LAUNCH = 65_535
"""Samples, or chunks of samples, of a launch: CUDA's limit of a grid's second and third
dimension."""
OPERATORS: dict[str, Operator] = {}
"""Every registered operator by name; accel/trial.py compares its two ways."""


def register(
    schema: str,
    definition: Callable[..., Any],
    launcher: str | None = None,
    repeatable: bool = True,
) -> Callable[..., Any]:
    """Defines `fastlatent::<schema>` and returns it: `definition` computes it on a CPU, `launcher`
    on a GPU. All outputs are contiguous; `definition`, run on fake tensors, tells their shapes.

    `launcher` is "<module of accel.kernels>.<function>"; it is imported at the first launch, for it
    needs Triton or another package. None is for a definition that calls other operators of ours.
    `repeatable` is False where the kernel of another package adds in any order.
    """
    name = schema.partition("(")[0]
    module, _, function = (launcher or "").partition(".")

    def on_gpu(*arguments: Any) -> Any:
        if arguments[0].shape[0] > MAX_SAMPLES_PER_LAUNCH:
            raise UserError(
                f"{name} got {arguments[0].shape[0]:,} samples, or chunks of samples, and its "
                f"kernel takes at most {MAX_SAMPLES_PER_LAUNCH:,} in a launch; use a smaller batch_size, or "
                "more accumulation_steps."
            )
        launch = getattr(importlib.import_module(f"accel.kernels.{module}"), function)
        with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device
            return launch(*arguments)

    def shaped(*arguments: Any) -> Any:
        return tree_map(lambda t: t.new_empty(t.shape), definition(*arguments))

    OPERATORS[name] = Operator(definition, on_gpu if launcher else None, repeatable)
    LIBRARY.define(schema)
    LIBRARY.impl(name, definition, "CPU")
    LIBRARY.impl(name, on_gpu if launcher else definition, "CUDA")
    torch.library.register_fake(f"fastlatent::{name}", shaped, lib=LIBRARY)
    return getattr(torch.ops.fastlatent, name)


def keep_inputs(operator: Callable[..., Any], made: bool = False) -> Callable[..., Any]:
    """Makes a `compute` for `differentiable` of an operator whose backward pass needs its inputs;
    `made`: also the second of its two outputs, before them, which is no result."""

    def compute(*inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        outputs = operator(*inputs)
        return (outputs[0], (outputs[1], *inputs)) if made else (outputs, inputs)

    return compute


def make_differentiable(
    compute: Callable[..., Any], gradients: Callable[..., Sequence[Any]], zeros: bool = True
) -> Callable[..., Any]:
    """Makes one function that autograd knows of an operator and its backward pass.

    `compute(*inputs)` returns the result, or a tuple of them, and all that the backward pass needs;
    `gradients(*gradients of the results, *needed)` the gradients of the first inputs, in any dtype.
    Without `zeros` the gradient of a result that nobody used is None. No function has an autocast
    rule, for that would cast fp32 inputs too.
    """

    class Function(torch.autograd.Function):
        """A function that PyTorch differentiates once."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            results, needed = compute(*inputs)
            ctx.save_for_backward(*[t if isinstance(t, Tensor) else None for t in needed])
            ctx.constants = [None if isinstance(t, Tensor) else t for t in needed]
            ctx.dtypes = [t.dtype if isinstance(t, Tensor) else None for t in inputs]
            ctx.set_materialize_grads(zeros)
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            # `create_graph=True` runs backward passes with gradients on. The result of ours would
            # count as a constant, and a sum with other terms would get a wrong gradient without a
            # word. PyTorch itself refuses to differentiate a compiled backward pass, and gradients
            # are always on while Dynamo traces.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(
                    "The fused operators have no second derivative, and create_graph=True asks for "
                    "one; set the keys runtime.fused_… of kernels to false for it (the selective "
                    "scan has none either way)."
                )
            # Lists, for Dynamo of torch 2.14 refuses generators here.
            saved = list(zip(ctx.saved_tensors, ctx.constants, strict=True))
            found = gradients(*grads, *[c if t is None else t for t, c in saved])
            cast = [
                None if g is None else g.to(dtype)
                for g, dtype in zip(found, ctx.dtypes, strict=False)
            ]
            return (*cast, *[None] * (len(ctx.dtypes) - len(cast)))

    return Function.apply


def pack_heads(t: Tensor) -> Tensor:
    """`t` (B, L, groups, width) with each token's values in one stretch of memory; tokens may be
    apart."""
    return t if t.stride(3) == 1 and t.stride(2) == t.shape[3] else t.contiguous()


def refuse_empty(operator: str, t: Tensor) -> None:
    """ValueError if it has no sample, token or channel."""
    if t.numel() == 0:
        raise UserError(
            f"{operator} got a tensor of shape {tuple(t.shape)}; give it at least one sample, "
            "token and channel."
        )


def upcast(tensor: Tensor) -> Tensor:
    """`tensor` in fp32 if it is narrower, else as it is (so that fp64 inputs give an fp64
    reference)."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
