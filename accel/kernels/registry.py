"""Registers our operators with PyTorch, makes them differentiable, and holds the checks and casts
that several of them use."""

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
    """The two functions that compute an operator, its definition in PyTorch and its kernel; both
    take the arguments of the operator's schema."""

    definition: Callable[..., Any]
    kernel: Callable[..., Any] | None
    """Function that launches the kernel. None: the operator has no kernel of its own; its
    definition also runs on a GPU, and calls other operators of this package there."""
    repeatable: bool = True
    """Whether two calls of the kernel with equal inputs give results that are equal bit for bit."""


MAX_SAMPLES_PER_LAUNCH = 65_535
"""Largest number of samples, or of chunks of samples, in one launch: CUDA's limit for the second
and third dimension of a grid."""
OPERATORS: dict[str, Operator] = {}
"""Name of each registered operator -> its definition and kernel; accel/trial/parity.py compares the
results of the two."""


def register(
    schema: str,
    definition: Callable[..., Any],
    launcher: str | None = None,
    repeatable: bool = True,
) -> Callable[..., Any]:
    """Defines the PyTorch operator `fastlatent::<schema>` and returns it. On a CPU the operator
    runs `definition`, on a GPU `launcher`. All outputs must be contiguous; their shapes for fake
    tensors come from `definition`.

    `launcher` is "<module>.<function>", imported at the first launch because it needs Triton or
    another package; None: `definition` also runs on a GPU. `repeatable` is False if the kernel adds
    in an order that varies from call to call, so that its results differ in the last bits.
    """
    name = schema.partition("(")[0]
    module, _, function = (launcher or "").rpartition(".")

    def launch_on_gpu(*arguments: Any) -> Any:
        if arguments[0].shape[0] > MAX_SAMPLES_PER_LAUNCH:
            raise UserError(
                f"{name} got {arguments[0].shape[0]:,} samples, or chunks of samples, and its "
                f"kernel takes at most {MAX_SAMPLES_PER_LAUNCH:,} in a launch; use a smaller "
                "batch_size, or more accumulation_steps."
            )
        launch = getattr(importlib.import_module(module), function)

        # Triton launches on the current device, so make the tensors' device the current one.
        with torch.cuda.device_of(arguments[0]):
            return launch(*arguments)

    def make_fake_outputs(*arguments: Any) -> Any:
        return tree_map(lambda t: t.new_empty(t.shape), definition(*arguments))

    OPERATORS[name] = Operator(definition, launch_on_gpu if launcher else None, repeatable)
    LIBRARY.define(schema)
    LIBRARY.impl(name, definition, "CPU")
    LIBRARY.impl(name, launch_on_gpu if launcher else definition, "CUDA")
    torch.library.register_fake(f"fastlatent::{name}", make_fake_outputs, lib=LIBRARY)
    return getattr(torch.ops.fastlatent, name)


def keep_inputs(operator: Callable[..., Any], keep_second: bool = False) -> Callable[..., Any]:
    """Returns a function `compute` for `make_differentiable`, which calls `operator` and saves the
    operator's inputs for the backward pass.

    If `keep_second`, the operator has two outputs: the first is the result; the second is only
    saved for the backward pass, in front of the inputs.
    """

    def compute(*inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        outputs = operator(*inputs)
        return (outputs[0], (outputs[1], *inputs)) if keep_second else (outputs, inputs)

    return compute


def make_differentiable(
    compute: Callable[..., Any], gradients: Callable[..., Sequence[Any]], zeros: bool = True
) -> Callable[..., Any]:
    """Joins an operator and its backward pass into one function for autograd.

    `compute(*inputs)` returns the result, or a tuple of results, and a tuple `needed` of all that
    the backward pass needs. `gradients(*gradients of the results, *needed)` returns the gradients
    of the first inputs, in any dtype; the remaining inputs get None. If `zeros`, `gradients` gets a
    tensor of zeros as the gradient of an unused result, otherwise None. The function has no
    autocast rule, because such a rule also casts the inputs that must stay fp32.
    """

    class Function(torch.autograd.Function):
        """The operator as an autograd function with a first derivative, but no second."""

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
            # Refuse a second derivative. With `create_graph=True` PyTorch runs this backward pass
            # in grad mode; autograd then treats the pass's result as a constant, and the gradient
            # of a sum with other terms is silently wrong. Compiled code needs no check: PyTorch
            # itself refuses to differentiate a compiled backward pass, and gradients are always on
            # while Dynamo traces.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(
                    "The fused operators have no second derivative, and create_graph=True asks for "
                    "one; set the keys runtime.fused_… of kernels to false for it (the selective "
                    "scan has none either way)."
                )
            # Build lists, because Dynamo in PyTorch 2.14 cannot trace generators here.
            saved = list(zip(ctx.saved_tensors, ctx.constants, strict=True))
            input_grads = gradients(*grads, *[c if t is None else t for t, c in saved])
            cast = [
                None if g is None else g.to(dtype)
                for g, dtype in zip(input_grads, ctx.dtypes, strict=False)
            ]
            return (*cast, *[None] * (len(ctx.dtypes) - len(cast)))

    return Function.apply


def pack_heads(t: Tensor) -> Tensor:
    """Returns `t` (B, L, groups, width) itself if the values of each token lie side by side in
    memory, even with gaps between tokens; otherwise returns a contiguous copy."""
    return t if t.stride(3) == 1 and t.stride(2) == t.shape[3] else t.contiguous()


def refuse_empty(operator: str, t: Tensor) -> None:
    """Raises UserError if `t` has no sample, token or channel."""
    if t.numel() == 0:
        raise UserError(
            f"{operator} got a tensor of shape {tuple(t.shape)}; give it at least one sample, "
            "token and channel."
        )


def upcast(tensor: Tensor) -> Tensor:
    """Casts a tensor of a dtype narrower than fp32 to fp32. Leaves fp64 as it is, so that fp64
    inputs give an fp64 reference."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
