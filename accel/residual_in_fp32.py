"""fp32 residual stream: the sum over all blocks is kept in fp32 while the blocks compute in 16 bits.

What it costs: 4 bytes an element more traffic per block than a bf16 stream. What it buys: small increments of late
blocks are not rounded away. With fp32 compute it changes nothing.
"""

import torch

from accel.evidence import Evidence
from accel.technique import Model, Observation, Technique, blocks_of


class ResidualInFp32(Technique):
    key = "residual_in_fp32"
    summary = "the residual stream stays fp32 between 16-bit blocks"
    loss_rtol = 1e-2  # only the 16-bit stream without it moves the loss; with fp32 compute both are equal

    def on_model(self, model: Model) -> Model:
        for block in blocks_of(model):
            setattr(block, self.key, self.enabled)
        return model

    def observe(self, evidence: Evidence) -> Observation:
        if not evidence.blocks:
            return Observation(False, "no block ran")
        dtype = evidence.blocks[-1].residual_dtype
        uncompiled = " (in an uncompiled step)" if evidence.blocks_uncompiled else ""
        return Observation(dtype == torch.float32, f"the last block returned a residual of {dtype}{uncompiled}")
