"""Two rows of the ledger (the table of what a profiled step shows to be on) that no runtime key
switches: the form of the optimizer's state, counted from its tensors, and whether an adapter
trains, counted from its gradients and updates.

Forms of an optimizer's state: `fp32`: two fp32 moments (AdamW, 8 bytes per element of a parameter);
`momentum`: one fp32 moment (Muon's matrices, SGD, 4 bytes per element; Muon also keeps AdamW's two
moments for rows that belong to no matrix); `8bit`, `4bit`, `fp8`: two quantised moments (2, 1 and 2
bytes per element, plus the scales); `factored`: per matrix a row and a column of second moments
(Adafactor); `none`: no state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel.composite_optimizer import collect_state, is_fused, iterate_innermost, parameters_of
from accel.evidence import Evidence
from accel.sharding import get_world_size, to_full, to_local
from accel.technique import AnyStep, Observation, Technique, find_switches
from accel.update_probe import MOVED

NO_GRADIENT = -1
"""Number in place of the fate (accel/update_probe.py) of a parameter without a gradient."""
MIN_MOMENTUM = 1e-5
"""Norm of a momentum below which `compare` measures no step: Muon does not normalise tiny ones."""
MIN_NARROW_ELEMENTS = 4096
"""Number of elements of a parameter below which libraries of 8-bit and 4-bit optimizers keep its
moments in fp32."""
BYTES_PER_ELEMENT = {"fp32": 8.0, "momentum": 4.0, "8bit": 2.0, "fp8": 2.0, "4bit": 1.0}
"""Form of a state -> its bytes per element of a parameter; next to none for the other forms."""
NARROW_DTYPES = {torch.uint8: "8bit", torch.float8_e4m3fn: "fp8"}


def name_form(state: Mapping[str, Any], size: int) -> str:
    """Names the form of `state`, the optimizer's state of one parameter with `size` elements, such
    as "fp32" or "8bit"."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    for dtype, name in NARROW_DTYPES.items():
        if any(t.dtype is dtype for t in tensors):
            packed = sum(t.numel() for t in tensors if t.dtype is dtype) == size
            return "4bit" if packed else name
    if "row_var" in state:
        return "factored"
    moments = sum(t.numel() == size and t.ndim > 0 and t.is_floating_point() for t in tensors)
    return {0: "none", 1: "momentum"}.get(moments, "fp32")


