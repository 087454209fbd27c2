"""Weights of linear layers stored in bf16: half their bytes, and half the bytes of their gradients.

A plain bf16 weight loses updates below 2⁻⁹ of it: they round away. `rounding=stochastic` rounds the updated weight up
or down at random, right on average; the random bits are a hash of (seed, part of the weights, samples seen), so that
a resumed run and any number of processes draw the same. `rounding=kahan` keeps what was rounded off in a second bf16
tensor (2 bytes a weight, so that only gradients and casts get smaller). The update itself is computed in fp32, a part
of the weights at a time; averages (EMA) stay fp32, and so do all parameters that are no matrix of a linear layer.

What it costs: an fp32 copy of one part's weights and gradients (64 MiB, or the largest parameter) during the update,
and rounding: a published model lost 3.7 FID points with weights in plain bf16. Losses here: docs/memory.md. Speed on
a GPU: not measured yet.
References: stochastic rounding, Gupta et al. 2015, https://arxiv.org/abs/1502.02551; both for bf16 training, Zamirai
et al. 2020, https://arxiv.org/abs/2010.06192
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from accel.evidence import Evidence
from accel.kernels.counter_noise import Purpose, draw
from accel.members import COMPENSATION, PART, Groups, Make, Members, parts_of
from accel.technique import AnyStep, Model, Observation, Technique


class NarrowLinear(nn.Linear):
    """A linear layer whose weight is bf16; where autocast is off, products are in the dtype of the input."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return nn.functional.linear(input, self.weight.to(input.dtype), self.bias)


