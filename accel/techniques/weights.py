"""Stores weights of linear layers in bf16: half their bytes, and half the bytes of their gradients.

A plain bf16 weight loses updates below 2⁻⁹ of its value, because they round away.
The update therefore rounds each new weight up or down at random, so that it is right on average.
The random bits are a hash of (seed, part of the weights, samples seen), so that a resumed run and
any number of processes draw the same bits. The update computes in fp32, a part of the weights at a
time; averages (EMA) and all other parameters stay fp32.

Weights in bf16 cost memory during the update, for an fp32 copy of one part's weights and gradients
(64 MiB each, or the size of the largest parameter). They also cost quality, because weights round:
a published model lost 3.7 FID points with weights in plain bf16. docs/memory.md shows losses of our
models. Its speed on a GPU is not measured yet. References: stochastic rounding, Gupta et al. 2015,
https://arxiv.org/abs/1502.02551; for bf16 training, Zamirai et al. 2020,
https://arxiv.org/abs/2010.06192
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from accel.composite_optimizer import (
    PART_ELEMENTS,
    Groups,
    MakeOptimizer,
    Members,
    list_parameters,
    parameters_of,
    split_parts,
)
from accel.evidence import Evidence
from accel.kernels.counter_noise.draws import Purpose, draw
from accel.technique import AnyStep, Model, Observation, Planning, Saving, Technique

DRAW_BYTES = 19.0
"""Temporary memory, in bytes per element that is rounded, while the random bits for the elements
are drawn; measured on a CPU."""
MAX_COUNTED_DRAW = 2**18
"""Largest number of elements per draw of random bits while a plan (scripts/plan) counts the bytes
of a step: so small that the memory of the bits hardly adds to the count. That memory does not grow
with the model, so `count_part_bytes` computes it separately."""


class NarrowLinear(nn.Linear):
    """A linear layer with a bf16 weight. Autocast casts weight and input; if autocast is off, the
    layer casts the weight to the dtype of the input."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return nn.functional.linear(input, self.weight.to(input.dtype), self.bias)


