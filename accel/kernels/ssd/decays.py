"""First part of the bidirectional scan: turns the raw step sizes dt into step sizes, called steps,
and into running sums of the tokens' log decays a.

    step = softplus(dt + dt_bias),   a = -exp(A_log)·step   (Mamba-2, Dao & Gu 2024,
    https://arxiv.org/abs/2405.21060)

`ssd_decays` is the definition in PyTorch. `fused_ssd_decays` computes it as one operator with its
own backward pass: Triton on a GPU (decays_triton.py), PyTorch elsewhere.

Letters: B samples, L tokens, K heads; T tokens a piece, S = B·ceil(L / T) pieces.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from accel.kernels.registry import (
    keep_inputs,
    make_differentiable,
    pack_heads,
    refuse_empty,
    register,
    upcast,
)

LOG2E = 1.0 / math.log(2.0)
MIN_LOG2_DECAY = -32.0
"""Smallest log2 decay of one token; `ssd_decays` clamps smaller values to it. 2^-32 = 2e-10 is as
good as 0 in an fp32 sum, and without the clamp the running sums grow so large that the decays of
later tokens lose precision."""


def ssd_decays(
    dt: Float[Tensor, "B L 2 K"],
    dt_bias: Float[Tensor, "2 K"],
    A_log: Float[Tensor, "2 K"],
    piece: int,
) -> tuple[Float[Tensor, "S 2 K T"], Float[Tensor, "S 2 K T"]]:
    """Cuts the sequence into pieces of `piece` tokens. Returns the step sizes, softplus(dt +
    dt_bias), and the inclusive running sums of the log2 decays a within each piece, both (S, 2, K,
    T) in fp32. Direction 0 sums from the first token of a piece, direction 1 from the last.

    Padding after the last token has step size 0 and so log decay 0. Each a is clamped to at least
    `MIN_LOG2_DECAY`, so the sum over 512 tokens is at most 2^14 in magnitude, where fp32 is precise
    to 2^-10.
    """
    steps = F.softplus(upcast(dt) + upcast(dt_bias))
    steps = F.pad(steps, (0, 0, 0, 0, 0, -dt.shape[1] % piece))
    steps = steps.unflatten(1, (-1, piece)).flatten(0, 1).permute(0, 2, 3, 1).contiguous()
    a = (steps * (-LOG2E * upcast(A_log).exp()).unsqueeze(-1)).clamp(min=MIN_LOG2_DECAY)
    ahead = prefix_sums(a[:, 0])
    behind = prefix_sums(a[:, 1].flip(-1)).flip(-1)
    return steps, torch.stack((ahead, behind), dim=1)


def prefix_sums(a: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Returns inclusive running sums along the last dimension. If deterministic algorithms are on,
    PyTorch's cumsum raises an error on CUDA, so shifted additions replace it there."""
    if a.is_cuda and torch.are_deterministic_algorithms_enabled():
        return prefix_sums_by_doubling(a)
    return a.cumsum(-1)


def prefix_sums_by_doubling(a: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Returns inclusive running sums along the last dimension, of size n, by log2(n) shifted
    additions (Hillis & Steele 1986)."""
    shift = 1
    length = a.shape[-1]
    while shift < length:
        a = a + F.pad(a[..., : length - shift], (shift, 0))
        shift *= 2
    return a


def compute_backward(
    dsteps: Tensor, dsums: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, ddt: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of dt_bias and A_log; writes the gradient of dt to `ddt`, which may be
    a slice of a larger tensor."""
    batch, length = dt.shape[:2]

    def order_by_token(t: Tensor) -> Tensor:
        """Returns t (S, 2, K, T) as (B, L, 2, K), without the padding."""
        return t.permute(0, 3, 1, 2).unflatten(0, (batch, -1)).flatten(1, 2)[:, :length]

    da = LOG2E * torch.stack(
        (prefix_sums(dsums[:, 0].flip(-1)).flip(-1), prefix_sums(dsums[:, 1])), dim=1
    )
    da = order_by_token(da)

    # Compute the step sizes again. Where the forward pass clamped a log decay, its gradient is 0.
    raw = upcast(dt) + upcast(dt_bias)
    A = -upcast(A_log).exp()
    steps = F.softplus(raw)
    da = torch.where(LOG2E * A * steps >= MIN_LOG2_DECAY, da, 0.0)
    grad_raw = (order_by_token(dsteps) + A * da) * torch.sigmoid(raw)
    ddt.copy_(grad_raw)
    return grad_raw.sum((0, 1)), (da * A * steps).sum((0, 1))


operator = register(
    "ssd_decays(Tensor dt, Tensor dt_bias, Tensor A_log, int piece) -> (Tensor, Tensor)",
    ssd_decays,
    "accel.kernels.ssd.decays_triton.launch_forward",
)
backward_operator = register(
    "ssd_decays_backward(Tensor dsteps, Tensor dsums, Tensor dt, Tensor dt_bias, Tensor A_log, "
    "Tensor(a!) ddt) -> (Tensor, Tensor)",
    compute_backward,
    "accel.kernels.ssd.decays_triton.launch_backward",
)


def compute_gradients(dsteps: Tensor, dsums: Tensor, dt: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Returns the gradients of dt, dt_bias and A_log; the arguments in `rest` are dt_bias, A_log
    and the unused `piece`."""
    grads = (dsteps.contiguous(), dsums.contiguous())
    ddt = dt.new_empty(dt.shape)
    return ddt, *backward_operator(*grads, dt, *rest[:2], ddt)


differentiable_decays = make_differentiable(keep_inputs(operator), compute_gradients)


def fused_ssd_decays(
    dt: Tensor, dt_bias: Tensor, A_log: Tensor, piece: int
) -> tuple[Tensor, Tensor]:
    """Computes `ssd_decays` as one operator; if dt is a slice of a projection, the kernel reads it
    in place."""
    refuse_empty("ssd_decays", dt)
    return differentiable_decays(pack_heads(dt), dt_bias.contiguous(), A_log.contiguous(), piece)
