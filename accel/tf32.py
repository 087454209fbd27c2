"""TF32: fp32 matrix products and convolutions on tensor cores, with a 10-bit mantissa.

What it costs: about three decimal digits of the inputs to fp32 products; accumulation stays fp32. It changes
nothing for products that already run in 16 bits. Speed: not measured yet.
Reference: https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere
"""

import torch

from accel.evidence import Evidence
from accel.ledger import UNUSED
from accel.technique import Observation, Technique


class Tf32(Technique):
    key = "tf32"
    summary = "fp32 products and convolutions on tensor cores"
    loss_rtol = 1e-3

    def unavailable(self) -> str | None:
        if self.device.type != "cuda":
            return f"TF32 needs an NVIDIA GPU of compute capability 8.0 or newer; this run is on {self.device.type}."
        capability = torch.cuda.get_device_capability(self.device)
        if capability < (8, 0):
            return f"TF32 needs compute capability 8.0 or newer; this GPU has {capability[0]}.{capability[1]}."
        return None

    def on_process(self) -> None:
        # These two, never the newer `fp32_precision` setters: up to torch 2.14 mixing both makes Inductor raise.
        torch.set_float32_matmul_precision("high" if self.enabled else "highest")
        torch.backends.cudnn.allow_tf32 = self.enabled

    def observe(self, evidence: Evidence) -> Observation:
        matmul = torch.get_float32_matmul_precision()
        cudnn = torch.backends.cudnn.allow_tf32
        allowed = self.device.type == "cuda" and matmul == "high" and cudnn
        products = evidence.matmul_dtypes()["float"]
        note = f"matmul precision '{matmul}', cuDNN TF32 {'allowed' if cudnn else 'not allowed'}"
        return Observation((True if products else UNUSED) if allowed else False, f"{note}; {products} products in fp32")
