"""Bidirectional state-space duality (SSD): a selective scan in both directions, written as one
masked matrix product.

The scan of Mamba-2 (Dao & Gu 2024, https://arxiv.org/abs/2405.21060), h_i = exp(a_i)·h_{i-1} +
step_i·B_i·x_i and y_i = C_i·h_i, has the closed form y_i = Σ_{j≤i} exp(a_{j+1} + … +
a_i)·(C_i·B_j)·step_j·x_j. Here a forward scan adds to y_i the contributions of token i and the
tokens before it, and a backward scan with its own step, A, B and C adds those of the tokens after
it, so that each pair (i, j) counts once. decays.py computes the steps and the sums of a.

`bidirectional_ssd` is the definition in PyTorch; `fused_bidirectional_ssd` (operator.py) computes
it as one operator.

Letters: B samples, L tokens, K heads, P head dim, N state size; direction 0 is forward, 1 is
backward. All heads share the scan's B and C, which the code calls `B_in` and `C_out`. In shapes, C
is the number of pieces into which a sample is cut, T the tokens of a piece, and S = B·C. A piece is
called a chunk if states pass from one to the next.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from accel.kernels.gated_norm.operator import gated_norm
from accel.kernels.registry import refuse_empty, upcast
from accel.kernels.ssd.decays import ssd_decays
from common.errors import UserError

MIN_PIECE_TOKENS = 64
MAX_PIECES = 16
"""`bidirectional_ssd` cuts a sequence into at most `MAX_PIECES` pieces of at least
`MIN_PIECE_TOKENS` tokens. Small pieces save time, because most of the time goes into the decays of
all pairs of tokens inside a piece. Many pieces cost time, because the state passes through them one
after the other."""
MAX_QUADRATIC_TOKENS = 512
"""Largest number of tokens that the kernels process as one masked product of all pairs of tokens;
they cut a longer sequence into chunks."""
CHUNK_TOKENS = 256
"""Number of tokens per chunk if the kernels cut a sequence longer than `MAX_QUADRATIC_TOKENS`."""


def bidirectional_ssd(
    x: Float[Tensor, "B L K P"],
    dt: Float[Tensor, "B L 2 K"],
    dt_bias: Float[Tensor, "2 K"],
    A_log: Float[Tensor, "2 K"],
    B_in: Float[Tensor, "B L 2 N"],
    C_out: Float[Tensor, "B L 2 N"],
    D: Float[Tensor, "K"],
    z: Float[Tensor, "B L K P"] | None = None,
    norm_weight: Float[Tensor, "K P"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "B L K P"]:
    """Computes `y = M x + D·x`, where M_ij is the decay from token j to token i, times the score
    C_i·B_j, times the step size of j, softplus(dt_j + dt_bias).

    If z and `norm_weight` are given, the result is gated, and normed per head:
    `rms_norm(y·silu(z))·norm_weight`. Decays and their sums are fp32; matrix products and the
    result have the dtype of x. A sequence of up to 1,024 tokens is cut into pieces of 64 tokens;
    the work is quadratic only inside a piece, and so grows linearly with L. The models always pass
    z; only scripts.bench leaves it out, to compare with other packages.
    """
    refuse_empty("bidirectional_ssd", x)
    length = x.shape[1]
    steps, sums = ssd_decays(
        dt, dt_bias, A_log, min(length, max(MIN_PIECE_TOKENS, -(-length // MAX_PIECES)))
    )
    y = scan_in_chunks(x, steps, sums, B_in, C_out, D)
    return y if z is None else gated_norm(y, z, require_norm_weight(norm_weight), eps)


def require_norm_weight(norm_weight: Tensor | None) -> Tensor:
    """Returns `norm_weight`; raises UserError if it is None, because the norm after the gate z
    needs a weight."""
    if norm_weight is None:
        raise UserError(
            "bidirectional_ssd with a gate z needs norm_weight, of shape (heads, head dim)."
        )
    return norm_weight


def compute_masks(
    x: Tensor, steps: Tensor, sums: Tensor, B_in: Tensor, C_out: Tensor
) -> tuple[Tensor, ...]:
    """Returns for every pair (i, j) of tokens in a piece the decay (S, K, T, T), the score C_i·B_j
    (S, 1, T, T) and the step size of j (S, K, T, T); also returns the mask (T, T) of the pairs with
    i ≥ j.

    The log decay from j to i is a_{j+1} + … + a_i forward, and a_i + … + a_{j-1} backward: a
    difference of two running sums, which is ≤ 0. The code clamps the difference to ≤ 0, because
    rounding may make it slightly positive.
    """
    length = x.shape[1]
    lower = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    exponent = torch.where(lower, *(s.unsqueeze(3) - s.unsqueeze(2) for s in sums.unbind(1)))
    scores = torch.where(lower, *(C_out[:, :, i] @ B_in[:, :, i].mT for i in (0, 1)))
    step = torch.where(lower, *(s.unsqueeze(2) for s in steps.unbind(1)))
    return exponent.clamp(max=0.0).exp2(), upcast(scores).unsqueeze(1), step, lower


def scan_within_pieces(
    x: Tensor, steps: Tensor, sums: Tensor, B_in: Tensor, C_out: Tensor, D: Tensor
) -> Tensor:
    """Returns y (S, T, K, P) as if each piece were a whole sequence: one masked product of all
    pairs of the piece's tokens, so the work is quadratic in T."""
    decay, scores, step, _ = compute_masks(x, steps, sums, B_in, C_out)
    y = ((decay * step * scores).to(x.dtype) @ x.transpose(1, 2)).transpose(1, 2)
    return (upcast(y) + upcast(D)[:, None] * upcast(x)).to(x.dtype)


