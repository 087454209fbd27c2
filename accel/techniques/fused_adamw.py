"""Fused AdamW: one kernel updates all parameters, clips gradients and skips bad steps, decided on
the device.

What it costs: nothing. What it buys: one pass over parameters, gradients and moments instead of a
dozen, and no host sync: `training/step.py` passes the clipping factor as `grad_scale` and a flag
for a non-finite norm as `found_inf`; a skipped step leaves parameters and moments bit for bit
unchanged. Speed on a GPU: not measured yet.
"""

from typing import Any

from accel.evidence import Evidence
from accel.technique import Observation, Technique


class FusedAdamW(Technique):
    key = "fused_adamw"
    summary = "fused update; clipping and skipping decided on the device"
    loss_rtol = 1e-5

    def find_obstacle(self) -> str | None:
        if self.device.type not in ("cuda", "cpu"):
            return f"PyTorch has no fused AdamW for {self.device.type}."
        return None

    def make_optimizer_kwargs(self) -> dict[str, Any]:
        # Off means PyTorch's own default: multi-tensor (foreach) kernels on a GPU, a loop over
        # tensors on a CPU. Even fused=False would be a choice: it switches foreach off too.
        return {"fused": True} if self.enabled else {}

    # What would still say "on" if this did nothing? The optimizer's argument would, so the row
    # counts calls of the fused operation and of its replacements.
    def observe(self, evidence: Evidence) -> Observation:
        fused, foreach, loop = (
            evidence.ops[f"aten::{op}"] for op in ("_fused_adamw_", "_foreach_addcdiv_", "addcdiv_")
        )
        other = "foreach kernels" if foreach else "a loop over tensors"
        if not fused:
            return Observation(False, f"{other}, no _fused_adamw_")
        note = f"{fused} calls of _fused_adamw_ in one optimizer step"
        alone = not (foreach or loop)
        return Observation(alone, note if alone else f"{note}, and {other}")
