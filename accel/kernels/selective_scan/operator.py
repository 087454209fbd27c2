"""The selective scan of the first Mamba (Gu & Dao 2023, https://arxiv.org/abs/2312.00752): a linear
recurrence with a separate decay for each channel and each element of its state.

    step = softplus(dt + dt_bias),   h_t = exp(step_t·A)·h_{t-1} + step_t·x_t·B_t,
    y_t = C_t·h_t + D·x_t,   with A = -exp(A_log) below zero.

Mamba-2 has one decay per head, so its scan consists of matrix products
(accel/kernels/ssd/definition.py). The selective scan is elementwise work on N numbers per token and
channel. `selective_scan` is the definition in PyTorch. `fused_selective_scan` computes it as one
operator: mamba-ssm's CUDA kernel on a GPU (kernels_cuda.py), PyTorch elsewhere.

Letters: B samples, L tokens, E channels, N state size.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from accel.kernels.registry import keep_inputs, make_differentiable, register, upcast


def solve_recurrence(decay: Tensor, added: Tensor) -> Tensor:
    """Computes h_t = decay_t·h_{t-1} + added_t for all tokens, starting from h = 0; all tensors are
    (B, L, E, N). Instead of a loop over tokens, it is an associative scan (Blelloch 1990, "Prefix
    sums and their applications"): 2·log2(L) steps, with about twice the work of a loop.

    It multiplies decays with each other and never divides, so nothing overflows: a product of
    decays is at most 1.
    """
    if decay.shape[1] == 1:
        return added

    # Join tokens 2m and 2m + 1 to one step of a recurrence of half the length; its states are the
    # states of the odd tokens.
    odd = decay[:, 1::2]
    pairs = torch.addcmul(added[:, 1::2], odd, added[:, :-1:2])
    second = solve_recurrence(odd * decay[:, :-1:2], pairs)

    # Each even token, except token 0, follows an odd token: compute its state from the odd token's
    # state.
    states = added.clone()
    states[:, 1::2] = second
    even = decay[:, 2::2]
    states[:, 2::2].addcmul_(even, second[:, : even.shape[1]])
    return states


def unroll(
    x: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, B_in: Tensor
) -> tuple[Tensor, ...]:
    """Runs the recurrence over all tokens. Returns the step sizes (B, L, E), A (E, N), the decays
    exp(step·A) (B, L, E, N), and the state after each token (B, L, E, N)."""
    steps = F.softplus(upcast(dt) + upcast(dt_bias))
    A = -upcast(A_log).exp()
    decay = (steps.unsqueeze(-1) * A).exp()
    added = (steps * upcast(x)).unsqueeze(-1) * upcast(B_in).unsqueeze(2)
    return steps, A, decay, solve_recurrence(decay, added)


def scan_forward(
    x: Float[Tensor, "B L E"],
    dt: Float[Tensor, "B L E"],
    dt_bias: Float[Tensor, "E"],
    A_log: Float[Tensor, "E N"],
    B_in: Float[Tensor, "B L N"],
    C_out: Float[Tensor, "B L N"],
    D: Float[Tensor, "E"],
) -> Float[Tensor, "B L E"]:
    """Computes the selective scan from the first token to the last by plain PyTorch operations in
    fp32; returns y in the dtype of x."""
    states = unroll(x, dt, dt_bias, A_log, B_in)[-1]
    y = (states * upcast(C_out).unsqueeze(2)).sum(-1) + upcast(D) * upcast(x)
    return y.to(x.dtype)


def compute_gradients(dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of the seven inputs of `scan_forward`; computes the states again,
    because the forward pass does not save them."""
    steps, A, decay, states = unroll(*inputs[:5])
    dy, x, dt, dt_bias, _, B_in, C_out, D = map(upcast, (dy, *inputs))

    # The gradient of state h_t is dy_t·C_t, plus the gradient of h_{t+1} times decay_{t+1}: the
    # same recurrence as in the forward pass, from the last token to the first.
    read = dy.unsqueeze(-1) * C_out.unsqueeze(2)
    dstates = solve_recurrence(decay.flip(1).roll(1, 1), read.flip(1)).flip(1)

    dinput = (dstates * B_in.unsqueeze(2)).sum(-1)
    dexponent = dstates * decay * F.pad(states[:, :-1], (0, 0, 0, 0, 1, 0))
    ddt = ((dexponent * A).sum(-1) + dinput * x) * torch.sigmoid(dt + dt_bias)
    grads = (
        dinput * steps + D * dy,
        ddt,
        ddt.sum((0, 1)),
        (dexponent * steps.unsqueeze(-1)).sum((0, 1)) * A,
        (dstates * (steps * x).unsqueeze(-1)).sum(2),
        (dy.unsqueeze(-1) * states).sum(2),
        (dy * x).sum((0, 1)),
    )
    return tuple(g.to(t.dtype) for g, t in zip(grads, inputs, strict=True))


INPUTS = "Tensor x, Tensor dt, Tensor dt_bias, Tensor A_log, Tensor B_in, Tensor C_out, Tensor D"
operator = register(
    f"selective_scan({INPUTS}) -> Tensor",
    scan_forward,
    "accel.kernels.selective_scan.kernels_cuda.launch_forward",
)
backward_operator = register(
    f"selective_scan_backward(Tensor dy, {INPUTS}) -> ({', '.join(['Tensor'] * 7)})",
    compute_gradients,
    "accel.kernels.selective_scan.kernels_cuda.launch_backward",
    repeatable=False,
)
scan_keeping_inputs = make_differentiable(keep_inputs(scan_forward), compute_gradients)
fused_selective_scan = make_differentiable(
    keep_inputs(operator), lambda dy, *inputs: backward_operator(dy.contiguous(), *inputs)
)


def selective_scan(*inputs: Tensor) -> Tensor:
    """Computes `scan_forward`, and saves only the inputs for the backward pass, which computes the
    states again. Plain autograd keeps several tensors (B, L, E, N) for every layer until the
    backward pass; here such tensors exist for one layer at a time."""
    if torch.compiler.is_compiling():
        # Use `checkpoint`, not `scan_keeping_inputs`, in compiled code: with `scan_keeping_inputs`
        # the compiler notices that the states are computed twice, computes them once, and keeps
        # them in memory.
        return cast("Tensor", checkpoint(scan_forward, *inputs, use_reentrant=False))
    return scan_keeping_inputs(*inputs)
