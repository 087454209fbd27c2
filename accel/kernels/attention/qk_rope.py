"""Prepares queries and keys for attention: RMSNorm per head, then the rotary position embedding.

`qk_rope` is the definition in PyTorch. `fused_qk_rope` computes it as one operator whose backward
pass writes one gradient for queries, keys and values: Triton on a GPU (qk_rope_triton.py), PyTorch
elsewhere.

Letters: B samples, L tokens, K heads, P head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from accel.kernels.registry import make_differentiable, pack_heads, refuse_empty, register, upcast
from common.errors import UserError

Heads = tuple[Float[Tensor, "B K L P"], Float[Tensor, "B K L P"], Float[Tensor, "B K L P"]]


def rotate(
    x: Float[Tensor, "... L P"], rotations: Float[Tensor, "2 L P"]
) -> Float[Tensor, "... L P"]:
    """Rotates each pair of neighbouring channels of x by an angle that depends on token and pair;
    computes in fp32, returns the dtype of x. `rotations` holds the angles' cosines and sines (Su et
    al. 2021, https://arxiv.org/abs/2104.09864)."""
    pairs = upcast(x).unflatten(-1, (-1, 2))
    quarter_turned = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    return (upcast(x) * rotations[0] + quarter_turned * rotations[1]).to(x.dtype)


def norm_and_rotate(
    x: Tensor, weight: Tensor | None, rotations: Tensor | None, eps: float
) -> Float[Tensor, "B K L P"]:
    """Takes queries or keys x (B, K, L, P); applies RMSNorm with `weight` (P), unless `weight` is
    None, then rotates the pairs of channels by `rotations`, unless `rotations` is None."""
    if weight is not None:
        x = F.rms_norm(upcast(x), x.shape[-1:], weight, eps).to(x.dtype)
    return x if rotations is None else rotate(x, rotations)


def qk_rope(
    qkv: Float[Tensor, "B L 3 K P"],
    q_weight: Float[Tensor, "P"] | None,
    k_weight: Float[Tensor, "P"] | None,
    rotations: Float[Tensor, "2 L P"] | None,
    eps: float = 1e-6,
) -> Heads:
    """Splits qkv into queries, keys and values, each (B, K, L, P). Returns queries and keys after
    RMSNorm (Zhang & Sennrich 2019; weight None: no norm) and rotation (`rotations` None: no
    rotation), and unchanged values. In `rotations` both channels of a pair must have the same
    angle, because the kernel reads only the angle of the pair's first channel."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return (
        norm_and_rotate(q, q_weight, rotations, eps),
        norm_and_rotate(k, k_weight, rotations, eps),
        v,
    )


def compute_forward(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    rotations: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Returns normed and rotated queries and keys, both (B, L, K, P) and contiguous."""
    q, k, _ = qk_rope(upcast(qkv), q_weight, k_weight, rotations, eps)
    q, k = (
        t.transpose(1, 2).to(qkv.dtype).clone(memory_format=torch.contiguous_format) for t in (q, k)
    )
    return q, k


def compute_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    rotations: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of qkv, and the gradients of q_weight and k_weight stacked (2, P), or
    zeros if both weights are None. dq, dk and dv are the gradients of queries, keys and values, (B,
    L, K, P)."""
    parts = []
    sums = []

    # The gradient goes through the inverse rotation, which has the same cosines and negated sines,
    # (2, L, 1, P).
    inverse = None if rotations is None else torch.stack((rotations[0], -rotations[1])).unsqueeze(2)
    for d, x, weight in zip((dq, dk), qkv.unbind(2), (q_weight, k_weight), strict=False):
        d = upcast(d)
        x = upcast(x)
        if inverse is not None:
            d = rotate(d, inverse)
        if weight is not None:
            rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            normed = x * rstd
            dnormed = d * upcast(weight)
            sums.append((d * normed).sum((0, 1, 2)))
            d = rstd * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
        parts.append(d)

    dweights = torch.stack(sums) if sums else parts[0].new_zeros(2, qkv.shape[4])
    return torch.stack((*parts, upcast(dv)), dim=2).to(qkv.dtype), dweights


INPUTS = "Tensor qkv, Tensor? q_weight, Tensor? k_weight, Tensor? rotations, float eps"
operator = register(
    f"qk_rope({INPUTS}) -> (Tensor, Tensor)",
    compute_forward,
    "accel.kernels.attention.qk_rope_triton.launch_forward",
)
backward_operator = register(
    f"qk_rope_backward(Tensor dq, Tensor dk, Tensor dv, {INPUTS}) -> (Tensor, Tensor)",
    compute_backward,
    "accel.kernels.attention.qk_rope_triton.launch_backward",
)


def compute(qkv: Tensor, *rest: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Returns (queries, keys, values), and a tuple of all inputs, which the backward pass needs."""
    return (*operator(qkv, *rest), qkv.select(2, 2)), (qkv, *rest)


def compute_gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, *inputs: Any
) -> tuple[Tensor | None, ...]:
    """Returns the gradient of qkv and, if the weights are not None, those of q_weight and
    k_weight."""
    parts = [pack_heads(g) for g in (dq, dk, dv)]
    dqkv, dweights = backward_operator(*parts, *inputs)
    return (dqkv,) if inputs[1] is None else (dqkv, *dweights)


differentiable_rope = make_differentiable(compute, compute_gradients)


def fused_qk_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    rotations: Tensor | None,
    eps: float = 1e-6,
) -> Heads:
    """Computes `qk_rope` as one operator. Raises UserError for an empty tensor, one weight without
    the other, shapes that do not fit, or a head dim that is not a power of two of at least 8."""
    refuse_empty("qk_rope", qkv)
    inputs = {"q_weight": q_weight, "k_weight": k_weight, "rotations": rotations}
    shapes = {
        "q_weight": qkv.shape[4:],
        "k_weight": qkv.shape[4:],
        "rotations": (2, qkv.shape[1], qkv.shape[4]),
    }
    for name, t in inputs.items():
        if t is not None and t.shape != shapes[name]:
            raise UserError(
                f"qk_rope got {name} of shape {tuple(t.shape)}; it must be {tuple(shapes[name])}."
            )
    if (q_weight is None) != (k_weight is None):
        raise UserError("qk_rope got a weight for queries or for keys alone; give both, or none.")

    head_dim = qkv.shape[4]
    if head_dim < 8 or head_dim & (head_dim - 1):
        raise UserError(
            "runtime.fused_rope=true takes a head_dim that is a power of two from 8 on, and got "
            f"{head_dim}; choose such a size, or runtime.fused_rope=false."
        )
    tensors = [None if t is None else t.contiguous() for t in inputs.values()]
    q, k, v = differentiable_rope(qkv.contiguous(), *tensors, eps)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