class OptimizerState(Technique):
    """The ledger's row about the optimizer's state. The requested value, `form`, is the form in
    which the optimizer's class promises to keep its state, such as "8bit" (the top of this file
    lists the forms)."""

    key = "optim"
    summary = "the form of the optimizer's state, counted"
    off = "fp32"
    loss_rtol = 0.0
    used_in = ("training",)
    optimizer: Any = None
    orthogonal: Sequence[bool] = ()
    """For each shape of Muon's matrices whether the step that `compare` measured is orthogonal."""

    def __init__(self, kind: type, momentum: float, device: torch.device) -> None:
        """`kind` is the optimizer's class. `momentum` is SGD's option: if it is 0, SGD keeps no
        state."""
        self.form: str = getattr(kind, "form", "fp32")
        if kind is torch.optim.SGD:
            self.form = "momentum" if momentum else "none"
        elif kind is torch.optim.Adafactor:
            self.form = "factored"
        super().__init__(self.form, device)
        self.block: int = getattr(kind, "block", 1)
        """Number of elements of a moment that the library quantises as one block; the promise holds
        only for parameters whose number of elements is a multiple of this number."""
        self.needs_matrices = hasattr(kind, "takes_matrices")
        """If true, the promise holds only for parameters with matrices that Muon orthogonalises;
        those have a momentum."""

    def on_step(self, step: AnyStep) -> AnyStep:
        self.optimizer = getattr(step, "optimizer", None)
        return step

    def foresee_bytes(self) -> float:
        """Returns about how many bytes the state will take, which the first step creates."""
        size = sum(to_local(p).numel() for p in parameters_of(self.optimizer))
        return BYTES_PER_ELEMENT.get(self.form, 0.0) * size

    def promises(self, parameter: Tensor, state: Mapping[str, Any]) -> bool:
        """Returns whether the optimizer promises to keep `state`, the state of `parameter`, in
        `form`: not, for example, 8-bit state for small parameters, or factored moments for
        vectors."""
        if self.form in ("8bit", "4bit", "fp8"):
            return parameter.numel() >= MIN_NARROW_ELEMENTS and parameter.numel() % self.block == 0
        if self.form == "factored":
            return parameter.ndim > 1
        return "momentum" in state or not self.needs_matrices

    def compare(self, run: Callable[[], object], evidence: Evidence) -> None:
        """Takes one more step with Muon, and measures the step of one matrix of each shape.

        The singular values of a step are about 1, so their squares add up to far more than 1, the
        sum for a matrix that was only divided by its norm. Early gradients may have a low rank, so
        a sum of 4 is enough. Weights in bf16 are not measured: they round, and are empty between
        two steps.
        """
        groups = [group for group in self.optimizer.param_groups if group.get("matrices")]
        chosen = {p.shape: (p, group) for group in groups for p in group["params"] if p.numel()}
        before = [to_full(p.detach()).clone() for p, _ in chosen.values()]
        if before:
            run()

        # Undo weight decay, rate and scale.
        self.orthogonal = []
        taken = any(update.taken for update in evidence.updates[-1:])
        for (parameter, group), old in zip(chosen.values(), before, strict=True):
            first, last = group["matrices"][0]
            decayed = old * (1.0 - group["lr"] * group["weight_decay"])
            step = ((decayed - to_full(parameter.detach())) / group["lr"])[first:last]
            step /= group["rms"] * math.sqrt(max(step.shape))
            largest = float(torch.linalg.matrix_norm(step, 2))
            total = float(step.square().sum())
            momentum = collect_state(self.optimizer, parameter).get("momentum", step.new_zeros(()))
            size = float(to_full(momentum).norm())
            # A matrix without a gradient, or with a tiny one, takes no such step.
            if taken and (size > MIN_MOMENTUM or (size == 0.0 and total)):
                right = 0.5 < largest < 1.5 and total > min(4.0, min(step.shape) / 2)
                self.orthogonal.append(right and size > 0.0)

    # What would still say "on" if this did nothing? The class of the optimizer: a class for 8-bit
    # moments may keep fp32 ones. So look at dtype and size of every tensor in the state, at what
    # became of the parameters, and with Muon at the singular values of a step.
    def observe(self, evidence: Evidence) -> Observation:
        optimizer = self.optimizer
        promised: Counter[str] = Counter()
        others: Counter[str] = Counter()
        total = 0
        size = 0
        for parameter in parameters_of(optimizer):
            state = collect_state(optimizer, parameter)
            counts = promised if self.promises(parameter, state) else others
            counts[name_form(state, parameter.numel())] += 1
            total += sum(t.nbytes for t in state.values() if isinstance(t, Tensor))
            size += parameter.numel()

        form = self.form
        note = f"{promised[form]} of {promised.total()} parameters keep {form}"
        wrong = promised - Counter({form: promised.total()})
        if wrong:
            note += f" ({format_counts(wrong)})"
        if others:
            note += f"; {others.total()} others: {format_counts(others)}"
        if self.needs_matrices:
            note += f"; {describe_rules(optimizer)}"
            shapes = len(self.orthogonal)
            note += f"; steps are orthogonal in {sum(self.orthogonal)} of {shapes} shapes measured"
        note += f"; {evidence.left_alone} parameters with a gradient did not move"
        note += f"; {total / max(1, size):.2f} bytes a parameter, {total / 2**20:.2f} MiB"
        note += "" if is_fused(optimizer) else "; to skip a step the host reads one flag a step"
        right = all(self.orthogonal) and not (wrong or evidence.left_alone)
        return Observation(form if right else "mixed", note)


