"""The interface that every acceleration implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from accel.composite_optimizer import MakeOptimizer
    from accel.evidence import Evidence


Value = bool | str
"""Type of the value of a technique's runtime key, such as True for `runtime.tf32`, "bf16" for
`runtime.precision`."""


class Observation(NamedTuple):
    """Result of `Technique.observe`: the value of the technique that a profiled step shows to be
    really on, and the evidence as a sentence."""

    active: Value
    evidence: str


class Saving(NamedTuple):
    """Values of runtime keys under which a step takes less memory, and a phrase that says what they
    cost, such as "one more forward pass"."""

    values: Mapping[str, Any]
    costs: str
    rank: int
    """Place in the order in which a plan (scripts/plan) tries savings: it starts with the lowest
    number, and tries savings with the same number together."""


@dataclass(frozen=True)
class Planning:
    """Answers of a technique to plans, to forecasts of memory and to runtime=auto; no training step
    needs them. Each function gets the technique."""

    savings: tuple[Saving, ...] = ()
    """Changes of runtime keys that a plan (scripts/plan) tries and proposes if a run needs too much
    memory."""
    may_keep_less: tuple[Value, ...] = ()
    """Values with which compiled code may keep less memory than the same step run eagerly."""
    list_candidates: Callable[[Any], tuple[Mapping[str, Value], ...]] = lambda _: ()
    """Returns mappings of runtime keys to values, which runtime=auto tries in this order against
    the values as they are; empty if the technique's value leaves nothing to choose."""
    on_fake_device: Callable[[Any], object] = lambda _: None
    """Prepares the technique for a plan, which counts a step's bytes on fake CPU tensors: replaces
    what only a GPU can do by something that keeps the same bytes."""
    count_part_bytes: Callable[[Any, int], float | None] = lambda *_: None
    """Returns the temporary bytes that an optimizer step needs for the largest part of the
    parameters, which has as many elements as the second argument says; None if the technique does
    not make the optimizer update part by part."""
    list_host_tensors: Callable[[Any], Iterable[Tensor]] = lambda _: ()
    """Returns the tensors that the technique keeps in host memory from step to step."""
    decorate_copies: Callable[[Any, Callable[..., Any]], object] = lambda *_: None
    """Wraps by the second argument the method that copies to the host what a forward pass saves for
    the backward pass, so that a plan counts no bytes on the device for the copies."""
    find_period: Callable[[Any], int] = lambda _: 1
    """Returns the number of blocks after which the technique's pattern repeats: 1 if it changes all
    blocks alike, n if it changes only every n-th block."""


def switch_off(technique: Technique) -> None:
    """Switches a technique off, as its `Planning.on_fake_device`."""
    technique.value = technique.off


class Step(Protocol):
    """A step that techniques may wrap. `forward` is the forward pass of the model that runs: in
    training the denoiser with its heads (training/heads.py), in sampling the denoiser, and the
    encoder while it turns images into latents in advance."""

    forward: Callable[..., Any]


class TrainingStep(Step, Protocol):
    """A training step. `update` trains on a list of micro-batches and returns the step's figures
    (loss, norm …) as a named tuple of scalars on the device."""

    update: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    scaler: Any
    """The loss scaler of fp16, or None."""


Model = TypeVar("Model", bound="nn.Module")
AnyStep = TypeVar("AnyStep", bound=Step)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Returns a model's blocks, the only attribute that techniques expect of every model."""
    return cast("nn.ModuleList", model.blocks)


def find_switches(module: nn.Module, key: str) -> list[nn.Module]:
    """Finds the submodules that have an attribute called `key`. Such an attribute, for example
    `fused_swiglu`, is a switch: it selects how the submodule computes."""
    return [m for m in module.modules() if hasattr(m, key)]


