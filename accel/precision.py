"""Mixed precision: matrix products in 16 bits by autocast; parameters, optimizer state, norms and the loss in fp32.

`bf16` has 8 bits of mantissa and the range of fp32. `fp16` has 11 and a small range, so the loss is scaled
(accel/loss_scaler.py). Nothing is stored in 16 bits: weights stored in bf16 cost a published model 3.7 FID points.

What it costs: rounding in products. On a CPU without native instructions it is several times slower than fp32, so there
it counts as unavailable. Speed on a GPU: not measured yet.
"""

import functools
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from accel.evidence import Evidence
from accel.loss_scaler import LossScaler
from accel.technique import AnyStep, Observation, Technique, TrainingStep

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {"BFloat16": "bf16", "Half": "fp16", "float": "fp32", "double": "fp64"}


class Precision(Technique):
    key = "precision"
    summary = "`bf16`, `fp16`: products in 16 bits, everything else fp32"
    examples = tuple({"precision": name} for name in DTYPES)
    off = "fp32"
    loss_rtol = 2e-2

    def __init__(self, value: bool | str, device: torch.device) -> None:
        super().__init__(value, device)
        self.scaler: LossScaler | None = None

    def unavailable(self) -> str | None:
        if self.device.type == "cuda":
            needed = (8, 0) if self.value == "bf16" else (7, 0)
            if torch.cuda.get_device_capability(self.device) < needed:
                return (
                    f"{self.value} needs compute capability {needed[0]}.{needed[1]} or newer; "
                    f"use runtime.precision=fp32 on this GPU."
                )
        elif self.value == "fp16" and not torch.cpu._is_amx_fp16_supported():
            return "This CPU has no native fp16 instructions (AMX-FP16), so fp16 would be slower than fp32."
        elif self.value == "bf16" and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
            return "This CPU has no native bf16 instructions (AVX512-BF16 or AMX), so bf16 would be slower than fp32."
        return None

    def autocast(self) -> torch.amp.autocast:
        """The context in which the forward pass runs."""
        return torch.amp.autocast(self.device.type, DTYPES.get(str(self.value)), enabled=self.enabled)

    def on_step(self, step: AnyStep) -> AnyStep:
        if self.enabled:
            forward = step.forward

            @functools.wraps(forward)
            def autocast_forward(*args, **kwargs):
                with self.autocast():
                    return forward(*args, **kwargs)

            step.forward = autocast_forward
        if self.value == "fp16" and hasattr(step, "scaler"):  # an encoder's step has no backward pass
            cast(TrainingStep, step).scaler = self.scaler = LossScaler(self.device)
        return step

    def state_dict(self) -> dict[str, Tensor]:
        return self.scaler.state_dict() if self.scaler else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.scaler and state:
            self.scaler.load_state_dict(state)

    def observe(self, evidence: Evidence) -> Observation:
        dtypes = evidence.matmul_dtypes()
        if not dtypes:
            return Observation(False, "no matrix product ran")
        most = dtypes.most_common(1)[0][0]
        counts = ", ".join(f"{n} in {NAMES.get(dtype, dtype)}" for dtype, n in dtypes.most_common())
        scaled = "; the loss is scaled on the device" if self.scaler else ""
        return Observation(NAMES.get(most, most), f"matrix products of one step: {counts}{scaled}")