def describe_rules(optimizer: Any) -> str:
    """Says how many matrices Muon updates, and how many elements AdamW."""
    inner = list(iterate_innermost(optimizer))
    groups = [group for member in inner for group in member.param_groups]
    counts = [(len(group["matrices"]), len(group["params"])) for group in groups]
    wanted = sum(matrices * weights for matrices, weights in counts)
    slices = sum(matrices * weights for matrices, weights in counts if matrices > 1)
    states = [state for member in inner for state in member.state.values()]
    sizes = [state["exp_avg_sq"].numel() for state in states if "exp_avg_sq" in state]
    return (
        f"Muon updates {wanted} matrices, {slices} of them slices of fused projections; AdamW "
        f"updates {sum(sizes)} elements of {len(sizes)} parameters"
    )


def format_counts(forms: Counter[str]) -> str:
    """Formats counts of forms, such as "2 fp32, 1 none"."""
    return ", ".join(f"{n} {form}" for form, n in forms.items())


class AdapterGradients(Technique):
    """The ledger's row that shows whether an adapter trains.

    In other projects, fused code reads a layer's weight directly and so bypasses the layer's
    adapter, which then silently trains nothing. This row shows for each parameter of each adapter
    whether the backward pass reached it, and whether some step of warm-up moved it along a gradient
    that is not zero. LoRA's matrix B starts at zero, so its matrix A has such a gradient only from
    the second step on.
    """

    key = "adapter"
    summary = "an adapter on frozen weights; counts the layers that it trains"
    off = "none"
    loss_rtol = 0.0
    used_in = ("training",)

    def iterate_parameters(self) -> Iterator[tuple[str, nn.Parameter, str]]:
        """Yields the parameters of all adapters: the full name in the model, the parameter, and its
        name within the adapted layer."""
        modules = self.model.named_modules()
        names = {module: name.removeprefix("model.") for name, module in modules}
        for layer in find_switches(self.model, "base_layer"):
            for name, parameter in layer.named_parameters():
                if not name.startswith("base_layer."):
                    yield f"{names[layer]}.{name}", parameter, name

    # What would still say "on" if this did nothing? The layers to which adapters are attached: an
    # adapter may be there and get no gradient, or no update. So count the adapters' parameters that
    # moved along a gradient.
    def observe(self, evidence: Evidence) -> Observation:
        kinds = {name: kind for name, _, kind in self.iterate_parameters()}
        layers = {name: name.removesuffix(f".{kind}") for name, kind in kinds.items()}
        reached = set[str]()
        first_steps = dict[str, int]()
        none = torch.full((), NO_GRADIENT)
        for step, update in enumerate(evidence.updates, start=1):
            found = [update.fates.get(p, none) for _, p, _ in self.iterate_parameters()]
            fates = torch.stack([fate.to(self.device) for fate in found])
            # A parameter has a gradient if it has one on any rank.
            if get_world_size() > 1:
                dist.all_reduce(fates, dist.ReduceOp.MAX)
            for name, fate in zip(kinds, fates.tolist(), strict=True):
                if fate > NO_GRADIENT:
                    reached.add(name)
                if fate == MOVED:
                    first_steps.setdefault(name, step)

        # If fp16 skipped all steps but one, LoRA's A had no gradient but zero, because its B was
        # zero. In this case accept every parameter that the backward pass reached.
        taken = sum(bool(update.taken) for update in evidence.updates)
        trained = first_steps if taken > 1 else reached
        idle = {layers[name] for name in kinds if name not in trained}
        unreached = {layers[name] for name in kinds if name not in reached}
        every = len({*layers.values()})
        counts = []
        for kind, total in Counter(kinds.values()).items():
            steps = [step for name, step in first_steps.items() if kinds[name] == kind]
            since = f" from step {min(steps)} on" if steps else ""
            counts.append(f"{kind} {len(steps)} of {total}{since}")
        note = (
            f"{every - len(unreached)} of {every} adapted layers in the backward pass; moved along "
        )
        note += f"a gradient: {', '.join(counts)}"
        if idle:
            note += f"; none: {', '.join(sorted(idle)[:3])}{', …' * (len(idle) > 3)}"
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        trainable = sum(size for size, trains in sizes if trains)
        note += f"; {trainable} of {sum(size for size, _ in sizes)} parameters train"
        return Observation("partly" if idle else self.value, note)
