"""Bidirectional state-space duality (SSD): a selective scan in both directions, written as one masked matrix product.

The scan of Mamba-2 (Dao & Gu 2024, https://arxiv.org/abs/2405.21060), h_i = exp(a_i)·h_{i-1} + dt_i·B_i·x_i and
y_i = C_i·h_i with a = dt·A, has the closed form y_i = Σ_{j≤i} exp(a_{j+1} + … + a_i)·(C_i·B_j)·dt_j·x_j. Here the
tokens before i and i itself come from a forward scan, the tokens after i from a backward scan with its own dt, A, B
and C, so each pair (i, j) is counted once and nothing is doubled.

`bidirectional_ssd` is the definition, in PyTorch; `fused_bidirectional_ssd` (fused_ssd.py) the same as one operator.

Letters: B samples, L tokens, K heads, P head dim, N state size; direction 0 is forward, 1 is backward.
B and C are shared by all heads and called `B_in` and `C_out`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from accel.kernels.upcast import upcast

MAX_QUADRATIC = 512
"""Longest sequence that is done in one quadratic piece; a longer one is cut into chunks of `CHUNK`."""
CHUNK = 256


def bidirectional_ssd(
    x: Float[Tensor, "B L K P"],
    dt: Float[Tensor, "B L 2 K"],
    A: Float[Tensor, "2 K"],
    B_in: Float[Tensor, "B L 2 N"],
    C_out: Float[Tensor, "B L 2 N"],
    D: Float[Tensor, "K"],
) -> Float[Tensor, "B L K P"]:
    """`y = M x + D·x` with M the bidirectional decay mask times C·Bᵀ times dt.

    dt ≥ 0 and A < 0 are fp32 (dt after softplus); decays and their sums stay in fp32, matrix products run in the dtype
    of x, which is also the dtype of y. Quadratic in L up to 512 tokens, linear in L beyond.
    """
    a = upcast(dt) * upcast(A)
    mix = within if x.shape[1] <= MAX_QUADRATIC else chunked
    return with_skip(mix(x, dt, a, B_in, C_out), x, D)


def with_skip(y: Tensor, x: Tensor, D: Tensor) -> Tensor:
    """`y + D·x` in fp32, then in the dtype of x."""
    return (upcast(y) + upcast(D)[:, None] * upcast(x)).to(x.dtype)


def prefix_sums(a: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """Inclusive sums along `dim`; by doubling where PyTorch's cumsum raises: on CUDA under deterministic algorithms."""
    if a.is_cuda and torch.are_deterministic_algorithms_enabled():
        return prefix_sums_by_doubling(a, dim)
    return a.cumsum(dim)


