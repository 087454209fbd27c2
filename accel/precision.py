"""Mixed precision: matrix products in 16 bits by autocast; parameters, optimizer state, norms and the loss in fp32.

What it costs: 8 bits of mantissa (bf16) in products. Nothing is stored in bf16: storing weights so cost a published
model 3.7 FID points. On a CPU without native bf16 instructions it is several times slower than fp32, so there it
counts as unavailable. Speed on a GPU: not measured yet.
"""

import functools

import torch

from accel.evidence import Evidence
from accel.technique import AnyStep, Observation, Technique

DTYPES = {"bf16": torch.bfloat16}
NAMES = {"BFloat16": "bf16", "Half": "fp16", "float": "fp32", "double": "fp64"}


class Precision(Technique):
    key = "precision"
    off = "fp32"
    loss_rtol = 2e-2

    def unavailable(self) -> str | None:
        if self.device.type == "cuda":
            if torch.cuda.get_device_capability(self.device) < (8, 0):
                return "bf16 needs compute capability 8.0 or newer; use runtime.precision=fp32 on this GPU."
        elif not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
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
        return step

    def observe(self, evidence: Evidence) -> Observation:
        dtypes = evidence.matmul_dtypes()
        if not dtypes:
            return Observation(False, "no matrix product ran")
        most = dtypes.most_common(1)[0][0]
        counts = ", ".join(f"{n} in {NAMES.get(dtype, dtype)}" for dtype, n in dtypes.most_common())
        return Observation(NAMES.get(most, most), f"matrix products of one step: {counts}")
