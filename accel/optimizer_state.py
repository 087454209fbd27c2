"""What the optimizer keeps for each parameter: a row of the ledger, counted from its tensors.

Not a switch of `runtime`: the value is what the configuration's optimizer promises. `fp32`: two
moments of fp32 (AdamW, 8 bytes a parameter); `momentum`: one (Muon's matrices, SGD, 4 bytes);
`8bit`, `4bit`, `fp8`: both moments narrow (2, 1 and 2 bytes, and scales); `factored`: a row and a
column of second moments (Adafactor); `none`: nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.composite_optimizer import COMPENSATION, is_fused, kept_by, parameters_of
from accel.evidence import Evidence
from accel.technique import AnyStep, Observation, Technique

SMALL = 4096
"""Elements below which the libraries keep moments in fp32."""
NARROW = {torch.uint8: "8bit", torch.float8_e4m3fn: "fp8"}


class Promise(NamedTuple):
    """The form of state that an optimizer promises, and for which parameters."""

    form: str
    block: int = 1
    """It holds for parameters that blocks of so many elements divide."""

    def holds_for(self, parameter: Tensor) -> bool:
        if self.form in ("8bit", "4bit", "fp8"):
            return parameter.numel() >= SMALL and parameter.numel() % self.block == 0
        if self.form == "factored":
            return parameter.ndim > 1
        return parameter.ndim == 2 or self.form != "momentum"


OF_TORCH = {"Adafactor": Promise("factored"), "Adam": Promise("fp32"), "AdamW": Promise("fp32")}


def promised(kind: type, momentum: float = 0.0) -> Promise:
    """What an optimizer of this class keeps; of SGD with `momentum` one moment."""
    if kind is torch.optim.SGD:
        return Promise("momentum" if momentum else "none")
    own = Promise(getattr(kind, "form", "fp32"), getattr(kind, "block", 1))
    return OF_TORCH.get(kind.__name__, own) if kind.__module__.startswith("torch.") else own


def form_of(kept: Mapping[str, Any], size: int) -> str:
    """The form of what is kept for one parameter of `size` elements."""
    tensors = [t for name, t in kept.items() if isinstance(t, Tensor) and name != COMPENSATION]
    for dtype, name in NARROW.items():
        if any(t.dtype is dtype for t in tensors):
            packed = sum(t.numel() for t in tensors if t.dtype is dtype) == size
            return "4bit" if packed else name
    if "row_var" in kept:
        return "factored"
    full = sum(t.numel() == size and t.ndim > 0 and t.is_floating_point() for t in tensors)
    return {0: "none", 1: "momentum"}.get(full, "fp32")


class OptimizerState(Technique):
    key = "optim"
    summary = "the form of the optimizer's state, counted"
    off = "fp32"
    loss_rtol = 0.0

    def __init__(self, promise: Promise, device: torch.device) -> None:
        super().__init__(promise.form, device)
        self.promise = promise
        self.optimizer: Any = None

    def on_step(self, step: AnyStep) -> AnyStep:
        self.optimizer = getattr(step, "optimizer", None)
        return step

    # What would still say "on" if this did nothing? The optimizer's class would, so the row looks
    # at dtype and size of every tensor that is kept.
    def observe(self, evidence: Evidence) -> Observation:
        optimizer = self.optimizer
        meant: Counter[str] = Counter()
        others: Counter[str] = Counter()
        total = size = 0
        for parameter in parameters_of(optimizer):
            kept = kept_by(optimizer, parameter)
            counts = meant if self.promise.holds_for(parameter) else others
            counts[form_of(kept, parameter.numel())] += 1
            total += sum(t.nbytes for t in kept.values() if isinstance(t, Tensor))
            size += parameter.numel()
        note = f"{meant[self.promise.form]} of {meant.total()} parameters keep {self.promise.form}"
        if wrong := meant - Counter({self.promise.form: meant.total()}):
            note += f" ({counted(wrong)})"
        if others:
            note += f"; {others.total()} smaller or of another shape: {counted(others)}"
        note += f"; {total / max(1, size):.2f} bytes a parameter, {total / 2**20:.2f} MiB"
        note += "" if is_fused(optimizer) else "; to skip a step the host reads one flag a step"
        right = meant[self.promise.form] == meant.total()
        return Observation(self.promise.form if right else "mixed", note)


def counted(forms: Counter[str]) -> str:
    return ", ".join(f"{n} {form}" for form, n in forms.items())
