"""One optimizer step, from micro-batches to updated parameters and their averages, without waiting
for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from accel.composite_optimizer import is_fused, split_parts
from accel.sharding import to_local, slice_like, replicate_like, total_norm
from common.errors import UserError
from data.loader import Batch
from models.adapters import find_trained_parameters
from training.config.schema import TrainConfig
from training.optimizers import Schedule

if TYPE_CHECKING:
    from accel.techniques.precision import LossScaler
    from training.objective import FlowMatching
    from training.state import TrainState


class StepOutput(NamedTuple):
    """Device scalars."""

    loss: Tensor
    """Mean over all samples of the step."""
    grad_norm: Tensor
    """Before clipping."""
    skipped: Tensor
    """1.0 if the norm was not finite or a spike, and parameters, moments and averages were left
    alone."""
    backed_off: Tensor
    """1.0 if the same happened because fp16's loss scale was too large: part of its search, no
    failure."""


class EMA:
    """Exponential moving average of the parameters, in fp32, with its length in samples.

    ema ← ema + w·(parameter - ema), with w = 1 - 0.5^(batch / half_life). The half-life is
    `half_life_samples`, and early in training at most `ramp` times the samples seen, so that the
    average is not dominated by initialisation (Karras et al. 2024, EDM2).
    """

    def __init__(self, model: nn.Module, half_life_samples: float, ramp: float = 0.05) -> None:
        if half_life_samples <= 0.0 or ramp <= 0.0:
            raise UserError(
                f"ema.half_life_samples={half_life_samples} and ema.ramp={ramp} must be above 0."
            )
        self.half_life_samples = half_life_samples
        self.ramp = ramp
        named = find_trained_parameters(model)
        self.names = list(named)
        self.parameters = list(named.values())
        self.averages = [p.detach().float().clone() for p in self.parameters]
        """Sharded like the parameters: the arithmetic is elementwise, so each process updates its
        own part."""
        average_of = dict(zip(self.parameters, self.averages, strict=True))
        self.parts = [
            [(p, average_of[p]) for group in part for p in group["params"]]
            for part in split_parts([{"params": self.parameters}])
        ]
        """Parameters with their averages, cut so that an update, while the gradients live, needs
        little more memory."""

    def compute_weight(self, samples: int, batch_size: int) -> float:
        """w for the step that ends at `samples` samples."""
        half_life = min(self.half_life_samples, self.ramp * samples)
        return 1.0 - 0.5 ** (batch_size / max(half_life, 1e-8))

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        """`weight` is a device scalar; 0 leaves the averages bit for bit as they are."""
        # Not _foreach_lerp_: it takes one weight as a host number only, which would wait for the
        # device.
        for part in self.parts:
            averages = [to_local(average) for _, average in part]
            moves = torch._foreach_sub([to_local(p.detach()) for p, _ in part], averages)
            torch._foreach_mul_(moves, weight)
            torch._foreach_add_(averages, moves)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """The model holds the averages inside and its own parameters again after, bit for bit.

        Parameters narrower than fp32 hold rounded averages, from copies that are made for the
        while.
        """
        narrow = [(p, p.detach().clone()) for p in self.parameters if p.dtype != torch.float32]
        self.exchange()
        try:
            yield
        finally:
            self.exchange()
            with torch.no_grad():
                for parameter, own in narrow:
                    parameter.copy_(own)

    @torch.no_grad()
    def exchange(self) -> None:
        for parameter, average in zip(self.parameters, self.averages, strict=True):
            own = parameter.detach().clone()
            parameter.copy_(average)
            if own.dtype == torch.float32:
                average.copy_(own)

    def state_dict(self) -> dict[str, Tensor]:
        """Averages by parameter name: a state dict that the model itself can load."""
        return dict(zip(self.names, self.averages, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = self.state_dict()
        if state.keys() != own.keys():
            raise UserError(
                "the averages do not fit the model; they differ in "
                f"{sorted(state.keys() ^ own.keys())[:5]}."
            )
        for name, average in own.items():
            to_local(average).copy_(slice_like(state[name], average))


class SpikeGuard:
    """A norm more than `sigmas` standard deviations above the mean of the last `window` ones is a
    spike.

    The window takes finite norms only: one NaN in it would make every comparison false. A spike
    enters it as the highest norm that would have passed, so that one alone does not blind the
    guard, and a lasting change of level is followed. Nothing is a spike before the window is full.
    (OLMo's SkipStep uses 6 deviations of 128 steps.)
    """

    def __init__(self, sigmas: float, window: int, device: torch.device) -> None:
        self.sigmas = sigmas
        self.norms = torch.zeros(window, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def passes(self, norm: Tensor) -> Tensor:
        """True for a norm that is finite and no spike; remembers it. Nothing waits for the
        device."""
        std, mean = torch.std_mean(self.norms)
        full = self.count >= len(self.norms)
        finite = torch.isfinite(norm)
        limit = torch.where(full, mean + self.sigmas * std, torch.inf)
        place = (self.count % len(self.norms)).view(1)
        kept = torch.where(finite, torch.minimum(norm, limit), self.norms[place])
        self.norms.index_copy_(0, place, kept)
        self.count.add_(finite)
        return finite & (norm <= limit)

    def state_dict(self) -> dict[str, Tensor]:
        return {"norms": self.norms, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """In place: a captured step goes on using these tensors. Another window, or none, starts
        anew."""
        fits = state.keys() == {"norms", "count"} and state["norms"].shape == self.norms.shape
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name]) if fits else tensor.zero_()


class TrainStep:
    """Takes one optimizer step: forward and backward per micro-batch, clipping, update, EMA.

    The loss is on the device of the batches. Rates, weights and what decides about the update are
    on that of the parameters, which `parallel.cpu_offload` keeps on the host; everywhere else the
    two are one.

    Techniques wrap `forward`, the network's forward pass, and `update`, the whole step; evaluation
    and sampling use the same `forward`. A benchmark sets `mark(phase)` to time the phases. Data
    parallelism sets `synchronise(last)`, which surrounds each micro-batch and disables gradient
    synchronisation on all but the last. `schedule(samples)` moves learning rate and EMA weight to
    the device before the step, so that the step itself never copies from the host. The optimizer
    decides on the device: a fused one gets the clipping factor as `grad_scale` and a non-finite
    norm as `found_inf`. An unfused one cannot, so there the host reads one flag a step.
    """

    def __init__(
        self, cfg: TrainConfig, state: TrainState, objective: FlowMatching, schedule: Schedule
    ) -> None:
        self.model = state.model
        self.forward: Callable[..., Tensor] = state.model
        self.update: Callable[[Sequence[Batch]], StepOutput] = self.take_step
        self.mark: Callable[[str], None] = lambda phase: None
        self.synchronise: Callable[[bool], AbstractContextManager[object]] = lambda last: (
            nullcontext()
        )
        self.scaler: LossScaler | None = None
        self.spikes = state.spikes
        self.phase = "the first step"
        """The phase that began last; messages about a failure name it."""
        self.objective = objective
        self.optimizer = state.optimizer
        self.lr_schedule = schedule
        self.ema = state.ema
        self.seed = cfg.seed
        self.batch_size = cfg.batch_size
        self.max_grad_norm = cfg.max_grad_norm or math.inf
        self.parameters = list(state.model.parameters())
        device = self.parameters[0].device
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        if is_fused(self.optimizer):
            for group in self.optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=device)
        self.ema_weight = torch.zeros((), device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        """Samples seen before the step, on the device."""
        self.lr = self.base_lrs[0]

    def schedule(self, samples: int) -> None:
        """Sets the rates for the step that starts at `samples` samples."""
        end = samples + self.batch_size
        factor = self.lr_schedule(end, self.batch_size)
        self.lr = self.base_lrs[0] * factor
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            rate = base * factor
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        self.ema_weight.fill_(self.ema.compute_weight(end, self.batch_size))
        self.position.fill_(samples)

    def losses(self, batch: Batch, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Loss and t of each sample, both (B,)."""
        return self.objective.losses(
            self.forward,
            batch,
            seed=self.seed,
            null_label=self.model.num_classes,
            drop_path_depth=self.model.depth if self.model.drop_path else 0,
            held_out=held_out,
        )

    def __call__(self, batches: Sequence[Batch]) -> StepOutput:
        return self.update(batches)

    def take_step(self, batches: Sequence[Batch]) -> StepOutput:
        total = self.accumulate(batches)
        self.phase = "the optimizer"
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = total_norm(grads)
        backed_off = torch.zeros_like(norm)
        if self.scaler is not None:
            scale = self.scaler.scale
            norm = norm / scale
            # at 1 there is nothing left to blame
            backed_off = (~norm.isfinite() & total.isfinite() & (scale > 1.0)).float()
        taken = norm.isfinite() if self.spikes is None else self.spikes.passes(norm)
        taken = taken.to(self.ema_weight.device)
        self.update_parameters(grads, norm.to(taken.device), taken)
        if self.scaler is not None:
            self.scaler.update((~norm.isfinite()).float())
        self.mark("optimizer")
        self.phase = "the averages"
        self.ema.update(torch.where(taken, self.ema_weight, 0.0))
        self.mark("ema")
        self.optimizer.zero_grad(set_to_none=True)
        self.phase = "what lies between two steps"
        output = StepOutput(total, norm, (~taken).float() - backed_off, backed_off)
        return StepOutput(*(scalar.to(total.device) for scalar in output))

    def accumulate(self, batches: Sequence[Batch]) -> Tensor:
        """Gradients of the mean loss over all micro-batches; returns that loss."""
        losses = []
        for i, batch in enumerate(batches):
            with self.synchronise(i + 1 == len(batches)):
                self.phase = "the forward pass"
                loss = self.losses(batch)[0].mean() / len(batches)
                self.mark("forward")
                self.phase = "the backward pass"
                (loss if self.scaler is None else loss * self.scaler.scale).backward()
                self.mark("backward")
            losses.append(loss.detach())
        return sum(losses[1:], losses[0])

    def update_parameters(self, grads: list[Tensor], norm: Tensor, taken: Tensor) -> None:
        """Clips, undoes the loss scale and updates; nothing at all where the step is not taken."""
        divisor = (norm / self.max_grad_norm).clamp(min=1.0)
        if self.scaler is not None:
            divisor = divisor * self.scaler.scale
        if is_fused(self.optimizer):
            self.optimizer.grad_scale = replicate_like(divisor, grads)  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.found_inf = replicate_like((~taken).float(), grads)  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.step()
        elif bool(taken):
            torch._foreach_div_([to_local(g) for g in grads], divisor)
            self.optimizer.step()
