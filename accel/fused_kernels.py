"""Fused Triton kernels in the place of their PyTorch references: one key each.

This version has the references only, so each key is unavailable and says so.
"""

from accel.evidence import Evidence
from accel.technique import Observation, Technique


class FusedKernel(Technique):
    op: str
    """The op of accel/kernels that the key exchanges."""
    loss_rtol = 1e-2

    def unavailable(self) -> str | None:
        return f"There is no Triton kernel of {self.op} in this version; its PyTorch reference runs."

    def observe(self, evidence: Evidence) -> Observation:
        launches = sum(n for name, n in evidence.ops.items() if name.startswith(f"{self.op}_kernel"))
        return Observation(launches > 0, f"{launches} launches of a Triton kernel of {self.op} in one step")


class FusedAddNorm(FusedKernel):
    """add + gate + norm + modulate in one pass over the residual stream."""

    key = "fused_add_norm"
    op = "add_norm"


class FusedScan(FusedKernel):
    """Both directions of the state-space scan in one kernel."""

    key = "fused_scan"
    op = "bidirectional_ssd"


class FusedConv(FusedKernel):
    """The local convolution and its activation in one kernel."""

    key = "fused_conv"
    op = "local_mix"