def prefix_sums_by_doubling(a: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """Hillis & Steele 1986: log2(n) shifted additions."""
    shift, length = 1, a.shape[dim]
    while shift < length:
        padding = (0, 0) * (a.ndim - 1 - dim) + (shift, 0)
        a = a + torch.nn.functional.pad(a.narrow(dim, 0, length - shift), padding)
        shift *= 2
    return a


def within(x: Tensor, dt: Tensor, a: Tensor, B_in: Tensor, C_out: Tensor) -> Tensor:
    """The quadratic form: every token with every other token of the same sequence."""
    length = x.shape[1]
    lower = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    total = prefix_sums(a, dim=1)  # (B, L, 2, K)
    forward, backward = total[:, :, 0].mT, (total - a)[:, :, 1].mT  # (B, K, L)
    # Forward decay from j to i is a_{j+1} + … + a_i; backward it is a_i + … + a_{j-1}. Each is ≤ 0 where it is used,
    # and clamped there, because rounding may leave a positive last bit that exp would blow up.
    exponent = torch.where(
        lower,
        forward.unsqueeze(3) - forward.unsqueeze(2),
        backward.unsqueeze(2) - backward.unsqueeze(3),
    )
    scores = torch.where(
        lower, C_out[:, :, 0] @ B_in[:, :, 0].mT, C_out[:, :, 1] @ B_in[:, :, 1].mT
    )  # (B, L, L), shared by the heads
    step = torch.where(lower, dt[:, :, 0].mT.unsqueeze(2), dt[:, :, 1].mT.unsqueeze(2))
    mask = exponent.clamp(max=0.0).exp() * upcast(step) * upcast(scores).unsqueeze(1)
    return (mask.to(x.dtype) @ x.transpose(1, 2)).transpose(1, 2)


def chunked(
    x: Tensor, dt: Tensor, a: Tensor, B_in: Tensor, C_out: Tensor, inside_of: Callable[..., Tensor] = within
) -> Tensor:
    """Quadratic inside chunks of `CHUNK` tokens; between them a state (N, P) a head is carried in each direction.

    `inside_of` is what computes the inside: `within`, or an operator that equals it.
    """
    batch, length = x.shape[:2]
    pad = -length % CHUNK  # padded tokens have dt = a = B = x = 0: no input, no decay
    parts = []
    for tensor in (x, dt, a, B_in, C_out):
        padding = (0, 0) * (tensor.ndim - 2) + (0, pad)
        padded = torch.nn.functional.pad(tensor, padding)
        parts.append(padded.unflatten(1, (-1, CHUNK)))
    x, dt, a, B_in, C_out = parts
    flat = [part.flatten(0, 1) for part in parts]
    inside = inside_of(*flat).unflatten(0, (batch, -1))
    ahead = carried(x, dt[..., 0, :], a[..., 0, :], B_in[..., 0, :], C_out[..., 0, :])
    reverse = [t.flip(1, 2) for t in (x, dt[..., 1, :], a[..., 1, :], B_in[..., 1, :], C_out[..., 1, :])]
    behind = carried(*reverse).flip(1, 2)
    return (inside + ahead + behind).flatten(1, 2)[:, :length]


def carried(x: Tensor, dt: Tensor, a: Tensor, B_in: Tensor, C_out: Tensor) -> Tensor:
    """What each token receives from the chunks before its own. Shapes as in `chunked`, one direction.

    The carried state is a sum over all earlier chunks, so it stays in fp32 under autocast too.
    """
    with torch.amp.autocast(x.device.type, enabled=False):
        return carried_in_fp32(x, dt, a, B_in, C_out)


def carried_in_fp32(x: Tensor, dt: Tensor, a: Tensor, B_in: Tensor, C_out: Tensor) -> Tensor:
    total = prefix_sums(a, dim=2)  # (B, chunks, CHUNK, K)
    to_end = (total[:, :, -1:] - total).clamp(max=0.0).exp() * upcast(dt)
    arriving = torch.einsum("bctn,bctk,bctkp->bcknp", upcast(B_in), to_end, upcast(x))
    decay = total[:, :, -1].exp()
    state = torch.zeros_like(arriving[:, 0])
    outputs = []
    for chunk in range(x.shape[1]):
        read = torch.einsum("btn,bknp->btkp", upcast(C_out[:, chunk]), state)
        outputs.append(read * total[:, chunk].clamp(max=0.0).exp().unsqueeze(-1))
        state = state * decay[:, chunk, :, None, None] + arriving[:, chunk]
    return torch.stack(outputs, 1).to(x.dtype)


def bidirectional_ssd_flops(tokens: int, heads: int, head_dim: int, state_dim: int) -> int:
    """FLOPs of one forward pass of one sample: the products that the algorithm needs, masked halves counted once."""
    if tokens <= MAX_QUADRATIC:
        return 2 * tokens * tokens * (state_dim + heads * head_dim)
    inside = 2 * tokens * CHUNK * (state_dim + heads * head_dim)
    states = 2 * 2 * 2 * tokens * state_dim * heads * head_dim  # in and out, two directions
    return inside + states