class RoundedUpdate(Members):
    """Updates bf16 parameters in fp32, part by part, and rounds the results to bf16.

    `position`, an int64 tensor (1,) on the device, is the number of samples seen; `seed` and
    `position` determine the random bits of a step.
    """

    def __init__(
        self, groups: Groups, make: MakeOptimizer, elements_per_draw: int = PART_ELEMENTS
    ) -> None:
        narrow = [p for p in list_parameters(groups) if p.dtype is torch.bfloat16]
        # Let the members update fp32 stand-ins. Never change the dtype of a parameter's own data,
        # because that removes the hooks by which ddp reduces gradients.
        stand_ins = {p: nn.Parameter(torch.empty([0] * p.ndim, device=p.device)) for p in narrow}
        parts = [
            [group | {"params": [stand_ins.get(p, p) for p in group["params"]]} for group in part]
            for part in split_parts(groups)
        ]
        super().__init__(groups, [make(part) for part in parts], stand_ins)
        self.narrow: dict[Tensor, Any] = {stand_in: p for p, stand_in in stand_ins.items()}
        self.elements_per_draw = elements_per_draw
        """Largest number of elements that are rounded with the random bits of one draw."""
        self.seed = 0
        self.position = torch.zeros(1, dtype=torch.int64, device=self.numbered_parameters[0].device)
        self.counting = True
        """Whether each step fills `counts`: True during warm-up, which alone needs the counts."""
        self.counts: dict[str, Any] = defaultdict(int)
        """Name of a count (`count_rounding`) -> its value in the latest step: a number, or a scalar
        on the device."""
        self.draws = 0

    def step(self, closure: Any = None) -> None:
        self.draws = 0
        if self.counting:
            self.counts.clear()
        super().step(closure)

    @contextmanager
    def surround_update(self, member: torch.optim.Optimizer) -> Iterator[None]:
        """Inside the context, the stand-ins that `member` updates have fp32 weights and gradients;
        when the context ends, the updated weights are rounded into the bf16 parameters."""
        stand_ins = [p for p in parameters_of(member) if p in self.narrow]
        pairs = [(p, self.narrow[p]) for p in stand_ins if self.narrow[p].grad is not None]
        for stand_in, parameter in pairs:
            stand_in.data = parameter.detach().float()
            stand_in.grad = parameter.grad.float()
        yield

        updated = [(parameter, stand_in.data) for stand_in, parameter in pairs]
        for stand_in, _ in pairs:
            stand_in.grad = None
            stand_in.data = stand_in.data.new_empty([0] * stand_in.ndim)
        self.round_randomly(updated)
        if self.counting:
            for parameter, wide in updated:
                self.count_rounding(parameter, wide)

    def count_rounding(self, parameter: Tensor, wide: Tensor) -> None:
        """Counts, on the device, how the fp32 values `wide` were rounded into the bf16 parameter:
        how many values, how many of them not to the nearest bf16 value, and how many of these are
        expected of rounding at random."""
        # Place of each fp32 value between its two bf16 neighbours, in [0, 1): 0 is the neighbour
        # nearer to zero.
        fraction = (wide.view(torch.int32) & 0xFFFF) / 2.0**16
        self.counts["rounded"] += wide.numel()
        self.counts["unlike nearest"] += (parameter.detach() != wide.bfloat16()).sum()
        self.counts["expected"] += torch.minimum(fraction, 1.0 - fraction).sum(dtype=torch.float64)

    def round_randomly(self, updated: list[tuple[Any, Tensor]]) -> None:
        """Rounds fp32 values into their bf16 parameters at random. Several tensors share the random
        bits of one draw, up to `elements_per_draw` elements together."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for tensors in updated:
            pairs += zip(
                *(t.detach().view(-1).split(self.elements_per_draw) for t in tensors), strict=True
            )
        while pairs:
            served: list[tuple[Tensor, Tensor]] = []
            size = 0
            while pairs and size + len(pairs[0][0]) <= self.elements_per_draw:
                served.append(pairs.pop(0))
                size += len(served[-1][0])

            # Draw half as many 32-bit words as there are elements, because each word has 16 random
            # bits for two elements.
            self.draws += 1
            key = self.seed ^ (self.draws << 32)
            words = draw("bits", key, Purpose.ROUNDING, self.position, -(-size // 2)).view(-1)
            halves = torch.stack((words & 0xFFFF, words >> 16), dim=1).view(-1)[:size].int()
            parts = halves.split([len(narrow) for narrow, _ in served])
            for (narrow, wide), bits in zip(served, parts, strict=True):
                narrow.copy_(round_stochastically(wide, bits))


def round_stochastically(wide: Tensor, bits: Tensor) -> Tensor:
    """Rounds fp32 to bf16 at random: away from zero with a probability equal to the value's
    distance from the bf16 neighbour nearer to zero, as a fraction of the gap between both
    neighbours.

    `bits` are int32 in [0, 2¹⁶), of the same shape. A value that bf16 represents, also an infinity,
    stays unchanged.
    """
    raised = (wide.view(torch.int32) + bits) & -0x10000
    return torch.where(wide.isfinite(), raised.view(torch.float32), wide).bfloat16()


def draw_few(technique: Weights) -> None:
    technique.elements_per_draw = MAX_COUNTED_DRAW


def count_part_bytes(technique: Weights, part: int) -> float | None:
    if not technique.enabled:
        return None
    return 4.0 * part + DRAW_BYTES * min(part, PART_ELEMENTS)


class Weights(Technique):
    key = "weights"
    summary = "`bf16`: weights of linear layers in 2 bytes, rounded at random"
    examples = ({"weights": "bf16"},)
    off = "fp32"
    loss_rtol = 2e-2
    used_in = ("training",)
    planning = Planning(
        savings=(Saving({"weights": "bf16"}, "weights rounded at random", 70),),
        on_fake_device=draw_few,
        count_part_bytes=count_part_bytes,
    )
    linears: Sequence[nn.Linear] = ()
    parameters: Sequence[Tensor] = ()
    elements_per_draw = PART_ELEMENTS
    update: RoundedUpdate | None = None

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
            self.update = RoundedUpdate(groups, make, self.elements_per_draw)
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

    # What would still say "on" if this did nothing? The dtype of the weights, and the number of
    # elements that the update visits: neither shows how they are rounded. So compare the number
    # of elements that were not rounded to the nearest value with its expectation.
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

        rounded, other, expected = (
            round(float(self.update.counts[name]))
            for name in ("rounded", "unlike nearest", "expected")
        )
        # Allow a difference of six standard deviations, because the count is random, plus 10
        # elements, because small counts are not normally distributed.
        right = abs(other - expected) <= 10 + 6 * math.sqrt(expected)
        trainable = sum(w.numel() for w in narrow if w.requires_grad)
        if len(narrow) == len(self.linears) and rounded == trainable and right:
            active = "bf16"
        note += (
            f"; the update rounded {rounded} of them at random: {other} not to the nearest value"
        )
        return Observation(active, f"{note}, {expected} expected")
