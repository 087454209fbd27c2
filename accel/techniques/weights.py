"""Weights of linear layers stored in bf16: half their bytes, and half the bytes of their gradients.

A plain bf16 weight loses updates below 2⁻⁹ of it: they round away. `rounding=stochastic` rounds the
updated weight up or down at random, right on average; the random bits are a hash of (seed, part of
the weights, samples seen), so that a resumed run and any number of processes draw the same.
`rounding=kahan` keeps what was rounded off in a second bf16 tensor (2 bytes a weight, so that only
gradients and casts get smaller). The update itself is computed in fp32, a part of the weights at a
time; averages (EMA) stay fp32, and so do all parameters that are no matrix of a linear layer.

What it costs: an fp32 copy of one part's weights and gradients (64 MiB, or the largest parameter)
during the update, and rounding: a published model lost 3.7 FID points with weights in plain bf16.
Losses here: docs/memory.md. Speed on a GPU: not measured yet.
References: stochastic rounding, Gupta et al. 2015, https://arxiv.org/abs/1502.02551; both for bf16
training, Zamirai et al. 2020, https://arxiv.org/abs/2010.06192
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from accel.composite_optimizer import (
    COMPENSATION,
    PART_ELEMENTS,
    Groups,
    MakeOptimizer,
    Members,
    parameters_of,
    split_parts,
)
from accel.evidence import Evidence
from accel.kernels.counter_noise import Purpose, draw
from accel.technique import AnyStep, Model, Observation, Saving, Technique

DRAW_BYTES = 19.0
"""Bytes an element that drawing the bits of stochastic rounding takes; as counted."""
MAX_COUNTED_DRAW = 2**18
"""Elements drawn at a time where bytes are counted on few blocks: what random bits take does not
grow with the model, so `count_part_bytes` reckons it."""


class NarrowLinear(nn.Linear):
    """A linear layer whose weight is bf16; where autocast is off, products are in the dtype of the
    input."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return nn.functional.linear(input, self.weight.to(input.dtype), self.bias)


