"""Takes an optimizer step, from micro-batches to updated parameters and averages, without waiting
for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from accel.composite_optimizer import is_fused
from accel.sharding import list_grads, replicate_like, to_local, total_norm
from common.config.schema import TrainConfig
from data.loader import Batch
from training.objective import Losses, Network, Objective
from training.optim.schedule import Schedule
from training.records.metrics import StepOutput
from training.state import TrainState

if TYPE_CHECKING:
    from accel.techniques.precision import LossScaler


class TrainStep:
    """Takes one optimizer step: forward and backward per micro-batch, clipping, update, EMA.

    The loss is on the batches' device. Learning rates, weights of the averages and the flag that
    decides about the update are on the parameters' device. The two devices differ only under
    `parallel.cpu_offload`.

    Techniques wrap `forward`, the network's forward pass, and `update`, the whole step; evaluation
    and sampling use the same `forward`. A benchmark sets `mark(phase)` to time the phases. Data
    parallelism sets `synchronise(last)`, a context manager around each micro-batch, which disables
    gradient synchronisation for all micro-batches but the last. `schedule(samples)` moves learning
    rate and weights of the averages to the device before the step, so that the step itself never
    copies from the host. A fused optimizer decides on the device whether to update: it takes the
    clipping factor as `grad_scale` and skips the update if `found_inf` is set. For any other
    optimizer the host reads one flag a step and decides.
    """

    def __init__(
        self, cfg: TrainConfig, state: TrainState, objective: Objective, schedule: Schedule
    ) -> None:
        # Techniques may replace the attributes from `forward` to `scaler`.
        self.forward: Network = state.network
        self.update: Callable[[Sequence[Batch]], StepOutput] = self.take_step
        self.mark: Callable[[str], None] = lambda phase: None
        self.synchronise: Callable[[bool], AbstractContextManager[object]] = lambda last: (
            nullcontext()
        )
        self.scaler: LossScaler | None = None
        self.spikes = state.spikes
        self.phase = "the first step"
        """Current phase of the step; if memory runs out, the error message names this phase."""

        self.model = state.network.model
        self.objective = objective
        self.optimizer = state.optimizer
        self.lr_schedule = schedule
        self.seed = cfg.seed
        self.batch_size = cfg.batch_size
        self.max_grad_norm = cfg.max_grad_norm or math.inf
        self.parameters = list(state.network.parameters())
        unclipped = set(state.network.list_unclipped())
        self.unclipped_parameters = [p for p in self.parameters if p in unclipped]
        self.clipped_parameters = [p for p in self.parameters if p not in unclipped]

        # Keep the learning rates of a fused optimizer on the device, so that a captured CUDA graph
        # sees new values.
        device = self.parameters[0].device
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.fused = is_fused(self.optimizer)
        if self.fused:
            for group in self.optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=device)
        averages = (state.ema, *state.power_averages)
        self.averages = [(average, torch.zeros((), device=device)) for average in averages]
        """Pairs (average of the weights, its weight w as a scalar tensor on the device)."""
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        """Number of samples that the run has seen before the step, as a tensor of shape (1,) on the
        device."""
        self.lr = self.base_lrs[0]

    def schedule(self, samples: int, factor: float | None = None) -> None:
        """Sets learning rates, weights of the averages and position for the next step, before which
        the run has seen `samples` samples. `factor` takes the place of the schedule's factor of the
        learning rates."""
        end = samples + self.batch_size
        if factor is None:
            factor = self.lr_schedule(end, self.batch_size)
        self.lr = self.base_lrs[0] * factor
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            rate = base * factor
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        for average, weight in self.averages:
            weight.fill_(average.compute_weight(end, self.batch_size))
        self.position.fill_(samples)

    def compute_velocity(self, *inputs: Any, **options: Any) -> Tensor:
        """Computes the model's velocity, with the arguments of its `forward`, for evaluation."""
        return self.forward(*inputs, **options)[0]

    def compute_losses(self, batch: Batch, held_out: bool = False) -> Losses:
        """Returns what the objective computes for each sample."""
        losses = self.objective.compute_losses(
            self.forward,
            batch,
            seed=self.seed,
            null_label=self.model.num_classes,
            drop_path_depth=self.model.depth if self.model.drop_path else 0,
            held_out=held_out,
        )
        return Losses(*losses)

    def __call__(self, batches: Sequence[Batch]) -> StepOutput:
        return self.update(batches)

    def take_step(self, batches: Sequence[Batch]) -> StepOutput:
        """Takes one optimizer step on its micro-batches. Techniques may wrap this method; the
        attribute `update` is the method with all wrappers."""
        losses = self.accumulate(batches)

        # Decide on the device whether the parameters are updated.
        self.phase = "the optimizer"
        grads = list_grads(self.parameters)
        norm = self.measure_norm()
        backed_off = torch.zeros_like(norm)
        if self.scaler is not None:
            scale = self.scaler.scale
            norm = norm / scale
            # If the loss is finite but the gradient norm is not, the loss scale was too large; at a
            # scale of 1 there is another cause.
            finite = torch.stack([*losses.values()]).isfinite().all()
            backed_off = (~norm.isfinite() & finite & (scale > 1.0)).float()
        taken = norm.isfinite() if self.spikes is None else self.spikes.admit(norm)
        taken = taken.to(self.position.device)

        # Update parameters and averages.
        self.update_parameters(grads, norm.to(taken.device), taken)
        if self.scaler is not None:
            self.scaler.update((~norm.isfinite()).float())
        self.mark("optimizer")
        self.phase = "the averages"
        for average, weight in self.averages:
            average.update(torch.where(taken, weight, 0.0))
        self.mark("ema")
        self.optimizer.zero_grad(set_to_none=True)
        self.phase = "the pause between two steps"
        output = StepOutput(losses, norm, (~taken).float() - backed_off, backed_off)
        return tree_map(partial(Tensor.to, device=losses["loss"].device), output)

    def measure_norm(self) -> Tensor:
        """Returns the norm of the gradients, which leaves out those of `list_unclipped`; NaN if one
        of these is not finite. Clipping divides them by the same factor as all others."""
        norm = total_norm(list_grads(self.clipped_parameters))
        unclipped = list_grads(self.unclipped_parameters)
        if not unclipped:
            return norm
        return torch.where(total_norm(unclipped).isfinite(), norm, torch.nan)

    def accumulate(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Accumulates the gradients of the mean loss over all micro-batches, with the extra terms;
        returns the mean of each term (see `Losses.name_terms`), a scalar."""
        sums: dict[str, Tensor] = {}
        for i, batch in enumerate(batches):
            with self.synchronise(i + 1 == len(batches)):
                self.phase = "the forward pass"
                terms = self.compute_losses(batch).name_terms()
                means = {name: term.mean() / len(batches) for name, term in terms.items()}
                loss = reduce(torch.add, means.values())
                self.mark("forward")
                self.phase = "the backward pass"
                (loss if self.scaler is None else loss * self.scaler.scale).backward()
                self.mark("backward")
            for name, mean in means.items():
                sums[name] = sums[name] + mean.detach() if name in sums else mean.detach()
        return sums

    def update_parameters(self, grads: list[Tensor], norm: Tensor, taken: Tensor) -> None:
        """Divides the gradients by the loss scale, clips them to the norm `max_grad_norm`, and
        updates the parameters. If `taken` is false, changes no parameter."""
        divisor = (norm / self.max_grad_norm).clamp(min=1.0)
        if self.scaler is not None:
            divisor = divisor * self.scaler.scale
        if self.fused:
            self.optimizer.grad_scale = replicate_like(divisor, grads)  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.found_inf = replicate_like((~taken).float(), grads)  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.step()
        elif bool(taken):
            torch._foreach_div_(list(map(to_local, grads)), divisor)
            self.optimizer.step()