def scan_in_chunks(
    x: Tensor, steps: Tensor, sums: Tensor, B_in: Tensor, C_out: Tensor, D: Tensor
) -> Tensor:
    """Returns y (B, L, K, P). Computes the contributions within each chunk by `scan_within_pieces`,
    and carries a state (N, P) per head and direction from chunk to chunk."""
    batch, length = x.shape[:2]
    chunk = steps.shape[-1]
    if length == chunk:
        return scan_within_pieces(x, steps, sums, B_in, C_out, D)
    x, B_in, C_out = (cut_chunks(t, chunk) for t in (x, B_in, C_out))
    inside = scan_within_pieces(
        x.flatten(0, 1), steps, sums, B_in.flatten(0, 1), C_out.flatten(0, 1), D
    )
    y = upcast(inside).unflatten(0, (batch, -1))

    # For each direction, add the values that each token reads from the state that arrives at its
    # chunk: from the chunks before (direction 0) or from the chunks after (direction 1).
    to_edge, decays = compute_chunk_decays(steps, sums)
    to_edge, decays, reach = (
        t.unflatten(0, (batch, -1)).unbind(2) for t in (to_edge, decays, sums.exp2())
    )
    for i in (0, 1):
        groups = B_in[:, :, :, i], C_out[:, :, :, i]
        y = y + carry_states(x, to_edge[i], decays[i], reach[i], *groups, backward=bool(i))
    return y.to(x.dtype).flatten(1, 2)[:, :length]


def cut_chunks(t: Tensor, chunk: int) -> Tensor:
    """Cuts t (B, L, groups, width) into chunks (B, C, T, groups, width) of T = `chunk` tokens;
    fills the last chunk up with zeros."""
    pad = -t.shape[1] % chunk
    if pad:
        t = F.pad(t, (0, 0, 0, 0, 0, pad))
    return t.unflatten(1, (-1, chunk))


def compute_chunk_decays(steps: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two tensors: the weight of each token in the state that leaves its chunk, which is
    the token's step size times the decay from the token to the chunk's end (S, 2, K, T); and the
    decay of a state that passes through the whole chunk (S, 2, K). Direction 1 runs backward, so
    the end of its chunk is the chunk's first token."""
    whole = torch.stack((sums[:, 0, :, -1], sums[:, 1, :, 0]), dim=1)
    return (whole.unsqueeze(-1) - sums).clamp(max=0.0).exp2() * steps, whole.exp2()


def carry_states(
    x: Tensor,
    to_edge: Tensor,
    decays: Tensor,
    reach: Tensor,
    B_in: Tensor,
    C_out: Tensor,
    backward: bool,
) -> Tensor:
    """Returns the contributions to each token's y that come from the chunks before the token's own
    chunk (if `backward`, from those after it), (B, C, T, K, P) in fp32. Each head has a state (N,
    P), which passes from chunk to chunk: a chunk multiplies the state by `decays` (B, C, K), and
    then adds its own tokens with weights `to_edge` (B, C, K, T). A token reads the state that
    arrives at its chunk with weight `reach` (B, C, K, T). States are summed in fp32; products run
    in the dtype of x.
    """
    heads = (x.shape[3], x.shape[4])
    weighted = (upcast(x) * to_edge.mT.unsqueeze(-1)).to(x.dtype)
    added = (B_in.mT @ weighted.flatten(3)).unflatten(-1, heads)
    states = sum_arriving_states(added, decays[:, :, None, :, None], backward).to(x.dtype)
    return upcast((C_out @ states.flatten(3)).unflatten(-1, heads)) * reach.mT.unsqueeze(-1)


def sum_arriving_states(
    added: Float[Tensor, "B C ..."], decays: Float[Tensor, "B C ..."], backward: bool
) -> Tensor:
    """Returns the state that arrives at each chunk, in the dtype of `decays`: the sum of the states
    that the chunks before this chunk (after this chunk, if `backward`) add, each multiplied by the
    decays of the chunks in between."""
    order = -1 if backward else 1
    states = [torch.zeros_like(added[:, 0], dtype=decays.dtype)]
    for part, decay in list(zip(added.unbind(1), decays.unbind(1), strict=True))[::order][:-1]:
        states.append(states[-1] * decay + part)
    return torch.stack(states[::order], dim=1)


def count_bidirectional_ssd_flops(tokens: int, heads: int, head_dim: int, state_dim: int) -> int:
    """Counts the FLOPs of a forward pass of one sample: the matrix products that the algorithm
    needs. Each pair of tokens counts once, not once per direction."""
    if tokens <= MAX_QUADRATIC_TOKENS:
        return 2 * tokens * tokens * (state_dim + heads * head_dim)
    inside = 2 * tokens * CHUNK_TOKENS * (state_dim + heads * head_dim)

    # A multiply-add is two FLOPs, and each of the two directions has two products: one writes
    # states, one reads them.
    states = 2 * 2 * 2 * tokens * state_dim * heads * head_dim
    return inside + states