class RoundedUpdate(Members):
    """Updates bf16 parameters in fp32, part by part, and rounds the results back.

    `position` (1,) int64 on the device is the number of samples seen: it makes the random bits of
    one step.
    """

    def __init__(
        self,
        groups: Groups,
        make: MakeOptimizer,
        rounding: str,
        elements_per_draw: int = PART_ELEMENTS,
    ) -> None:
        narrow = [p for group in groups for p in group["params"] if p.dtype is torch.bfloat16]
        # Not the parameters' own data exchanged for the while: that would lose the hooks by which
        # ddp sees gradients.
        stand_ins = {p: nn.Parameter(torch.empty([0] * p.ndim, device=p.device)) for p in narrow}
        parts = [
            [group | {"params": [stand_ins.get(p, p) for p in group["params"]]} for group in part]
            for part in split_parts(groups)
        ]
        super().__init__(groups, [make(part) for part in parts], stand_ins)
        self.narrow: dict[Tensor, Any] = {stand_in: p for p, stand_in in stand_ins.items()}
        self.elements_per_draw = elements_per_draw
        """Elements whose random bits are drawn at a time."""
        self.seed = 0
        self.position = torch.zeros(1, dtype=torch.int64, device=self.numbered_parameters[0].device)
        self.counting = True
        """Whether somebody looks at `counts`."""
        self.counts: Counter[str] = Counter()
        """Elements of the latest step, by what was found of them, on the device."""
        self.draws = 0
        if rounding == "kahan":
            for parameter in narrow:
                self.state[parameter][COMPENSATION] = torch.zeros_like(parameter)

    def step(self, closure: Any = None) -> None:
        self.draws = 0
        if self.counting:
            self.counts.clear()
        super().step(closure)

    def get_compensation(self, parameter: Tensor) -> Tensor | None:
        """What was rounded off a parameter, where that is kept."""
        return self.state[parameter].get(COMPENSATION)

    def widen(self, parameter: Tensor) -> Tensor:
        """A parameter in fp32, with what was rounded off before."""
        wide = parameter.detach().float()
        rest = self.get_compensation(parameter)
        return wide if rest is None else wide + rest

    @contextmanager
    def surround_update(self, member: torch.optim.Optimizer) -> Iterator[None]:
        """The member finds fp32 weights and gradients in its stand-ins inside; what it made of them
        is rounded."""
        known = [(p, self.narrow[p]) for p in parameters_of(member) if p in self.narrow]
        pairs = [(stand_in, p) for stand_in, p in known if p.grad is not None]
        for stand_in, parameter in pairs:
            stand_in.data = self.widen(parameter)
            stand_in.grad = parameter.grad.float()
            rest = self.get_compensation(parameter)
            if rest is not None:
                self.count("rests", rest != 0.0)
                self.count("used", stand_in.data != parameter)
        yield

        updated = [(parameter, stand_in.data) for stand_in, parameter in pairs]
        for stand_in, _ in pairs:
            stand_in.grad = None
            stand_in.data = stand_in.data.new_empty([0] * stand_in.ndim)
        self.round_with_compensation(
            [pair for pair in updated if self.get_compensation(pair[0]) is not None]
        )
        self.round_randomly([pair for pair in updated if self.get_compensation(pair[0]) is None])
        for parameter, wide in updated:
            self.count_rounding(parameter, wide)

    def count(self, what: str, found: Tensor) -> None:
        """Adds the sum of `found` to a count of this step."""
        if self.counting:
            self.counts[what] += found.sum(dtype=torch.float64)  # pyright: ignore[reportArgumentType]

    def count_rounding(self, parameter: Tensor, wide: Tensor) -> None:
        """Counts what rounding the values `wide` into a parameter did."""
        if not self.counting:
            return
        nearest = wide.bfloat16()
        # of the way from the lower value to the upper one
        part = (wide.view(torch.int32) & 0xFFFF) / 2.0**16
        self.count("rounded", torch.ones_like(wide))
        self.count("inexact", nearest.float() != wide)
        self.count("unlike nearest", parameter.detach() != nearest)
        self.count("expected", torch.minimum(part, 1.0 - part))
        rest = self.get_compensation(parameter)
        if rest is not None:
            self.count("kept", rest != 0.0)

    def round_with_compensation(self, updated: list[tuple[Any, Tensor]]) -> None:
        """Rounds to the nearest values, and keeps what that leaves out."""
        skipped = getattr(self, "found_inf", None)
        for parameter, wide in updated:
            rest = self.state[parameter][COMPENSATION]
            rounded = wide.bfloat16()
            lost = (wide - rounded.float()).bfloat16()
            # a sum of both is not exact, and a skipped step changes nothing
            if skipped is not None:
                rounded = torch.where(skipped > 0, parameter.data, rounded)
                lost = torch.where(skipped > 0, rest, lost)
            parameter.data.copy_(rounded)
            rest.copy_(lost)

    def round_randomly(self, updated: list[tuple[Any, Tensor]]) -> None:
        """Rounds at random, as many tensors at a time as one draw serves."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for tensors in updated:
            pairs += zip(
                *(t.detach().view(-1).split(self.elements_per_draw) for t in tensors), strict=True
            )
        while pairs:
            taken: list[tuple[Tensor, Tensor]] = []
            size = 0
            while pairs and size + len(pairs[0][0]) <= self.elements_per_draw:
                taken.append(pairs.pop(0))
                size += len(taken[-1][0])

            # A draw of 32 bits serves two elements.
            self.draws += 1
            key = self.seed ^ (self.draws << 32)
            words = draw("bits", key, Purpose.ROUNDING, self.position, -(-size // 2)).view(-1)
            halves = torch.stack((words & 0xFFFF, words >> 16), dim=1).view(-1)[:size].int()
            parts = halves.split([len(narrow) for narrow, _ in taken])
            for (narrow, wide), bits in zip(taken, parts, strict=True):
                narrow.copy_(round_stochastically(wide, bits))


def round_stochastically(wide: Tensor, bits: Tensor) -> Tensor:
    """fp32 rounded to bf16, up with the probability of its distance from below; `bits` int32 in [0,
    2¹⁶), same shape.

    A value that bf16 holds, an infinity included, stays what it is.
    """
    raised = (wide.view(torch.int32) + bits) & -0x10000
    return torch.where(wide.isfinite(), raised.view(torch.float32), wide).bfloat16()


class Weights(Technique):
    key = "weights"
    summary = "`bf16`: weights of linear layers in 2 bytes; `rounding`: `stochastic`, `kahan`"
    options: ClassVar = {"rounding": "stochastic"}
    examples = (
        {"weights": "bf16", "rounding": "stochastic"},
        {"weights": "bf16", "rounding": "kahan"},
    )
    off = "fp32"
    loss_rtol = 2e-2
    savings = (Saving({"weights": "bf16"}, "weights rounded at random", 70),)
    rounding: str
    linears: Sequence[nn.Linear] = ()
    parameters: Sequence[Tensor] = ()
    elements_per_draw = PART_ELEMENTS
    update: RoundedUpdate | None = None

    def on_fake_device(self) -> None:
        self.elements_per_draw = MAX_COUNTED_DRAW

    def count_part_bytes(self, part: int) -> float | None:
        if not self.enabled:
            return None
        drawn = self.rounding == "stochastic"
        return 4.0 * part + DRAW_BYTES * min(part, PART_ELEMENTS) if drawn else 0.0

    def on_model(self, model: Model) -> Model:
        self.linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        self.parameters = list(model.parameters())
        for linear in self.linears if self.enabled else ():
            if type(linear) is nn.Linear:
                linear.__class__ = NarrowLinear
            linear.weight.data = linear.weight.data.bfloat16()
        return model

    def on_optimizer(self, make: MakeOptimizer) -> MakeOptimizer:
        if not self.enabled:
            return make

        def make_rounded(groups: Groups) -> torch.optim.Optimizer:
            self.update = RoundedUpdate(groups, make, self.rounding, self.elements_per_draw)
            return self.update

        return make_rounded

    def on_step(self, step: AnyStep) -> AnyStep:
        if self.update is not None:
            training = cast("Any", step)
            self.update.seed = training.seed
            self.update.position = training.position
        return step

    def compare(self, run: Callable[[], object], evidence: Evidence) -> None:
        if self.update is not None:
            self.update.counting = False

    # What would still say "on" if this did nothing? The dtype of the weights would, and so would
    # the number of elements that the update goes over. Rounding at random shows in elements that
    # are not the nearest value, as many as chance leaves, and compensation in rests that are kept
    # and used.
    def observe(self, evidence: Evidence) -> Observation:
        if not self.linears:
            return Observation(False, "the model has no linear layer")
        narrow = [m.weight for m in self.linears if m.weight.dtype is torch.bfloat16]
        total = sum(p.numel() for p in self.parameters)
        held = sum(p.nbytes for p in self.parameters)
        note = (
            f"{len(narrow)} of {len(self.linears)} linear layers store bf16, "
            f"{sum(w.numel() for w in narrow)} of {total} parameters; "
            f"{held / max(1, total):.2f} bytes a parameter"
        )
        active = "mixed" if narrow else "fp32"
        if self.update is None:
            return Observation(active, note)

        seen = Counter({what: round(float(n)) for what, n in self.update.counts.items()})
        if self.rounding == "stochastic":
            other = seen["unlike nearest"]
            expected = seen["expected"]
            right = abs(other - expected) <= 10 + 6 * math.sqrt(expected)
            found = f"at random: {other} not to the nearest value, {expected} expected"
        else:
            kept = f"{seen['kept']} of {seen['inexact']} rests kept"
            found = f"with compensation: {kept}, {seen['used']} of {seen['rests']} from before used"
            right = seen["kept"] >= 0.99 * seen["inexact"] and seen["used"] >= 0.99 * seen["rests"]
        meant = sum(w.numel() for w in narrow if w.requires_grad)
        if len(narrow) == len(self.linears) and seen["rounded"] == meant and right:
            active = "bf16"
        return Observation(active, f"{note}; the update rounded {seen['rounded']} of them {found}")
