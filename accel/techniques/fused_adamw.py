"""Fused AdamW: one kernel updates all parameters, clips gradients and skips bad steps. The device
decides about clipping and skipping, so the host does not wait for it.

The kernel costs nothing, and replaces a dozen passes over parameters, gradients and moments by one
pass. `training/step.py` passes the clipping factor as `grad_scale` and a flag for a non-finite norm
as `found_inf`; a skipped step leaves parameters and moments unchanged bit for bit.
docs/benchmarks/h100.md has its speed.
"""

from typing import Any

from accel.evidence import Evidence
from accel.technique import Observation, Technique


class FusedAdamW(Technique):
    key = "fused_adamw"
    summary = "fused update; clipping and skipping decided on the device"
    loss_rtol = 1e-5
    used_in = ("training",)

    def make_optimizer_kwargs(self) -> dict[str, Any]:
        # If the technique is off, pass no argument, so that PyTorch chooses: multi-tensor (foreach)
        # kernels on a GPU, a loop over tensors on a CPU. The argument fused=False switches foreach
        # off too.
        return {"fused": True} if self.enabled else {}

    # What would still say "on" if this did nothing? The optimizer's argument `fused`. So count the
    # calls of the fused operation, the calls of the operations that an unfused update runs, and the
    # parameters that did not move.
    def observe(self, evidence: Evidence) -> Observation:
        fused, foreach, loop = (
            evidence.ops[f"aten::{op}"] for op in ("_fused_adamw_", "_foreach_addcdiv_", "addcdiv_")
        )
        other = "foreach kernels" if foreach else "a loop over tensors"
        if not fused:
            return Observation(False, f"{other}, no _fused_adamw_")
        note = f"{fused} calls of _fused_adamw_ in one optimizer step"
        if foreach or loop:
            return Observation(False, f"{note}, and {other}")
        note += f"; {evidence.left_alone} parameters with a gradient did not move"
        return Observation(not evidence.left_alone, note)
