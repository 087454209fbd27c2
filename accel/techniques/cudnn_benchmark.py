"""Switches cuDNN's autotuner on or off. The autotuner tries every convolution algorithm once per
shape and keeps the fastest.

The autotuner costs a slower first step for each new shape. It chooses by time, so results differ
from run to run. It acts on dense convolutions of a denoiser, and of the autoencoder in
`precompute_latents.py`. That command keeps the autotuner off, unless `same_bytes=false` allows a
resumed job to write other bytes; sampling always keeps it off, because a resumed job must draw the
same samples. docs/benchmarks/h100.md has its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import torch

from accel.evidence import NO_KERNEL_SEEN, Evidence, observe_kernels
from accel.ledger import UNSEEN, UNUSED
from accel.machine import is_available
from accel.technique import Observation, Planning, Technique, switch_off

CONVOLUTION = "aten::cudnn_convolution"


class CudnnBenchmark(Technique):
    key = "cudnn_benchmark"
    summary = "tries cuDNN's algorithms once per shape"
    loss_rtol = 1e-5
    keeps_parity = True
    nondeterministic = True
    planning = Planning(on_fake_device=switch_off)
    chosen: Set[str] = frozenset()
    """Names of the kernels that run in a step with the autotuner, but not in a step without it."""

    def find_obstacle(self) -> str | None:
        has_cudnn = torch.backends.cudnn.is_available()
        if self.device.type != "cuda" or not is_available("cuDNN", has_cudnn):
            return (
                "The cuDNN autotuner needs cuDNN on an NVIDIA GPU; this run is on "
                f"{self.device.type}."
            )
        return None

    def on_process(self) -> None:
        torch.backends.cudnn.benchmark = self.enabled

    def compare(self, run: Callable[[], object], evidence: Evidence) -> None:
        if not self.enabled or not evidence.ops[CONVOLUTION]:
            return
        tuned = observe_kernels(run, self.device)
        torch.backends.cudnn.benchmark = False
        try:
            self.chosen = tuned - observe_kernels(run, self.device)
        finally:
            torch.backends.cudnn.benchmark = True

    # What would still say "on" if this did nothing? PyTorch's flag: the autotuner may have nothing
    # to tune, or choose the same kernels. So compare the kernels of a step with the autotuner to
    # those of a step without it.
    def observe(self, evidence: Evidence) -> Observation:
        calls = evidence.ops[CONVOLUTION]
        note = f"{calls} cuDNN convolutions in one step"
        if not self.enabled:
            return Observation(torch.backends.cudnn.benchmark and calls > 0, note)
        if not calls:
            return Observation(UNUSED, note)
        if evidence.kernels_unseen:
            return Observation(UNSEEN, f"{note}; {NO_KERNEL_SEEN}")
        if not self.chosen:
            note += "; the autotuner chose the kernels that run without it"
            return Observation(UNUSED, note)
        note += f"; {len(self.chosen)} kernels that do not run without it: {min(self.chosen)[:60]}"
        return Observation(True, note)
