"""Parameter groups, the learning-rate schedule, and AdamW with a smaller state.

These optimizers come from bitsandbytes and torchao, and have PyTorch's interface. Muon, another
optimizer with a smaller state, is in training/muon.py.

AdamW's state takes 8 bytes a parameter. With 8-bit or fp8 moments it takes 2 bytes, with 4-bit
moments 1 byte, plus the moments' scales. The costs: moments are rounded (docs/memory.md has
measured losses), and none of these optimizers can skip a step on the device, so the host reads one
flag a step, and `runtime.cuda_graph` refuses them. The ledger's row `optim` shows the bytes of the
state, and how many parameters really have their state in the promised form.

References: Dettmers et al. 2021, https://arxiv.org/abs/2110.02861 (8-bit); Li et al. 2023,
https://arxiv.org/abs/2309.01507 (4-bit).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.composite_optimizer import Groups, Members
from common.config.build import resolve_target
from common.config.schema import ScheduleKind
from common.libraries import import_optional
from models.adapters import find_trained_parameters
from models.denoiser import Denoiser
from models.layers import Ranges


def make_parameter_groups(model: Denoiser, optim: Mapping[str, Any]) -> Groups:
    """Returns the trained parameters in groups for the optimizer that `optim`, its configuration,
    describes: first those with weight decay, then those that the model's `no_weight_decay()` names.

    If the optimizer's class has the attribute `takes_matrices`, each group is divided further, so
    that its parameters have the same shape and the same matrices. The matrices become the group's
    option `matrices` (`Layer.list_matrices`); groups without matrices are not divided.
    """
    kind = resolve_target(optim.get("_target_", ""), "optim")
    matrices: dict[Tensor, Ranges] = {}
    for layer in model.blocks.modules() if hasattr(kind, "takes_matrices") else ():
        if hasattr(layer, "list_matrices"):
            matrices |= layer.list_matrices()  # pyright: ignore[reportCallIssue]

    exempt = model.no_weight_decay()
    groups: dict[Any, dict[str, Any]] = {}
    trained = find_trained_parameters(model)
    for name in sorted(trained, key=exempt.__contains__):  # a stable sort
        parameter = trained[name]
        ranges = matrices.get(parameter, ())
        decay = 0.0 if name in exempt else optim.get("weight_decay", 0.0)
        key = (name in exempt, ranges, parameter.shape if ranges else ())
        options = {"params": [], "weight_decay": decay, "matrices": ranges}
        groups.setdefault(key, options)["params"].append(parameter)
    return list(groups.values())


@dataclass(frozen=True)
class Schedule:
    """Schedule of the learning rate: a factor that rises linearly from 0 to 1 over
    `warmup_samples`, then stays 1 or falls along a cosine to `final`."""

    kind: str
    total_samples: int
    warmup_samples: int = 0
    final: float = 0.0

    def __call__(self, samples: float, batch_size: int = 0) -> float:
        """Returns the factor of the learning rate for a step of `batch_size` samples; `samples` is
        the number of samples that the run has seen when the step ends.

        The last step of a cosine uses the factor at the step's middle, because at the step's end
        the factor is `final`, by default 0.
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
    """Wraps the optimizer class that `library` exports under the name of the subclass: AdamW8bit
    wraps bitsandbytes.optim.AdamW8bit."""

    library: str
    """Name of the library's module, imported at first use."""
    wanted_by: str
    """Override that selects this optimizer, for the error message if the library is missing."""

    def __init__(
        self,
        groups: Groups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        kind = getattr(import_optional(self.library, self.wanted_by), type(self).__name__)
        member = kind(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(groups, [member])


class AdamW8bit(LibraryAdamW):
    """AdamW of bitsandbytes with both moments in 8 bits, in blocks of 256 with a scale each.

    Moments of parameters with fewer than 4,096 elements stay fp32. On a GPU the library waits for
    the device after each parameter's update.
    """

    form = "8bit"
    library = "bitsandbytes.optim"
    wanted_by = "optim=adamw_8bit"


class TorchaoAdamW(LibraryAdamW):
    """AdamW of torchao, whose update is compiled on a GPU and runs eagerly on a CPU.

    Moments stay fp32 for parameters with fewer than 4,096 elements, or with a number of elements
    that is no multiple of `block`.
    """

    library = "torchao.optim"
    wanted_by = "optim=adamw_4bit or adamw_fp8"

    def surround_update(self, member: torch.optim.Optimizer) -> AbstractContextManager[object]:
        on_gpu = member.param_groups[0]["params"][0].is_cuda
        return nullcontext() if on_gpu else torch.compiler.set_stance("force_eager")


class AdamW4bit(TorchaoAdamW):
    """AdamW of torchao with both moments in 4 bits, in blocks of 128."""

    form = "4bit"
    block = 128


class AdamWFp8(TorchaoAdamW):
    """AdamW of torchao with both moments in fp8 (e4m3), in blocks of 256."""

    form = "fp8"
    block = 256
