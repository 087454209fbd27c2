"""Fused Triton kernels that replace their definitions in PyTorch, one runtime key for each.

If a key is off, the model calls the definition directly, so that a compiler can fuse it with
neighbouring operations. If the key is on, the model calls one operator that has a backward pass of
its own. `true` and `auto` use a kernel only after a trial on the run's own device
(accel/trial/kernels.py): with `true` the kernel's results must agree with the definition's; with
`auto`, besides, the block must be at most 3 % slower with the kernel than without it, unless
accel/trial/gains.json says that the kernel is never slower.

The comparison of results is repeated for each new model, GPU or version; a time for each new batch
too. The trial prints what it does, and how long it expects to take. A kernel saves time, and
memory, because it saves fewer tensors for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from accel.evidence import NO_KERNEL_SEEN, Evidence
from accel.ledger import AUTO, UNSEEN, UNUSED
from accel.machine import capability_of, is_installed
from accel.technique import (
    Model,
    Observation,
    Planning,
    Saving,
    Technique,
    blocks_of,
    find_switches,
)


@dataclass(frozen=True)
class Proof:
    """The decision whether to use a kernel (`on`), and the reason as a phrase (`why`)."""

    on: bool
    why: str


class FusedKernel(Technique):
    """A technique that replaces an operator's definition in PyTorch by a kernel, if the kernel
    passed its trial."""

    op: str
    """Name of the operator of accel/kernels whose definition the technique replaces by a kernel;
    the names of the operator's kernels start with `<op>_`."""
    other_ops: tuple[str, ...] = ()
    """Names of further operators whose definitions the technique replaces, in models that call
    these operators instead of `op`."""
    loss_rtol = 1e-2
    used_in = ("training", "sampling")
    switches: Sequence[torch.nn.Module] = ()
    proof: Proof | None = None

    def __init_subclass__(cls) -> None:
        cls.planning = Planning(
            savings=(Saving({cls.key: AUTO}, "nothing: kernels", 0),),
            on_fake_device=lambda technique: technique.settle(Proof(True, "assumed")),
        )

    def asks_for_proof(self, model: torch.nn.Module) -> bool:
        """Returns whether the technique is on and a block of the model has a module that can use
        the kernel."""
        return self.enabled and bool(find_switches(blocks_of(model), self.key))

    def settle(self, proof: Proof) -> None:
        """Adopts the decision of a trial: switches the technique on or off, and keeps the reason
        for the ledger."""
        self.value = proof.on
        self.proof = proof

    def find_obstacle(self) -> str | None:
        if self.device.type != "cuda":
            return f"The Triton kernels need an NVIDIA GPU; this run is on {self.device.type}."
        if not is_installed("triton"):
            return "The Triton kernels need triton; install it with pip."
        if capability_of(self.device) < (8, 0):
            return "The Triton kernels need compute capability 8.0 or newer."
        return None

    def on_model(self, model: Model) -> Model:
        self.switches = find_switches(blocks_of(model), self.key)
        for module in self.switches:
            setattr(module, self.key, self.proof is not None and self.proof.on)
        return model

    # What would still say "on" if this did nothing? The modules' attributes that select the kernel.
    # A call of the operator would say so too, because the operator may run its definition. So count
    # the launches of the operator's kernels, and see that the backward pass goes through the
    # operator.
    def observe(self, evidence: Evidence) -> Observation:
        ops = (self.op, *self.other_ops)
        either = " or ".join(ops)
        if self.enabled and not self.switches:
            return Observation(UNUSED, f"the model has no {either}")

        # Remove "void" from the profiler's names of kernels: nvcc puts the return type in front of
        # the name.
        kernels = tuple(f"{op}_" for op in ops)
        launches = sum(
            n for name, n in evidence.ops.items() if name.removeprefix("void ").startswith(kernels)
        )
        operators = tuple(f"fastlatent::{op}" for op in ops)
        called = evidence.check_blocks(
            lambda call: any(op.startswith(operators) for op in call.ops)
        )
        everywhere = sum(called) >= min(len(called), len(self.switches))
        active = launches > 0 and everywhere and evidence.uses(operators)
        seen = f"{launches} launches of its kernels in one step"
        if self.enabled and evidence.kernels_unseen and any(called) and everywhere:
            active = UNSEEN
            seen = NO_KERNEL_SEEN
        note = f"{evidence.format_share(called)} called {either}; {seen}"
        if self.proof:
            note = f"{self.proof.why}; {note}"
        elif self.enabled:
            note = f"not proved on this device, so it stays off; {note}"
        return Observation(active, note)


class FusedAddNorm(FusedKernel):
    """Computes in one pass over the residual stream: the gated add of a branch, the norm of the
    sum, and its modulation by scale and shift."""

    key = "fused_add_norm"
    summary = "Triton: add, gate, norm and modulate in one pass"
    op = "add_norm"


class FusedScan(FusedKernel):
    """Computes both directions of the state-space scan in one Triton kernel. For the selective
    scan, which has one direction, it uses mamba-ssm's CUDA kernel."""

    key = "fused_scan"
    summary = "Triton: both directions of the scan in one kernel; the selective scan by mamba-ssm's"
    op = "ssd"
    other_ops = ("selective_scan",)


class FusedConv(FusedKernel):
    """Computes the local convolution and its activation in one kernel."""

    key = "fused_conv"
    summary = "Triton: local convolution and activation"
    op = "local_mix"


class FusedSwiglu(FusedKernel):
    """Computes the activation and the product of a SwiGLU in one kernel. Its backward pass writes
    the gradients of both halves of the input into one tensor."""

    key = "fused_swiglu"
    summary = "Triton: activation and product of the SwiGLU"
    op = "swiglu"


class FusedRope(FusedKernel):
    """Computes the norm and the rotary embedding of queries and keys in one kernel. Its backward
    pass writes the gradients of queries, keys and values into one tensor."""

    key = "fused_rope"
    summary = "Triton: QK-norm and rotary embedding of attention"
    op = "qk_rope"
