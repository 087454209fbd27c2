"""Muon: gradient descent whose steps are orthogonalised matrices; AdamW for all other values.

Muon keeps one moment, the momentum. Instead of the momentum it adds to the weight a matrix with the
same singular vectors, whose singular values are all about 1 (Jordan 2024,
https://kellerjordan.github.io/posts/muon/). A step so moves the weight as far along rare directions
of the gradient as along frequent ones. Steps are scaled to the size of AdamW's, so that a rate for
AdamW fits (Liu et al. 2025, https://arxiv.org/abs/2502.16982).

Each layer states its matrices (`Layer.list_matrices` in models/layers.py): a fused projection, such
as q, k and v, is several matrices, and Muon orthogonalises each by itself. AdamW updates
embeddings, modulations, head, norms, convolutions, the scan's parameters, and rows of weights that
belong to no matrix.

If fsdp or hsdp shards parameters by rows, each parameter with matrices has an owner, one of the
processes that share it. The others send the owner their rows of the momentum; the owner
orthogonalises the whole matrices and sends the rows of the results back. The momentum itself stays
sharded.

Letters: N parameters of one shape, R rows, C columns; M matrices of one shape.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from accel.composite_optimizer import PART_ELEMENTS, Groups
from accel.sharding import add_up, divide_anew, list_grads, locate_shard, to_local
from common.errors import UserError
from models.layers import Ranges

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients a, b and c of the polynomial a·x + b·x³ + c·x⁵. Applied five times, it maps
singular values from about 0.01 to 1 to values from 0.7 to 1.2."""
ITERATIONS = 5
RMS = 0.2
"""Root mean square of the elements of a step of rate 1, about that of AdamW's steps."""
MIN_NORM = 1e-7
"""Number by which a matrix with a smaller norm is divided, so that zeros stay zeros."""


class Stack(NamedTuple):
    """Parameters of one shape with the same matrices."""

    parameters: list[Tensor]
    group: dict[str, Any]
    """The parameters' group; its option `matrices` has the ranges of rows that are matrices."""
    steps: Float[Tensor, "N R C"]
    """The parameters' momenta, which become Muon's steps when they are orthogonalised."""


