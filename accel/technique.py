"""The interface that every acceleration implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, cast

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
    path: ClassVar[str] = ""
    """Path of the key below `runtime` if it differs from `key`, such as "parallel.mode"; otherwise
    empty."""
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
    in_sampling: ClassVar[bool] = False
    """Whether the technique is also used when a trained model draws samples."""
    absent_from_sampling: ClassVar[str | None] = None
    """Reason why sampling does not use the technique, for its row in the ledger of sampling; None:
    that ledger has no row for the technique."""
    in_precompute: ClassVar[bool] = False
    """Whether the technique is also used while the encoder turns images into latents in advance."""
    slow_to_start: ClassVar[bool] = False
    """Whether the first step takes up to minutes longer with the technique; sampling then switches
    it off by default."""
    may_keep_less: ClassVar[tuple[Value, ...]] = ()
    """Values with which compiled code may keep less memory than the same step run eagerly."""
    saves_launches: ClassVar[bool] = False
    """Whether the technique reduces the host's work of launching kernels; a report suggests it if
    the GPU waits for the host."""
    changes_kernels: ClassVar[Literal["parity", "time"] | None] = None
    """Which results of a fused kernel's trial are invalid if this technique's value changes:
    "parity" (the comparison with the definition, and the time), "time" (only the time), None
    (neither)."""
    without_gpu: ClassVar[str | None] = None
    """Sentence that says why the technique needs an NVIDIA GPU, in which `{device}` stands for the
    device of the run; None if it needs no GPU."""
    emulated: ClassVar[tuple[Value, ...]] = ()
    """Values of `key` that a CPU can emulate, more slowly, if it has no instructions for them."""
    nondeterministic: ClassVar[bool] = False
    """Whether the technique makes results differ from run to run, so that `deterministic=true`
    switches it off."""

    savings: ClassVar[tuple[Saving, ...]] = ()
    """Changes of runtime keys that a plan (scripts/plan) tries and proposes if a run needs too much
    memory."""
    tried_with: ClassVar[str] = ""
    """Name of a group of techniques that runtime=auto tries together; empty: runtime=auto tries the
    technique alone."""

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
    def make_override(cls, value: Value) -> str:
        """Returns the command-line override that requests a value, such as runtime.tf32=true."""
        return f"runtime.{cls.path or cls.key}={str(value).lower()}"

    @property
    def enabled(self) -> bool:
        """Whether the technique is on: its value differs from `off`."""
        return self.value != self.off

    @property
    def period(self) -> int:
        """Number of blocks after which the technique's pattern repeats: 1 if it changes all blocks
        alike, n if it changes only every n-th block."""
        return 1

    @property
    def settings(self) -> dict[str, Any]:
        """Runtime key -> value, for the key that switches the technique and for the technique's
        `options`."""
        return {self.key: self.value} | self.option

    def describe_arithmetic(self) -> dict[str, Any]:
        """Returns a mapping, runtime key -> value, for those keys of the technique that decide how
        matrix products round; {} for most techniques."""
        return {}

    def find_obstacle(self) -> str | None:
        """Returns a sentence that says why the technique cannot have its `value` on `device`; None
        if it can.

        The stack calls this only if the technique is `enabled`.
        """
        kind = self.device.type
        return self.without_gpu and self.without_gpu.format(device=kind) if kind != "cuda" else None

    def on_process(self) -> None:  # noqa: B027 - most techniques have no flag to set
        """Sets flags of the whole process; the stack calls this even if the technique is off."""

    def on_layers(self, model: nn.Module) -> None:  # noqa: B027 - most leave them alone
        """Replaces layers in the model's blocks, before any technique wraps a block."""

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

    def state_dict(self) -> dict[str, Tensor]:
        """Returns a mapping, name -> tensor, of the state that a resumed run needs; {} for most
        techniques."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads tensors that `state_dict` returned, in place; {} changes nothing."""
        for name, tensor in self.state_dict().items() if state else ():
            tensor.copy_(state[name])

    def hides_blocks(self) -> bool:
        """Returns whether the technique compiles the whole model, so that no probe sees its blocks;
        the stack then probes an uncompiled step."""
        return False

    def recover(self, error: BaseException) -> str | None:
        """Switches the technique off if it caused `error` in warm-up, and returns a sentence that
        says so; otherwise returns None."""
        return None

    def list_candidates(self) -> tuple[Mapping[str, Value], ...]:
        """Returns mappings of runtime keys to values, among which runtime=auto chooses the fastest,
        in the order in which it tries them; empty if the technique's value leaves nothing to
        choose."""
        return ()

    def on_fake_device(self) -> None:  # noqa: B027 - most compute alike on any device
        """Prepares the technique for a plan (scripts/plan), which counts a step's bytes on fake CPU
        tensors: replaces what only a GPU can do by something that keeps the same bytes."""

    def count_part_bytes(self, part: int) -> float | None:
        """Returns the temporary bytes that an optimizer step needs for the largest part of the
        parameters, which has `part` elements; None if the technique does not make the optimizer
        update part by part."""
        return None

    def copy_to_host(self, tensor: Tensor, /) -> Tensor:
        """Copies into host memory a tensor that the forward pass saves for the backward pass; a
        plan replaces this method to count the bytes."""
        return tensor

    def list_host_tensors(self) -> Iterable[Tensor]:
        """Returns the tensors that the technique keeps in host memory from step to step."""
        return ()

    @abstractmethod
    def observe(self, evidence: Evidence) -> Observation:
        """Returns the value that one profiled step shows to be really on, and the evidence."""