class RoundedUpdate(Members):
    """Updates bf16 parameters in fp32, part by part, and rounds the results back.

    `position` (1,) int64 on the device is the number of samples seen: it makes the random bits of one step.
    """

    def __init__(self, groups: Groups, make: Make, rounding: str) -> None:
        narrow = [p for group in groups for p in group["params"] if p.dtype is torch.bfloat16]
        # Not the parameters' own data exchanged for the while: that would lose the hooks by which ddp sees gradients.
        stand_ins = {p: nn.Parameter(torch.empty([0] * p.ndim, device=p.device)) for p in narrow}
        parts = [
            [group | {"params": [stand_ins.get(p, p) for p in group["params"]]} for group in part]
            for part in parts_of(groups)
        ]
        super().__init__(groups, [make(part) for part in parts], stand_ins)
        self.narrow = {stand_in: p for p, stand_in in stand_ins.items()}
        self.rounding, self.seed = rounding, 0
        device = self.numbered[0].device
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.rounded = 0
        """Elements that the latest step rounded."""
        self.draws = 0
        if rounding == "kahan":
            for parameter in narrow:
                self.state[parameter][COMPENSATION] = torch.zeros_like(parameter)

    def step(self, closure: Any = None) -> None:
        self.rounded = self.draws = 0
        super().step(closure)

    @contextmanager
    def around(self, member: torch.optim.Optimizer) -> Iterator[None]:
        """The member finds fp32 weights and gradients in its stand-ins inside; what it made of them is rounded."""
        stand_ins = [p for group in member.param_groups for p in group["params"] if p in self.narrow]
        stand_ins = [stand_in for stand_in in stand_ins if self.narrow[stand_in].grad is not None]
        narrow = [self.narrow[stand_in] for stand_in in stand_ins]
        for stand_in, parameter in zip(stand_ins, narrow, strict=True):
            stand_in.data = parameter.detach().float()
            if self.rounding == "kahan":
                stand_in.data += self.state[parameter][COMPENSATION]
            stand_in.grad = parameter.grad.float()
        yield
        updated = [stand_in.data for stand_in in stand_ins]
        for stand_in in stand_ins:
            stand_in.grad, stand_in.data = None, stand_in.data.new_empty([0] * stand_in.ndim)
        self.rounded += sum(t.numel() for t in updated)
        if self.rounding == "kahan":
            self.compensated(narrow, updated)
        else:
            self.randomly([p.detach() for p in narrow], updated)

    def compensated(self, narrow: list[Any], updated: list[Tensor]) -> None:
        skipped = getattr(self, "found_inf", None)
        for parameter, wide in zip(narrow, updated, strict=True):
            rest = self.state[parameter][COMPENSATION]
            rounded = wide.bfloat16()
            lost = (wide - rounded.float()).bfloat16()
            if skipped is not None:  # a sum of both is not exact, and a skipped step changes nothing
                rounded = torch.where(skipped > 0, parameter.data, rounded)
                lost = torch.where(skipped > 0, rest, lost)
            parameter.data.copy_(rounded)
            rest.copy_(lost)

    def randomly(self, stored: list[Tensor], updated: list[Tensor]) -> None:
        """Rounds as many tensors at a time as one draw serves."""
        pairs = [
            pair
            for narrow, wide in zip(stored, updated, strict=True)
            for pair in zip(narrow.view(-1).split(PART), wide.view(-1).split(PART), strict=True)
        ]
        while pairs:
            size = taken = 0
            while taken < len(pairs) and (not taken or size + pairs[taken][0].numel() <= PART):
                size += pairs[taken][0].numel()
                taken += 1
            self.draws += 1
            key = self.seed ^ (self.draws << 32)
            words = draw("bits", key, Purpose.ROUNDING, self.position, -(-size // 2)).view(-1)
            halves = torch.stack((words & 0xFFFF, words >> 16), dim=1).view(-1)[:size].int()
            for (narrow, wide), bits in zip(
                pairs[:taken], halves.split([n.numel() for n, _ in pairs[:taken]]), strict=True
            ):
                narrow.copy_(stochastically_rounded(wide, bits))
            pairs = pairs[taken:]


def stochastically_rounded(wide: Tensor, bits: Tensor) -> Tensor:
    """fp32 rounded to bf16, up with the probability of its distance from below; `bits` int32 in [0, 2¹⁶), same shape.

    A value that bf16 holds, an infinity included, stays what it is.
    """
    raised = (wide.view(torch.int32) + bits) & -0x10000
    return torch.where(wide.isfinite(), raised.view(torch.float32), wide).bfloat16()


class Weights(Technique):
    key = "weights"
    summary = "`bf16`: weights of linear layers in 2 bytes; `rounding`: `stochastic`, `kahan`"
    options = ("rounding",)
    examples = ({"weights": "bf16", "rounding": "stochastic"}, {"weights": "bf16", "rounding": "kahan"})
    off = "fp32"
    loss_rtol = 2e-2

    def __init__(self, value: bool | str, device: torch.device, rounding: bool | str = "stochastic") -> None:
        super().__init__(value, device, rounding=rounding)
        self.rounding = str(rounding)
        self.linears: list[nn.Linear] = []
        self.parameters: list[Tensor] = []
        self.update: RoundedUpdate | None = None

    def on_model(self, model: Model) -> Model:
        self.linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        self.parameters = list(model.parameters())
        if self.enabled:
            for linear in self.linears:
                if type(linear) is nn.Linear:
                    linear.__class__ = NarrowLinear
                linear.weight.data = linear.weight.data.bfloat16()
        return model

    def on_optimizer(self, make: Make) -> Make:
        if not self.enabled:
            return make

        def make_rounded(groups: Groups) -> torch.optim.Optimizer:
            self.update = RoundedUpdate(groups, make, self.rounding)
            return self.update

        return make_rounded

    def on_step(self, step: AnyStep) -> AnyStep:
        if self.update is not None:
            training = cast("Any", step)
            self.update.seed, self.update.position = training.seed, training.position
        return step

    def observe(self, evidence: Evidence) -> Observation:
        if not self.linears:
            return Observation(False, "the model has no linear layer")
        narrow = [m.weight for m in self.linears if m.weight.dtype is torch.bfloat16]
        total = sum(p.numel() for p in self.parameters)
        held = sum(p.nbytes for p in self.parameters)
        note = f"{len(narrow)} of {len(self.linears)} linear layers store bf16, {sum(w.numel() for w in narrow)} of "
        note += f"{total} parameters; {held / max(1, total):.2f} bytes a parameter"
        if self.update is None:
            return Observation("mixed" if narrow else "fp32", note)
        how = "at random" if self.rounding == "stochastic" else "with compensation"
        rounded, meant = self.update.rounded, sum(w.numel() for w in narrow if w.requires_grad)
        note += f"; the update rounded {rounded} of them {how}"
        complete = len(narrow) == len(self.linears) and rounded == meant
        return Observation("bf16" if complete else "mixed" if narrow else "fp32", note)
