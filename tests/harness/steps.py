"""One tiny run under any techniques, for tests of accel/."""

import functools
import importlib.util
from dataclasses import replace

import torch

from accel import saved_tensors
from accel.evidence import BlockEvidence
from accel.stack import TECHNIQUES
from accel.techniques import float8
from accel.techniques.precision import Precision
from common.config.compose import compose
from common.config.schema import RuntimeConfig
from tests.harness.denoisers import fill_zero_layers
from tests.harness.words import CPU
from training.assemble import assemble as assemble_run

EAGER = RuntimeConfig().values()
VARIANTS = [dict(way) for kind in TECHNIQUES for way in kind.list_ways()]
"""Every technique in each of its ways, alone."""


def name_variant(variant):
    """A variant's name in the list of tests."""
    return "-".join(key if value is True else str(value) for key, value in variant.items())


def key_of(variant):
    """The key of the technique that a variant switches on."""
    return next(iter(variant))


def find_technique(key):
    return next(kind for kind in TECHNIQUES if kind.key == key)


def explain_unavailable(variant, device=CPU):
    """Why a variant cannot be had on a device; None if it can."""
    kind = find_technique(key_of(variant))
    options = {name: value for name, value in variant.items() if name in kind.options}
    return kind(variant[kind.key], device, **options).find_obstacle()


def allow_any_precision(monkeypatch):
    """Lets any CPU compute in 16 bits, and in 8 bits in tiny layers where torchao and this PyTorch
    can; tiny tensors count as large enough to be offloaded."""
    monkeypatch.setattr(saved_tensors, "MIN_MOVED_BYTES", 1024)
    on_gpu = Precision.find_obstacle

    def find_obstacle(self):
        if self.device.type == "cuda":
            return on_gpu(self)
        return explain_no_fp8(self.fp8_recipe) if self.value == "fp8" else None

    monkeypatch.setattr(Precision, "find_obstacle", find_obstacle)
    monkeypatch.setattr(float8, "MIN_FEATURES", 16)


@functools.cache
def explain_no_fp8(recipe="tensorwise"):
    """Why an fp8 recipe cannot run here; None if it can."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed."
    if recipe != "tensorwise":
        x = torch.ones(16, 16).to(torch.float8_e4m3fn)
        scale = torch.ones(16, 1)
        try:
            torch._scaled_mm(x, x.t(), scale, scale.t(), out_dtype=torch.bfloat16)
        except RuntimeError:
            return "This PyTorch has no products with a scale a row on a CPU."
    return None


@functools.cache
def compose_words(*words):
    return compose(list(words)).cfg


def checkpoint_values(policy):
    """Values that checkpoint blocks by a policy; None switches checkpointing off."""
    return {"gradient_checkpointing": policy is not None, "checkpoint_policy": policy or "blocks"}


def compile_values(scope):
    """Values that compile a scope; None switches compilation off."""
    return {"compile": scope is not None, "compile_scope": scope or "blocks"}


def tiny_training(family="mamba", *words, device=CPU, depth=2, **values):
    """Assembles a tiny run on digits under eager plus `values`, ready for its first step; no layer
    of its model is zero."""
    sizes = [
        "model.dim=64",
        f"model.depth={depth}",
        "model.head_dim=32",
        "batch_size=8",
        "total_samples=1000",
    ]
    sizes += [] if family in ("dit", "conv") else ["model.mixer.state_dim=16"]
    sizes += ["model.attention_every=2"] if family == "hybrid" else []
    rates = [
        "schedule.kind=constant",
        "schedule.warmup_samples=0",
        "ema.half_life_samples=100",
        "optim.lr=1e-3",
        "optim.weight_decay=0.01",
    ]
    runtime = [
        f"runtime.{'parallel.mode' if key == 'parallel' else key}={str(value).lower()}"
        for key, value in values.items()
    ]
    torch.manual_seed(0)
    cfg = compose_words(f"model={family}_s", *sizes, *rates, "runtime=eager", *runtime, *words)
    training = assemble_run(cfg, device)
    fill_zero_layers(training.model)
    training.state.ema.restart()
    if training.step.scaler is not None:
        # The scaler spends no step on the search for its scale.
        training.step.scaler.scale.fill_(1024.0)
    training.step.schedule(0)
    return training


def assemble(family="mamba", *words, **how):
    """Model, step, stack and loader of a tiny run."""
    training = tiny_training(family, *words, **how)
    return training.model, training.step, training.stack, training.loader


HEADS = ["objective.align_weight=1", "model.internal_block=1"]
"""Overrides with which a tiny hybrid has all further heads."""


def take_one_step(family="mamba", **values):
    """Takes one step, of a hybrid with all heads; returns the training, and loss, gradient norm and
    the model's state by name."""
    training = tiny_training(family, *(HEADS if family == "hybrid" else ()), **values)
    output = training.take_step()
    norms = {"loss": output.loss, "grad_norm": output.grad_norm}
    return training, norms | training.model.state_dict()


def read_ledger(training):
    """Warms a run up; returns the rows of its ledger by key."""
    return {row.key: row for row in training.warm_up()}


def ledger_of(family="mamba", *words, **how):
    """The rows of a tiny run's ledger by key."""
    return read_ledger(tiny_training(family, *words, **how))


def make_call(**changes):
    """Evidence of one call of a block in fp32, with some fields changed."""
    call = BlockEvidence(10, 100, torch.float32, torch.float32, (True, True), frozenset())
    return replace(call, **changes)
