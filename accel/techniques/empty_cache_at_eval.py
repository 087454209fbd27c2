"""Returns the allocator's unused memory to the driver before and after evaluation and sampling, and
at no other time.

The tensors of evaluation and of training differ in size, so the free memory that evaluation leaves
in PyTorch's cache is in pieces that do not fit training, and the reverse. Emptying the cache costs
some milliseconds after each evaluation, because training then requests memory from the driver
again. Emptying the cache in every step would slow training down (docs/techniques.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from accel.evidence import Evidence
from accel.technique import Observation, Technique


class EmptyCacheAtEval(Technique):
    key = "empty_cache_at_eval"
    summary = "gives unused memory back around evaluation only"
    loss_rtol = 0.0
    used_in = ("training",)
    without_gpu = "PyTorch keeps no cache of memory on {device}."

    @contextmanager
    def surround_evaluation(self) -> Iterator[None]:
        if self.enabled:
            torch.cuda.empty_cache()
        yield
        if self.enabled:
            torch.cuda.empty_cache()

    # What would still say "on" if this did nothing? A call of empty_cache(): it may return nothing.
    # So call it, and compare the bytes that PyTorch reserves before and after the call.
    def observe(self, evidence: Evidence) -> Observation:
        if self.device.type != "cuda":
            return Observation(False, "no cache to empty")
        # Allocate 64 MiB and free them at once, so that the cache surely has memory to return.
        torch.empty(2**26, dtype=torch.uint8, device=self.device)
        before = torch.cuda.memory_reserved(self.device)
        with self.surround_evaluation():
            freed = before - torch.cuda.memory_reserved(self.device)
        return Observation(
            freed > 0, f"evaluation would start with {freed / 2**20:.0f} MiB given back"
        )