class Technique(ABC):
    """A change that makes a training step faster, or lets the step take less memory; the loss of a
    step may change by at most `loss_rtol`.

    Every run builds an object of every technique, on or off, because each technique has a row in
    the ledger, and because some techniques must set a flag of the process even for "off" (TF32 that
    is off must be off in matmuls *and* in cuDNN). A technique that does more than set a flag of the
    process acts only if it is `enabled`.
    """

    key: ClassVar[str]
    """Name of the runtime key that switches the technique: "compile" stands for
    `runtime.compile`."""
    summary: ClassVar[str]
    """One-line description for the table of techniques in the docs."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Further runtime keys that configure the technique -> their defaults."""
    off: ClassVar[Value] = False
    """Value of `key` under which the technique does nothing."""
    examples: ClassVar[tuple[Mapping[str, Value], ...]] = ()
    """Mappings of runtime keys to values that switch the technique on, one for each variant that
    tests and benchmarks run; empty: `{key: True}` is the only variant."""
    loss_rtol: ClassVar[float]
    """Largest relative change of one step's loss that the technique may cause; 0 means that the
    loss is equal bit for bit (in eager mode)."""
    used_in: ClassVar[tuple[str, ...]] = ("training", "sampling", "precompute")
    """Work that uses the technique: "training", "sampling" by a trained model, "precompute", in
    which an encoder turns images into latents."""
    keeps_parity: ClassVar[bool] = False
    """Whether the technique changes how long a block takes, but not what an operator computes, so
    that a fused kernel that has passed its parity test passes it with any value of the technique.
    The trial of kernels (accel/trial) applies techniques for which this is true, and those that
    sampling uses too."""
    saves_launches: ClassVar[bool] = False
    """Whether the technique reduces the host's work of launching kernels; a report suggests it if
    the GPU waits for the host."""
    without_gpu: ClassVar[str | None] = None
    """Sentence that says why the technique needs an NVIDIA GPU, in which `{device}` stands for the
    device of the run; None if it needs no GPU."""
    nondeterministic: ClassVar[bool] = False
    """Whether the technique makes results differ from run to run, so that `deterministic=true`
    switches it off."""
    planning: ClassVar[Planning] = Planning()

    model: Any = None
    """The model to which `on_model` was applied; None before."""

    def __init__(self, value: Value, device: torch.device, **options: Any) -> None:
        self.value = value
        self.device = device
        self.option = {**self.options, **options}
        vars(self).update(self.option)

    @classmethod
    def list_ways(cls) -> tuple[Mapping[str, Value], ...]:
        """Returns the variants of the technique as mappings of runtime keys to values: `examples`,
        or `{key: True}` if there are none."""
        return cls.examples or ({cls.key: True},)

    @classmethod
    def make_override(cls, value: Value, option: str = "") -> str:
        """Returns the command-line override that requests a value of the key, such as
        runtime.tf32=true, or of an option."""
        return f"runtime.{option or cls.key}={str(value).lower()}"

    @property
    def enabled(self) -> bool:
        """Whether the technique is on: its value differs from `off`."""
        return self.value != self.off

    @property
    def uses_options(self) -> bool:
        """Whether the technique reads its `options`: not if it is off."""
        return self.enabled

    @property
    def settings(self) -> dict[str, Any]:
        """Runtime key -> value, for the key that switches the technique, and for the technique's
        `options` if it uses them."""
        return {self.key: self.value} | (self.option if self.uses_options else {})

    def find_obstacle(self) -> str | None:
        """Returns a sentence that says why the technique cannot have its `value` on `device`; None
        if it can.

        The stack calls this only if the technique is `enabled`.
        """
        kind = self.device.type
        return self.without_gpu and self.without_gpu.format(device=kind) if kind != "cuda" else None

    def on_process(self) -> None:  # noqa: B027 - most techniques have no flag to set
        """Sets flags of the whole process; the stack calls this even if the technique is off."""

    def on_model(self, model: Model) -> Model:
        """Changes or wraps the model, as a rule only its blocks, without changing state-dict keys;
        returns it. This definition only remembers the model."""
        self.model = model
        return model

    def make_optimizer_kwargs(self) -> dict[str, Any]:
        """Returns keyword arguments for the optimizer's constructor."""
        return {}

    def on_optimizer(self, make: MakeOptimizer) -> MakeOptimizer:
        """Wraps `make`, the function that builds the optimizer from parameter groups; returns the
        wrapper."""
        return make

    def on_step(self, step: AnyStep) -> AnyStep:
        """Wraps `step.forward` or `step.update`, or sets an attribute of the step, such as its loss
        scaler; returns the step."""
        return step

    def surround_evaluation(self) -> AbstractContextManager[object]:
        """Returns a context for evaluation and sampling in the middle of training."""
        return nullcontext()

    def compare(self, run: Callable[[], object], evidence: Evidence) -> None:  # noqa: B027 - most need one step only
        """Takes further measurements after the profiled step that gave `evidence`: may call `run`,
        which runs a whole step, with and without the technique."""

    def on_warm(self) -> bool:
        """Prepares the technique for the steps after warm-up. Returns whether the step runs
        differently from now on, so that the stack must observe one more step."""
        return False

    def recover(self, error: BaseException) -> str | None:
        """Switches the technique off if it caused `error` in warm-up, and returns a sentence that
        says so; otherwise returns None."""
        return None

    @abstractmethod
    def observe(self, evidence: Evidence) -> Observation:
        """Returns the value that one profiled step shows to be really on, and the evidence."""