class Muon(torch.optim.Optimizer):
    """Muon for the matrices that a parameter group's option `matrices` (ranges of rows) names, and
    AdamW for all other rows and parameters.

    `lr` is the rate of both, unless AdamW has its own, `adamw_lr`; a schedule scales both alike.
    `momentum` is Muon's, `betas` and `eps` are AdamW's. Weight decay is decoupled in both.

    The state of a parameter: `momentum`, of the parameter's shape, if it has matrices; `exp_avg`,
    `exp_avg_sq` and `step` if AdamW updates it, where the moments have AdamW's rows only. The
    momentum and the moments of whole parameters are sharded as the parameters are; of the moments
    of rows every process holds all.
    """

    form = "momentum"
    takes_matrices = True
    """`make_parameter_groups` states the matrices in the groups of a class with this attribute."""
    cpu_dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    """Type in which a CPU orthogonalises: one without instructions for bf16 is eight times as fast
    in fp32."""

    def __init__(
        self,
        groups: Groups,
        lr: float = 1e-3,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if lr <= 0.0 or (adamw_lr is not None and adamw_lr <= 0.0):
            raise UserError(f"optim.lr={lr} and optim.adamw_lr={adamw_lr} must be above 0.")
        if not all(0.0 <= beta < 1.0 for beta in (*betas, momentum)) or weight_decay < 0.0:
            raise UserError(
                f"optim.betas={list(betas)} and optim.momentum={momentum} must be at least 0 and "
                f"below 1, and optim.weight_decay={weight_decay} at least 0."
            )
        self.adamw_ratio = 1.0 if adamw_lr is None else adamw_lr / lr
        self.betas = betas
        self.momentum = momentum
        self.eps = eps
        # Mark the groups as fused, so that PyTorch loads AdamW's `step` onto the device. Do not
        # mark the optimizer, because it does not decide on the device whether to skip a step.
        fused = [group | {"fused": True} for group in groups]
        defaults = {"lr": lr, "weight_decay": weight_decay, "matrices": (), "rms": RMS}
        super().__init__(fused, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters that have a gradient."""
        assert closure is None
        stacks: list[Stack] = []
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters and group["matrices"]:
                stacks.append(Stack(parameters, group, self.update_momenta(parameters)))
            else:
                self.run_adamw(parameters, parameters, list_grads(parameters), group)
        self.orthogonalise(stacks)
        for stack in stacks:
            self.update_matrices(*stack)

    def run_adamw(
        self,
        parameters: list[Tensor],
        weights: list[Tensor],
        grads: list[Tensor],
        group: dict[str, Any],
    ) -> None:
        """Updates `weights` by AdamW; `parameters` are the keys of their state."""
        states = [self.state[parameter] for parameter in parameters]
        for state, weight in zip(states, weights, strict=True):
            if "step" not in state:
                state["exp_avg"] = torch.zeros_like(weight)
                state["exp_avg_sq"] = torch.zeros_like(weight)
                state["step"] = torch.zeros((), device=weight.device)

        # Sharded tensors are updated shard by shard, because AdamW is elementwise.
        moments = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")]
        adamw(
            *[[to_local(tensor) for tensor in part] for part in (weights, grads, *moments)],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=group["lr"] * self.adamw_ratio,
            weight_decay=group["weight_decay"],
            eps=self.eps,
            maximize=False,
        )

    def update_momenta(self, parameters: list[Tensor]) -> Float[Tensor, "N R C"]:
        """Updates the momenta of parameters of one shape. Returns Nesterov's momenta, of sharded
        parameters those of the parameters that this process owns."""
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        momenta = [to_local(self.state[p]["momentum"]) for p in parameters]
        grads = [to_local(grad) for grad in list_grads(parameters)]
        torch._foreach_lerp_(momenta, grads, 1.0 - self.momentum)
        dtype = self.cpu_dtype if grads[0].is_cpu else torch.bfloat16
        ahead = [g.lerp(m, self.momentum).to(dtype) for g, m in zip(grads, momenta, strict=True)]
        # Divide the stack of parameters instead of their rows, so that each matrix is whole.
        return divide_anew(torch.stack(ahead), parameters[0], old=1, new=0, count=len(parameters))

    def orthogonalise(self, stacks: list[Stack]) -> None:
        """Orthogonalises and scales the matrices in place. Matrices of one shape, up to
        transposition, go through one computation, in batches of up to `PART_ELEMENTS` elements."""
        matrices: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for stack in stacks:
            for first, last in stack.group["matrices"]:
                part = stack.steps[:, first:last]
                part = part.mT if part.shape[1] > part.shape[2] else part
                matrices[part.shape[1:]].append(part)

        for shape, parts in matrices.items():
            batches = torch.cat(parts).split(max(1, PART_ELEMENTS // shape.numel()))
            results = torch.cat([iterate(batch) for batch in batches])
            results *= RMS * math.sqrt(shape[1])
            for part, result in zip(parts, results.split(list(map(len, parts))), strict=True):
                part.copy_(result)

    def update_matrices(
        self, parameters: list[Tensor], group: dict[str, Any], steps: Float[Tensor, "N R C"]
    ) -> None:
        """Adds Muon's steps to parameters of one shape, and updates by AdamW their rows that belong
        to no matrix."""
        # Let AdamW update copies of its rows, because Muon's step goes over all rows.
        like = parameters[0]
        gaps = list_gaps(group["matrices"], like.shape[0])
        partial = parameters if gaps else []
        copies = [copy_rows(p, gaps) for p in partial]
        if gaps:
            # The gradients become equal on all processes, so the moments stay equal too.
            grads = torch.stack([copy_rows(grad, gaps) for grad in list_grads(partial)])
            self.run_adamw(partial, copies, list(add_up(grads, like)), group)

        steps = divide_anew(steps, like, old=0, new=1, count=len(parameters))
        for parameter, step in zip(parameters, steps, strict=True):
            weight = to_local(parameter)
            weight.mul_(1.0 - group["lr"] * group["weight_decay"])
            weight.add_(step.float(), alpha=-group["lr"])
        for parameter, copied in zip(partial, copies, strict=True):
            for held, new in pair_rows(parameter, copied, gaps):
                held.copy_(new)


def iterate(x: Float[Tensor, "M R C"]) -> Float[Tensor, "M R C"]:
    """Orthogonalises matrices with R ≤ C by Newton and Schulz's iteration: polynomials of a matrix
    that move all of its singular values towards 1."""
    a, b, c = COEFFICIENTS
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=MIN_NORM)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


def list_gaps(ranges: Ranges, rows: int) -> Ranges:
    """Returns the ranges of those of a parameter's `rows` rows that are in none of `ranges`."""
    edges = [0, *chain(*sorted(ranges)), rows]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((first, last) for first, last in pairs if first < last)


def pair_rows(tensor: Tensor, copied: Tensor, ranges: Ranges) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields two views for each range: those of its rows of `tensor` that this process holds, and
    the same rows of `copied`, a tensor with the rows of all ranges."""
    start = locate_shard(tensor)[1][0] if isinstance(tensor, DTensor) else 0
    parts = copied.split([last - first for first, last in ranges])
    for (first, last), part in zip(ranges, parts, strict=True):
        held = to_local(tensor)[max(0, first - start) : max(0, last - start)]
        yield held, part[max(0, start - first) :][: len(held)]


def copy_rows(tensor: Tensor, ranges: Ranges) -> Tensor:
    """Returns a copy of the rows in `ranges`, with zeros for the rows of other processes."""
    count = sum(last - first for first, last in ranges)
    copied = to_local(tensor).new_zeros(count, tensor.shape[1])
    for held, part in pair_rows(tensor, copied, ranges):
        part.copy_(held)
    return copied
