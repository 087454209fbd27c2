"""Fused operators for the scan of long sequences, which is quadratic inside chunks and passes
states from chunk to chunk.

`scan_in_chunks` (definition.py) is the definition. `ssd_states` computes the state that a chunk
adds; `ssd_read` computes the values that a chunk's tokens read from a state. The backward pass of
`ssd_states` calls `ssd_read`, and that of `ssd_read` calls `ssd_states`; the first calls
`ssd_groups` for the gradient of B, the second for the gradient of C. The three operators run Triton
on a GPU (chunks_triton.py) and PyTorch elsewhere. PyTorch sums the states from chunk to chunk, in
fp32.

Letters: B samples, L tokens, K heads, P head dim, N state size; T tokens a chunk, C chunks a
sample, S = B·C. The scan's own B and C are called `B_in` and `C_out`, or `groups` where either may
be given.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from accel.kernels.registry import keep_inputs, make_differentiable, register, upcast
from accel.kernels.ssd.definition import compute_chunk_decays, sum_arriving_states


def weight_by_direction(x: Tensor, weights: Tensor) -> Float[Tensor, "S 2 K T P"]:
    """Multiplies x (S, T, K, P) by `weights` (S, 2, K, T), one weight for each token, head and
    direction; returns the products in the dtype of x."""
    return (upcast(x).transpose(1, 2).unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype)


def compute_states(x: Tensor, groups: Tensor, weights: Tensor) -> Tensor:
    """Returns the state that each chunk adds for each direction, (S, 2, K, N, P) in fp32: the sum
    of weight_t · group_t ⊗ x_t over the chunk's T tokens. x is (S, T, K, P), `weights` (S, 2, K,
    T). `groups` (S, T, 2, N) is B_in in the forward pass, C_out in the backward pass."""
    return upcast(groups.permute(0, 2, 3, 1).unsqueeze(2) @ weight_by_direction(x, weights))


def read_states(
    states: Tensor, groups: Tensor, weights: Tensor, inside: Tensor | None, other: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes read_t = group_t · state for each token, head and direction, where `state` is the
    state of the token's chunk. Returns two tensors. The first, (S, T, K, P), is weight_t · read_t
    summed over the two directions, plus `inside` (S, T, K, P) if given. The second, (S, 2, K, T) in
    fp32, is the dot product of each read_t with `other` (S, T, K, P); it is empty if `other` is
    None."""
    # `read` has the shape (S, 2, K, T, P).
    read = upcast(groups.transpose(1, 2).unsqueeze(2) @ states.to(groups.dtype))
    out = (read * weights.unsqueeze(-1)).sum(1).transpose(1, 2)
    out = out if inside is None else out + upcast(inside)
    dots = weights.new_empty(0)
    if other is not None:
        dots = (read * upcast(other).transpose(1, 2).unsqueeze(1)).sum(-1)
    return out.to(groups.dtype).contiguous(), dots


def compute_group_gradients(states: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """Returns the gradient of B_in or C_out, (S, T, 2, N) in the dtype of x: the sum of weight_t ·
    x_t · stateᵀ over the heads."""
    products = upcast(weight_by_direction(x, weights) @ states.to(x.dtype).mT)
    return products.sum(2).transpose(1, 2).to(x.dtype).contiguous()


ssd_states = register(
    "ssd_states(Tensor x, Tensor groups, Tensor weights) -> Tensor",
    compute_states,
    "accel.kernels.ssd.chunks_triton.launch_states",
)
ssd_read = register(
    "ssd_read(Tensor states, Tensor groups, Tensor weights, Tensor? inside, Tensor? other) -> "
    "(Tensor, Tensor)",
    read_states,
    "accel.kernels.ssd.chunks_triton.launch_read",
)
ssd_groups = register(
    "ssd_groups(Tensor states, Tensor x, Tensor weights) -> Tensor",
    compute_group_gradients,
    "accel.kernels.ssd.chunks_triton.launch_groups",
)


def compute_states_gradients(
    dstates: Tensor, x: Tensor, B_in: Tensor, weights: Tensor
) -> tuple[Tensor, ...]:
    """Returns the gradients of x, B_in and weights."""
    dstates = dstates.contiguous()
    dx, dweights = ssd_read(dstates, B_in, weights, None, x)
    return dx, ssd_groups(dstates, x, weights), dweights


def compute_read(y: Tensor, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Adds to y the value that each token reads from the state that arrives at its chunk. Returns
    the sum, and `inputs` (states, C_out and weights), which the backward pass needs."""
    return ssd_read(*inputs, y, None)[0], inputs


def compute_read_gradients(
    dy: Tensor, states: Tensor, C_out: Tensor, weights: Tensor
) -> tuple[Tensor, ...]:
    """Returns the gradients of y, states, C_out and weights."""
    dy = dy.contiguous()
    dweights = ssd_read(states, C_out, weights, None, dy)[1]
    return dy, ssd_states(dy, C_out, weights), ssd_groups(states, dy, weights), dweights


differentiable_states = make_differentiable(keep_inputs(ssd_states), compute_states_gradients)
differentiable_read = make_differentiable(compute_read, compute_read_gradients)


def add_between_chunks(
    y: Float[Tensor, "S T K P"],
    x: Float[Tensor, "S T K P"],
    steps: Float[Tensor, "S 2 K T"],
    sums: Float[Tensor, "S 2 K T"],
    B_in: Float[Tensor, "S T 2 N"],
    C_out: Float[Tensor, "S T 2 N"],
    batch: int,
) -> Float[Tensor, "S T K P"]:
    """Takes the y of the scan inside each chunk, adds to each token's y the contributions of all
    other chunks of the same sample, and returns the sum. `batch` is the number of samples B."""
    to_edge, decays = compute_chunk_decays(steps, sums)
    added = differentiable_states(x, B_in, to_edge).unflatten(0, (batch, -1))
    decays = decays.unflatten(0, (batch, -1))[..., None, None]
    states = [
        sum_arriving_states(added[:, :, i], decays[:, :, i], backward=bool(i)) for i in (0, 1)
    ]
    return differentiable_read(y, torch.stack(states, dim=2).flatten(0, 1), C_out, sums.exp2())
