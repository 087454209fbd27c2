"""Detects spikes of the gradient norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class SpikeGuard:
    """Detects spikes, which are gradient norms more than `sigmas` standard deviations above the
    mean of the last `window` norms.

    The window holds finite norms only, because with one NaN in it every comparison is false. A
    spike enters the window as the limit, the highest norm that is no spike: so a single spike does
    not hide the next one, and the window still follows a lasting rise of the norms. Until the
    window is full, no finite norm is a spike. (OLMo's SkipStep uses 6 standard deviations and the
    last 128 steps.)
    """

    def __init__(self, sigmas: float, window: int, device: torch.device) -> None:
        self.sigmas = sigmas
        self.norms = torch.zeros(window, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def admit(self, norm: Tensor) -> Tensor:
        """Returns a bool tensor on the device, without waiting for the device: true if `norm` is
        finite and no spike. Adds a finite norm to the window of recent norms; instead of a spike
        adds the limit, the highest norm that is no spike."""
        std, mean = torch.std_mean(self.norms)
        full = self.count >= len(self.norms)
        finite = torch.isfinite(norm)
        limit = torch.where(full, mean + self.sigmas * std, torch.inf)
        place = (self.count % len(self.norms)).view(1)
        entry = torch.where(finite, torch.minimum(norm, limit), self.norms[place])
        self.norms.index_copy_(0, place, entry)
        self.count.add_(finite)
        return finite & (norm <= limit)

    def state_dict(self) -> dict[str, Tensor]:
        return {"norms": self.norms, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies the saved gradient norms into the existing tensors, because a captured CUDA graph
        reads these tensors. If the saved window has another size, or `state` is empty, starts with
        an empty window."""
        fits = state.keys() == {"norms", "count"} and state["norms"].shape == self.norms.shape
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name]) if fits else tensor.zero_()
