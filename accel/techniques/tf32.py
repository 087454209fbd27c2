"""TF32: tensor cores compute fp32 matrix products and convolutions with a 10-bit mantissa.

TF32 costs precision: inputs of fp32 products keep about three decimal digits; accumulation stays
fp32. TF32 changes nothing for products that already run in 16 bits. docs/benchmarks/h100.md has its
speed. Reference: https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere
"""

import torch
from torch import nn

from accel.evidence import Evidence
from accel.ledger import UNUSED
from accel.machine import capability_of
from accel.technique import Observation, Technique


class Tf32(Technique):
    key = "tf32"
    summary = "fp32 products and convolutions on tensor cores"
    loss_rtol = 1e-3

    def find_obstacle(self) -> str | None:
        if self.device.type != "cuda":
            return (
                "TF32 needs an NVIDIA GPU of compute capability 8.0 or newer; this run is on "
                f"{self.device.type}."
            )
        major, minor = capability_of(self.device)
        if major < 8:
            return f"TF32 needs compute capability 8.0 or newer; this GPU has {major}.{minor}."
        return None

    def on_process(self) -> None:
        # Set only these two flags, not PyTorch's newer `fp32_precision`: up to torch 2.14 Inductor
        # raises an error if both the old and the new flags are set.
        torch.set_float32_matmul_precision("high" if self.enabled else "highest")
        torch.backends.cudnn.allow_tf32 = self.enabled

    # What would still say "on" if this did nothing? PyTorch's flags: this GPU may ignore them. So
    # compute a product and a convolution on this device and look whether they round.
    def observe(self, evidence: Evidence) -> Observation:
        if self.device.type != "cuda":
            return Observation(False, "no product here rounds to TF32")
        product, convolution = rounds_to_tf32(self.device)
        products = evidence.count_dtypes()["float"]
        convolutions = evidence.count_dtypes(["aten::convolution"])["float"]
        does = {True: "rounds to TF32", False: "keeps fp32"}
        note = (
            f"a product tried here {does[product]}, a convolution {does[convolution]}; {products} "
            f"products of a step in fp32, {convolutions} of them convolutions"
        )
        if not product and not convolution:
            return Observation(False, note)
        if not products:
            return Observation(UNUSED, note)
        return Observation(
            (product or products == convolutions) and (convolution or not convolutions), note
        )


@torch.no_grad()
def rounds_to_tf32(device: torch.device) -> tuple[bool, bool]:
    """Returns two values: whether a matrix product rounds its inputs to TF32 on `device`, and
    whether a convolution does. The function multiplies 1 + 2⁻¹², which TF32 cannot represent, by 1,
    once by a matrix product and once by a convolution. A result of 1 shows that the input was
    rounded."""
    value = 1.0 + 2.0**-12
    with torch.amp.autocast(device.type, enabled=False):
        product = torch.full((512, 512), value, device=device) @ torch.eye(512, device=device)
        weight = torch.zeros(64, 64, 3, 3, device=device)
        weight[:, :, 1, 1] = torch.eye(64)
        convolution = nn.functional.conv2d(
            torch.full((8, 64, 32, 32), value, device=device), weight, padding=1
        )
    return bool((product == 1.0).all()), bool((convolution == 1.0).all())
