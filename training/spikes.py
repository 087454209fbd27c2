"""Whether a gradient norm is one of those before it, decided on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class SpikeGuard:
    """A norm more than `sigmas` standard deviations above the mean of the last `window` ones is a
    spike.

    The window takes finite norms only: one NaN in it would make every comparison false. A spike
    enters it as the highest norm that would have passed, so that one alone does not blind the
    guard, and a lasting change of level is followed. Nothing is a spike before the window is full.
    (OLMo's SkipStep uses 6 deviations of 128 steps.)
    """

    def __init__(self, sigmas: float, window: int, device: torch.device) -> None:
        self.sigmas = sigmas
        self.norms = torch.zeros(window, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.places = torch.arange(window, device=device)

    @torch.no_grad()
    def passes(self, norm: Tensor) -> Tensor:
        """True for a norm that is finite and no spike; remembers it. Nothing waits for the
        device."""
        std, mean = torch.std_mean(self.norms)
        full = self.count >= len(self.norms)
        finite = torch.isfinite(norm)
        limit = torch.where(full, mean + self.sigmas * std, torch.inf)
        here = (self.places == self.count % len(self.norms)) & finite
        self.norms.copy_(torch.where(here, torch.minimum(norm, limit), self.norms))
        self.count.add_(finite)
        return finite & (norm <= limit)

    def state_dict(self) -> dict[str, Tensor]:
        return {"norms": self.norms, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """In place: a captured step goes on using these tensors. Another window, or none, starts
        anew."""
        fits = state.keys() == {"norms", "count"} and state["norms"].shape == self.norms.shape
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name]) if fits else tensor.zero_()
