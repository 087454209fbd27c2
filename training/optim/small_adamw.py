"""AdamW with a smaller state.

These optimizers come from bitsandbytes and torchao, and have PyTorch's interface. Muon, another
optimizer with a smaller state, is in training/optim/muon.py.

AdamW's state takes 8 bytes a parameter. With 8-bit or fp8 moments it takes 2 bytes, with 4-bit
moments 1 byte, plus the moments' scales. The costs: moments are rounded (docs/memory.md has
measured losses), and none of these optimizers can skip a step on the device, so the host reads one
flag a step, and `runtime.cuda_graph` refuses them. The ledger's row `optim` shows the bytes of the
state, and how many parameters really have their state in the promised form.

References: Dettmers et al. 2021, https://arxiv.org/abs/2110.02861 (8-bit); Li et al. 2023,
https://arxiv.org/abs/2309.01507 (4-bit).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

import torch

from accel.composite_optimizer import Groups, Members
from common.errors import UserError
from common.libraries import silence_libraries


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
        package = self.library.partition(".")[0]
        try:
            with silence_libraries():
                library = import_module(self.library)
        except ImportError as error:
            raise UserError(
                f"{self.wanted_by} needs the package {package} ({error}); pip install {package}, "
                "or choose another optim."
            ) from error
        kind = getattr(library, type(self).__name__)
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
