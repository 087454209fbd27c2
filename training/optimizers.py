"""Parameter groups, the learning-rate schedule, and optimizers beside PyTorch's own.

Optimizers with a smaller state than AdamW's, and Muon: well-kept libraries behind PyTorch's
interface.

Bytes a parameter that AdamW keeps: 8. Here: 8-bit moments 2, 4-bit 1, fp8 2, and what their scales
take; Muon 4 for matrices. What they cost: rounding of the moments (docs/memory.md has losses
measured), and none of them decides on the device, so the host reads one flag a step, and
`runtime.cuda_graph` refuses them. The ledger's row `optim` counts the parameters whose state really
has the promised form, and the bytes.

References: Dettmers et al. 2021, https://arxiv.org/abs/2110.02861 (8-bit); Li et al. 2023,
https://arxiv.org/abs/2309.01507 (4-bit); Jordan 2024, https://kellerjordan.github.io/posts/muon/;
Liu et al. 2025, https://arxiv.org/abs/2502.16982 (Muon's rate matched to AdamW's by RMS).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from accel.composite_optimizer import Groups, Members, select_groups
from common.libraries import import_optional
from models.adapters import find_trained_parameters
from models.denoiser import Denoiser
from training.config.schema import ScheduleKind


def make_parameter_groups(model: Denoiser, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of what is trained: matrices, which decay, and all that the model's
    `no_weight_decay()` names."""
    exempt = model.no_weight_decay()
    named = find_trained_parameters(model).items()
    groups = [
        {"params": [p for name, p in named if name not in exempt], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@dataclass(frozen=True)
class Schedule:
    """Factor on the learning rate: linear warm-up over `warmup_samples`, then constant, or cosine
    to `final` of it."""

    kind: str
    total_samples: int
    warmup_samples: int = 0
    final: float = 0.0

    def __call__(self, samples: float, batch_size: int = 0) -> float:
        """Factor for the step of `batch_size` samples that ends at `samples`.

        Of a cosine's last step it is that of its middle: at its end a cosine to 0 has reached 0.
        """
        if samples < self.warmup_samples:
            return samples / self.warmup_samples
        if self.kind == ScheduleKind.constant:
            return 1.0
        samples = min(samples, self.total_samples - batch_size / 2)
        length = max(1, self.total_samples - self.warmup_samples)
        progress = min((samples - self.warmup_samples) / length, 1.0)
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))


class LibraryAdamW(Members):
    """A library's AdamW: the class of this name in it."""

    library: str
    """The module, imported when it is first used."""
    wanted_by: str
    """The key that asks for it, for the sentence where it is missing."""

    def __init__(
        self,
        groups: Groups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        kind = getattr(import_optional(self.library, self.wanted_by), type(self).__name__)
        made = kind(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(groups, [made])


class AdamW8bit(LibraryAdamW):
    """AdamW with both moments in 8 bits, in blocks of 256 with a scale each, by bitsandbytes.

    Moments of parameters below 4,096 elements stay fp32. On a GPU the library waits for the device
    after each update of a parameter.
    """

    form = "8bit"
    library = "bitsandbytes.optim"
    wanted_by = "optim=adamw_8bit"


class TorchaoAdamW(LibraryAdamW):
    """AdamW of torchao: its update is compiled on a GPU, and runs uncompiled on a CPU.

    Moments of parameters below 4,096 elements, and of those that blocks do not divide, stay fp32.
    """

    library = "torchao.optim"
    wanted_by = "optim=adamw_4bit or adamw_fp8"

    def surround_update(self, member: torch.optim.Optimizer) -> AbstractContextManager[object]:
        on_gpu = member.param_groups[0]["params"][0].is_cuda
        return nullcontext() if on_gpu else torch.compiler.set_stance("force_eager")


class AdamW4bit(TorchaoAdamW):
    """AdamW with both moments in 4 bits, in blocks of 128, by torchao."""

    form = "4bit"
    block = 128


class AdamWFp8(TorchaoAdamW):
    """AdamW with both moments in fp8 (e4m3), in blocks of 256, by torchao."""

    form = "fp8"
    block = 256


class Muon(Members):
    """Muon for the matrices, AdamW for all else, at one rate: Muon's steps are scaled to the RMS of
    AdamW's."""

    form = "momentum"

    def __init__(
        self,
        groups: Groups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        matrices = select_groups(groups, lambda p: p.ndim == 2)
        others = select_groups(groups, lambda p: p.ndim != 2)
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        members: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw", **shared
            )
            members.append(muon)
        if others:
            members.append(torch.optim.AdamW(others, betas=betas, eps=eps, **shared))
        super().__init__(groups, members)
