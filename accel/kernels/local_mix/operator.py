"""Local mixing: a depthwise convolution over the token grid, then SiLU.

`local_mix` is the definition in PyTorch. `fused_local_mix` computes it as one operator with its own
backward pass: Triton on a GPU (kernels_triton.py), PyTorch elsewhere.

Letters: B samples, L = rows · columns tokens in raster order, D width, R × C taps (both odd).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from accel.kernels.registry import keep_inputs, make_differentiable, refuse_empty, register, upcast
from common.errors import UserError


def local_mix(
    x: Float[Tensor, "B L D"],
    weight: Float[Tensor, "D 1 R C"],
    bias: Float[Tensor, "D"],
    grid: tuple[int, int],
) -> Float[Tensor, "B L D"]:
    """Computes `silu(depthwise_conv(x))` with zero padding. 3 × 3 taps reach the eight neighbours
    on the grid; 1 × k taps on a grid of one row reach the neighbours in the sequence."""
    mixed = convolve(x, with_contiguous_strides(weight).to(x.dtype), bias.to(x.dtype), grid)
    return F.silu(mixed).flatten(2).transpose(1, 2)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor, grid: tuple[int, int]
) -> Float[Tensor, "B D rows columns"]:
    """Returns the depthwise convolution of x on the grid of tokens, (B, D, rows, columns), without
    SiLU."""
    image = x.transpose(1, 2).unflatten(2, grid)
    padding = (weight.shape[2] // 2, weight.shape[3] // 2)
    return F.conv2d(image, weight, bias, padding=padding, groups=x.shape[2])


def with_contiguous_strides(weight: Tensor) -> Tensor:
    """Returns a view of `weight` with the same values, through which autograd computes a gradient
    with contiguous strides.

    Without the view, PyTorch's gradient of a depthwise weight has an unusual stride in the
    dimension of size 1. DDP then warns, and copies the gradient into its bucket, although
    `gradient_as_bucket_view` should avoid this copy.
    """
    return weight.flatten().view(weight.shape)


def count_local_mix_flops(tokens: int, channels: int, taps: int = 9) -> int:
    """Counts the FLOPs of a forward pass of one sample: a multiply-add, which is two FLOPs, for
    each tap, token and channel."""
    return 2 * taps * tokens * channels


def compute_forward(x: Tensor, weight: Tensor, bias: Tensor, rows: int, columns: int) -> Tensor:
    """Returns `local_mix` of x on a grid of rows × columns tokens, as a contiguous tensor."""
    return local_mix(x, weight, bias, (rows, columns)).contiguous()


def compute_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, rows: int, columns: int, dx: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of weight and bias; writes the gradient of x to `dx`, which may be a
    slice of a larger tensor. Computes the convolution again, because the forward pass does not save
    its result."""
    wide = upcast(x)
    kernel = upcast(weight)
    u = convolve(wide, kernel, upcast(bias), (rows, columns))
    gate = torch.sigmoid(u)
    du = upcast(dy).transpose(1, 2).unflatten(2, (rows, columns)) * gate * (1.0 + u * (1.0 - gate))

    image = wide.transpose(1, 2).unflatten(2, (rows, columns))
    padding = [weight.shape[2] // 2, weight.shape[3] // 2]
    dimage, dweight, dbias = torch.ops.aten.convolution_backward(
        du,
        image,
        kernel,
        [x.shape[2]],
        [1, 1],
        padding,
        [1, 1],
        False,
        [0, 0],
        x.shape[2],
        [True, True, True],
    )
    dx.copy_(dimage.flatten(2).transpose(1, 2))
    return with_contiguous_strides(dweight), dbias


operator = register(
    "local_mix(Tensor x, Tensor weight, Tensor bias, int rows, int columns) -> Tensor",
    compute_forward,
    "accel.kernels.local_mix.kernels_triton.launch_forward",
)
backward_operator = register(
    "local_mix_backward(Tensor dy, Tensor x, Tensor weight, Tensor bias, int rows, int columns, "
    "Tensor(a!) dx) -> (Tensor, Tensor)",
    compute_backward,
    "accel.kernels.local_mix.kernels_triton.launch_backward",
)


def compute_gradients(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Returns the gradients of x, weight and bias."""
    dx = x.new_empty(x.shape)
    return dx, *backward_operator(dy.contiguous(), x, *rest, dx)


differentiable_mix = make_differentiable(keep_inputs(operator), compute_gradients)


def fused_local_mix(x: Tensor, weight: Tensor, bias: Tensor, grid: tuple[int, int]) -> Tensor:
    """Computes `local_mix` as one operator. Reads x in place, even if x is a slice of a projection;
    copies x only if its channels are not neighbours in memory. Raises UserError for an empty
    tensor, an even number of taps along a side, or a grid whose size is not the number of
    tokens."""
    refuse_empty("local_mix", x)
    check_shape(x, weight, grid)
    x = x if x.stride(2) == 1 else x.contiguous()
    return differentiable_mix(x, weight.contiguous(), bias.contiguous(), *grid)


def check_shape(x: Tensor, weight: Tensor, grid: tuple[int, int]) -> None:
    """Raises UserError for an even number of taps along a side, or a grid whose size is not the
    number of tokens."""
    taps = tuple(weight.shape[2:])
    tokens = x.shape[1]
    if taps[0] % 2 == 0 or taps[1] % 2 == 0:
        raise UserError(
            f"local_mix got {taps[0]} × {taps[1]} taps; both must be odd, to have a middle."
        )
    if grid[0] * grid[1] != tokens:
        raise UserError(
            f"local_mix got {tokens} tokens for a grid of {grid[0]} × {grid[1]}; make them agree."
        )
