"""cuDNN autotuner: tries every convolution algorithm once per shape and keeps the fastest.

What it costs: a slower first step for each new shape, and run-to-run determinism. It matters to models with dense
convolutions and to the autoencoder of `precompute_latents.py`. Speed: not measured yet.
"""

import torch

from accel.evidence import Evidence
from accel.ledger import UNUSED
from accel.technique import Observation, Technique


class CudnnBenchmark(Technique):
    key = "cudnn_benchmark"
    summary = "tries cuDNN's algorithms once per shape"
    loss_rtol = 1e-5
    nondeterministic = True

    def unavailable(self) -> str | None:
        if self.device.type != "cuda" or not torch.backends.cudnn.is_available():
            return f"The cuDNN autotuner needs cuDNN on an NVIDIA GPU; this run is on {self.device.type}."
        return None

    def on_process(self) -> None:
        torch.backends.cudnn.benchmark = self.enabled

    def observe(self, evidence: Evidence) -> Observation:
        on = torch.backends.cudnn.benchmark
        calls = evidence.ops["aten::cudnn_convolution"]
        note = f"cudnn.benchmark is {on}; {calls} cuDNN convolutions in one step"
        return Observation((True if calls else UNUSED) if on else False, note)
