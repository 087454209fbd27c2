"""The contract that every acceleration implements."""

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
"""Type of a runtime key's value."""


class Observation(NamedTuple):
    """The value that a technique saw to be really on, and the evidence for it."""

    active: Value
    evidence: str


class Saving(NamedTuple):
    """Runtime values under which a step takes less memory, and their cost in words."""

    values: Mapping[str, Any]
    costs: str
    rank: int
    """A plan tries the lowest rank first; values of equal rank are tried together."""


class Step(Protocol):
    """A step that techniques may wrap; `forward` is the denoiser's forward pass, or the encoder's
    in precompute."""

    forward: Callable[..., Any]


class TrainingStep(Step, Protocol):
    """A training step: `update` maps batches to a named tuple of device scalars."""

    update: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    scaler: Any
    """The loss scaler of fp16, or None."""


Model = TypeVar("Model", bound="nn.Module")
AnyStep = TypeVar("AnyStep", bound=Step)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Returns the blocks of a model, the only part that a technique may change."""
    return cast("nn.ModuleList", model.blocks)


def find_switches(module: nn.Module, key: str) -> list[nn.Module]:
    """Finds the modules with an attribute `key`, by which they choose how they compute."""
    return [m for m in module.modules() if hasattr(m, key)]


class Technique(ABC):
    """A change that makes the same training step cheaper.

    Every run builds every technique, on or off: an `off` value is applied as an `on` value is (TF32
    off means off in matmuls *and* in cuDNN), and each technique has a row in the ledger. A
    technique that does more than set a process flag acts only where `enabled`.
    """

    key: ClassVar[str]
    """Runtime key that switches it."""
    path: ClassVar[str] = ""
    """Path of its value below `runtime`, if it differs from `key`."""
    summary: ClassVar[str]
    """Description for the table of techniques in the docs."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Further runtime keys that configure it, with their defaults."""
    off: ClassVar[Value] = False
    """Value of `key` under which it does nothing."""
    examples: ClassVar[tuple[Mapping[str, Value], ...]] = ()
    """Runtime values that switch it on, one mapping for each way that tests and benchmarks try;
    empty: `{key: True}` is the only way."""
    loss_rtol: ClassVar[float]
    """Largest relative change of one step's loss when it is on; 0 means bit for bit (in eager
    mode)."""
    in_sampling: ClassVar[bool] = False
    """Whether it also acts where a trained model draws samples."""
    absent_from_sampling: ClassVar[str | None] = None
    """Reason for the ledger why sampling does without it; None: the ledger of sampling has no row
    for it."""
    in_precompute: ClassVar[bool] = False
    """Whether it also acts on an encoder of images."""
    slow_to_start: ClassVar[bool] = False
    """Whether its first step takes up to minutes longer: sampling switches it off by default."""
    saves_launches: ClassVar[bool] = False
    """Whether it is worth a try where the GPU waits for the host."""
    changes_kernels: ClassVar[Literal["parity", "time"] | None] = None
    """Results of a trial of fused kernels that depend on it: "parity" (and time), "time" alone, or
    none."""
    without_gpu: ClassVar[str | None] = None
    """Sentence that says why it needs an NVIDIA GPU, with `{device}` for the present device; None
    if it does not."""
    emulated: ClassVar[tuple[Value, ...]] = ()
    """Values that a CPU can emulate, more slowly, without instructions for them."""
    nondeterministic: ClassVar[bool] = False
    """Whether `deterministic=true` must switch it off."""

    savings: ClassVar[tuple[Saving, ...]] = ()
    """Changes that a plan counts and proposes where memory is short."""
    plan_note: ClassVar[str] = ""
    """Note in a plan about what counting bytes does not show."""
    tried_with: ClassVar[str] = ""
    """Name of a group of techniques that runtime=auto tries together; empty: it is tried alone."""

    def __init__(self, value: Value, device: torch.device, **options: Any) -> None:
        self.value = value
        self.device = device
        self.option = {**self.options, **options}
        vars(self).update(self.option)

    @classmethod
    def list_ways(cls) -> tuple[Mapping[str, Value], ...]:
        """Returns the ways to switch it on: `examples`, or `{key: True}` without examples."""
        return cls.examples or ({cls.key: True},)

    @classmethod
    def make_override(cls, value: Value) -> str:
        """Returns the override that requests a value, such as runtime.tf32=true."""
        return f"runtime.{cls.path or cls.key}={str(value).lower()}"

    @property
    def enabled(self) -> bool:
        """Whether its value is not `off`."""
        return self.value != self.off

    @property
    def period(self) -> int:
        """Number of blocks after which its treatment of blocks repeats."""
        return 1

    @property
    def settings(self) -> dict[str, Any]:
        """Value and options by runtime key."""
        return {self.key: self.value} | self.option

    def describe_arithmetic(self) -> dict[str, Any]:
        """Returns its runtime keys and values that decide how products round; empty for most."""
        return {}

    def find_obstacle(self) -> str | None:
        """Returns a sentence that says why `device` cannot have `value`; None if it can.

        The stack asks only where the technique is `enabled`.
        """
        kind = self.device.type
        return self.without_gpu and self.without_gpu.format(device=kind) if kind != "cuda" else None

    def on_process(self) -> None:  # noqa: B027 - most techniques have no flag to set
        """Sets process-wide flags, for off values too."""

    def on_layers(self, model: nn.Module) -> None:  # noqa: B027 - most leave them alone
        """Replaces layers in the model's blocks, before any technique wraps a block."""

    def on_model(self, model: Model) -> Model:
        """Changes the model through its `.blocks`, without changing state-dict keys."""
        return model

    def make_optimizer_kwargs(self) -> dict[str, Any]:
        """Returns arguments for the optimizer's constructor."""
        return {}

    def on_optimizer(self, make: MakeOptimizer) -> MakeOptimizer:
        """Wraps the function that builds the optimizer from parameter groups."""
        return make

    def on_step(self, step: AnyStep) -> AnyStep:
        """Wraps `step.forward` or `step.update`, or gives the step an object that it needs."""
        return step

    def surround_evaluation(self) -> AbstractContextManager[object]:
        """Returns a context for evaluation and sampling in the middle of training."""
        return nullcontext()

    def compare(self, run: Callable[[], object], evidence: Evidence) -> None:  # noqa: B027 - most need one step only
        """Measures more: may call the step `run` again, with and without the technique, after the
        step of `evidence`."""

    def on_warm(self) -> bool:
        """Reacts to the end of warm-up; returns whether the step runs differently from now on."""
        return False

    def state_dict(self) -> dict[str, Tensor]:
        """Returns tensors that a resumed run needs; empty for most."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - most have nothing to remember
        """Loads a `state_dict` in place."""

    def hides_blocks(self) -> bool:
        """Returns whether the step hides its blocks from probes; the stack then probes an
        uncompiled step."""
        return False

    def recover(self, error: BaseException) -> str | None:
        """Switches itself off if it caused `error` in warm-up, and returns a sentence that says so;
        otherwise returns None."""
        return None

    def list_candidates(self) -> tuple[Mapping[str, Value], ...]:
        """Returns the runtime values among which runtime=auto chooses the fastest, in the order of
        trial; empty: nothing to choose."""
        return ()

    def on_fake_device(self) -> None:  # noqa: B027 - most compute alike on any device
        """Prepares for a plan, which counts bytes on fake tensors of a CPU: chooses a value that
        keeps the same bytes there."""

    def count_part_bytes(self, part: int) -> float | None:
        """Returns the bytes that an update needs for its largest part of `part` elements; None if
        it does not update part by part."""
        return None

    def copy_to_host(self, tensor: Tensor, /) -> Tensor:
        """Copies a tensor that the forward pass saves to host memory; a plan replaces this to count
        the bytes."""
        return tensor

    def list_host_tensors(self) -> Iterable[Tensor]:
        """Returns the tensors that it keeps in host memory from step to step."""
        return ()

    @abstractmethod
    def observe(self, evidence: Evidence) -> Observation:
        """Returns the value that one profiled step shows to be on."""
