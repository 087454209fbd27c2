"""One tiny run under any techniques, for tests of accel/."""

from __future__ import annotations

import torch

from accel.stack import TECHNIQUES, AccelerationStack
from accel.technique import Technique
from data.digits import DigitLatents
from tests.test_models import tiny, woken
from training.assemble import runtime_values
from training.config.schema import RuntimeConfig
from training.ema import EMA
from training.objective import FlowMatching
from training.optim import parameter_groups
from training.schedule import Schedule
from training.step import TrainStep

CPU = torch.device("cpu")
EAGER = runtime_values(RuntimeConfig())
VARIANTS = [dict(way) for kind in TECHNIQUES for way in kind.ways()]
"""Every technique in each of its ways, alone."""


def named(variant: dict) -> str:
    return "-".join(key if value is True else str(value) for key, value in variant.items())


def key_of(variant: dict) -> str:
    return next(iter(variant))


def technique(key: str) -> type[Technique]:
    return next(kind for kind in TECHNIQUES if kind.key == key)


def cannot_be_had(variant: dict, device: torch.device = CPU) -> str | None:
    return technique(key_of(variant))(variant[key_of(variant)], device).unavailable()


def assemble(
    family="mamba", max_grad_norm=1.0, optimizer=torch.optim.AdamW, techniques=None, device=CPU, depth=2, **values
):
    """Model, step, stack and loader of one tiny run under eager plus `values`."""
    loader = DigitLatents(batch_size=8, seed=0, device=device)
    model = woken(tiny(family, channels=1, num_classes=10, depth=depth)).to(device)
    stack = AccelerationStack(EAGER | values, device)
    if techniques:
        stack.techniques += techniques
    stack.on_process()
    model = stack.on_model(model)
    made = optimizer(parameter_groups(model, 0.01), lr=1e-3, **stack.optimizer_kwargs())
    rates = {"seed": 0, "batch_size": 8, "max_grad_norm": max_grad_norm}
    step = TrainStep(model, FlowMatching(), made, Schedule("constant", 1000), EMA(model, 100.0), **rates)
    step = stack.on_step(step)
    if step.scaler is not None:
        step.scaler.scale.fill_(1024.0)  # found already, so that no step is spent on finding it
    step.schedule(0)
    return model, step, stack, loader


def one_step(family="mamba", **values):
    """Loss, gradient norm and parameters after one step."""
    model, step, _, loader = assemble(family, **values)
    output = step([next(loader)])
    return output.loss, output.grad_norm, [p.detach().clone() for p in model.parameters()]


def ledger_of(family="mamba", **values):
    """The rows of the ledger by key, after a warm-up."""
    model, step, stack, loader = assemble(family, **values)
    ledger = stack.warm_up(lambda: step([next(loader)]), model.blocks)
    return {row.key: row for row in ledger}
