"""Whether an adapter trains: a row of the ledger, counted from its gradients.

Not a switch of `runtime`. Elsewhere fused paths read a layer's weight past the adapter on it, which
then trains nothing and nobody notices. Of each parameter of each adapted layer this row counts
whether the backward pass reached it, and whether its gradient was other than zero in one of the
steps of warm-up: LoRA's B starts at zero, so that A has a gradient from the second step on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel.evidence import Evidence
from accel.sharding import local, world_size
from accel.technique import AnyStep, Model, Observation, Technique, switches


class AdapterGradients(Technique):
    key = "adapter"
    summary = "an adapter on frozen weights; counts the layers that it trains"
    off = "none"
    loss_rtol = 0.0

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.model: Any = None
        self.step: Any = None
        self.steps: list[dict[str, Tensor | None]] = []
        """Of each step so far: parameter -> whether its gradient has a value other than zero; None:
        no gradient."""
        self.taken: list[Tensor] = []
        """Of each step, whether it moved the weights."""

    def on_model(self, model: Model) -> Model:
        self.model = model
        return model

    def on_step(self, step: AnyStep) -> AnyStep:
        self.step = step
        update = self.step.optimizer_step

        def looking(grads: list[Tensor], norm: Tensor, taken: Tensor) -> None:
            self.steps.append({name: moves(p.grad) for name, p, _ in self.parameters()})
            self.taken.append(taken)
            update(grads, norm, taken)

        self.step.optimizer_step = looking
        return step

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, str]]:
        """Name, parameter, and what an adapter calls it, of all that the adapted layers train."""
        names = {module: name for name, module in self.model.named_modules()}
        for layer in switches(self.model, "base_layer"):
            for own, parameter in layer.named_parameters():
                if not own.startswith("base_layer."):
                    yield f"{names[layer]}.{own}", parameter, own

    def on_warm(self) -> bool:
        """Only warm-up looks at gradients."""
        vars(self.step).pop("optimizer_step", None)
        return False

    # What would still say "on" if this did nothing? Layers that were attached would, so the row
    # counts the gradients other than zero that arrive in them.
    def observe(self, evidence: Evidence) -> Observation:
        kinds = {name: kind for name, _, kind in self.parameters()}
        layers = {name: name.removesuffix(f".{kind}") for name, kind in kinds.items()}
        used = set[str]()
        moved = dict[str, int]()
        for number, flags in enumerate(self.together(), start=1):
            for name, flag in zip(kinds, flags.tolist(), strict=True):
                if flag >= 0:
                    used.add(name)
                if flag > 0:
                    moved.setdefault(name, number)

        # fp16 may skip the first steps; then A waits for B.
        updated = any(bool(taken) for taken in self.taken[:-1])
        idle = {layers[name] for name in kinds if name not in (moved if updated else used)}
        unused = {layers[name] for name in kinds if name not in used}
        every = len({*layers.values()})
        counts = []
        for kind, total in Counter(kinds.values()).items():
            steps = [step for name, step in moved.items() if kinds[name] == kind]
            since = f" from step {min(steps)} on" if steps else ""
            counts.append(f"{kind} {len(steps)} of {total}{since}")
        note = f"{every - len(unused)} of {every} adapted layers in the backward pass; gradients "
        note += f"other than zero: {', '.join(counts)}"
        if idle:
            note += f"; none: {', '.join(sorted(idle)[:3])}{', …' * (len(idle) > 3)}"
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        trained = sum(size for size, trains in sizes if trains)
        note += f"; {trained} of {sum(size for size, _ in sizes)} parameters train"
        return Observation("partly" if idle else self.value, note)

    def together(self) -> list[Tensor]:
        """Of each step a flag for each parameter, of all processes: -1 no gradient, 0 all zeros, 1
        others."""
        found = []
        for step in self.steps:
            none = torch.full((), -1.0, device=self.device)
            flags = torch.stack([none if flag is None else flag.to(none) for flag in step.values()])
            if world_size() > 1:
                dist.all_reduce(flags, dist.ReduceOp.MAX)
            found.append(flags)
        return found


def moves(gradient: Tensor | None) -> Tensor | None:
    """1 if a value is other than zero; on the device, so that nothing waits."""
    return None if gradient is None else (local(gradient) != 0).any().float()
