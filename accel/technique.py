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
"""What a runtime key can be."""


class Observation(NamedTuple):
    """The value that a technique found to be really on, and its evidence."""

    active: Value
    evidence: str


class Saving(NamedTuple):
    """Runtime values under which a step takes less memory, and what they cost, in words."""

    values: Mapping[str, Any]
    costs: str
    rank: int
    """A plan tries the lowest rank first; values of equal rank are tried together."""


class Step(Protocol):
    """A step that techniques may wrap; `forward` is the denoiser's forward pass, or the encoder's
    in precompute."""

    forward: Callable[..., Any]


class TrainingStep(Step, Protocol):
    """A step that trains: `update` is the whole of it, from batches to a named tuple of device
    scalars."""

    update: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    scaler: Any
    """The loss scaler of fp16, or None."""


Model = TypeVar("Model", bound="nn.Module")
AnyStep = TypeVar("AnyStep", bound=Step)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The blocks of a model: all that a technique may touch of it."""
    return cast("nn.ModuleList", model.blocks)


def find_switches(module: nn.Module, key: str) -> list[nn.Module]:
    """The modules in it that have an attribute `key`, by which they choose how they compute."""
    return [m for m in module.modules() if hasattr(m, key)]


class Technique(ABC):
    """The same training step, cheaper.

    A technique is built for every run, switched on or not: an `off` value is applied just as an
    `on` value is (TF32 off means off in matmuls *and* in cuDNN), and the ledger has a row for it
    either way. One that does more than set a process flag acts only where `enabled`.
    """

    key: ClassVar[str]
    """The runtime key it answers to."""
    path: ClassVar[str] = ""
    """Where its value stands below `runtime`, if not under `key`."""
    summary: ClassVar[str]
    """What it does, for the README's table."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Further runtime keys, which say how, with the values that they have if nothing is said."""
    off: ClassVar[Value] = False
    """The value of `key` under which it does nothing."""
    examples: ClassVar[tuple[Mapping[str, Value], ...]] = ()
    """Runtime values that switch it on, one mapping for each way that tests and benchmarks try;
    none: `{key: True}`."""
    loss_rtol: ClassVar[float]
    """How far the loss of one step may move when it is switched on; 0 means bit for bit (in eager
    mode)."""
    in_sampling: ClassVar[bool] = False
    """True if it acts where a trained model only draws samples."""
    absent_from_sampling: ClassVar[str | None] = None
    """Why samples are drawn without it, for the ledger; None where nobody would ask."""
    in_precompute: ClassVar[bool] = False
    """True if it acts on an encoder of images."""
    slow_to_start: ClassVar[bool] = False
    """True if its first step takes up to minutes more: without being asked, samples are drawn
    without it."""
    saves_launches: ClassVar[bool] = False
    """True if it is worth a try where the GPU waits for the host."""
    changes_kernels: ClassVar[Literal["parity", "time"] | None] = None
    """What a trial of fused kernels finds otherwise with it: parity and time, or time alone."""
    without_gpu: ClassVar[str | None] = None
    """Why it cannot be had on a `{device}` that is no NVIDIA GPU, as a sentence; None if it can."""
    emulated: ClassVar[tuple[Value, ...]] = ()
    """Values that a CPU without instructions for them computes all the same, more slowly."""
    nondeterministic: ClassVar[bool] = False
    """True where `deterministic=true` has to switch it off."""

    savings: ClassVar[tuple[Saving, ...]] = ()
    """Changes that the plan counts and proposes where memory is short."""
    plan_note: ClassVar[str] = ""
    """What a plan that counts bytes does not tell of it."""
    tried_with: ClassVar[str] = ""
    """A name that techniques share whose values are tried together; empty: alone."""

    def __init__(self, value: Value, device: torch.device, **options: Any) -> None:
        self.value = value
        self.device = device
        self.option = {**self.options, **options}
        vars(self).update(self.option)

    @classmethod
    def list_ways(cls) -> tuple[Mapping[str, Value], ...]:
        """`examples`, where there are any; otherwise the one way to switch it on."""
        return cls.examples or ({cls.key: True},)

    @classmethod
    def make_override(cls, value: Value) -> str:
        """The override that asks for a value, such as runtime.tf32=true."""
        return f"runtime.{cls.path or cls.key}={str(value).lower()}"

    @property
    def enabled(self) -> bool:
        return self.value != self.off

    @property
    def period(self) -> int:
        """Blocks after which it treats the next ones as it did the first."""
        return 1

    @property
    def settings(self) -> dict[str, Any]:
        """Its value and its options, by runtime key."""
        return {self.key: self.value} | self.option

    def describe_arithmetic(self) -> dict[str, Any]:
        """Runtime keys and values that say how products round, where it has a part in that."""
        return {}

    def find_obstacle(self) -> str | None:
        """Why `value` cannot be had on `device`, as a sentence; None if it can. Asked only where
        `enabled`."""
        kind = self.device.type
        return self.without_gpu and self.without_gpu.format(device=kind) if kind != "cuda" else None

    def on_process(self) -> None:  # noqa: B027 - most techniques have no flag to set
        """Sets process-wide flags, both ways."""

    def on_layers(self, model: nn.Module) -> None:  # noqa: B027 - most leave them alone
        """Exchanges layers in the model's blocks, before any technique wraps a block."""

    def on_model(self, model: Model) -> Model:
        """Changes the model through its `.blocks`; state-dict keys stay as they are."""
        return model

    def make_optimizer_kwargs(self) -> dict[str, Any]:
        """Arguments for the optimizer's constructor."""
        return {}

    def on_optimizer(self, make: MakeOptimizer) -> MakeOptimizer:
        """Wraps what builds the optimizer from parameter groups."""
        return make

    def on_step(self, step: AnyStep) -> AnyStep:
        """Wraps `step.forward` or `step.update`, or hands the step an object that it needs."""
        return step

    def surround_evaluation(self) -> AbstractContextManager[object]:
        """What surrounds evaluation and sampling in the middle of training."""
        return nullcontext()

    def compare(self, run: Callable[[], object], evidence: Evidence) -> None:  # noqa: B027 - most need one step only
        """Called with the evidence of a warm step; may call `run` again, with and without
        itself."""

    def on_warm(self) -> bool:
        """Called when one step has been seen to work; True if the step runs differently from now
        on."""
        return False

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that a resumed run needs; empty for most."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - most have nothing to remember
        """Continues from `state_dict`, in place."""

    def hides_blocks(self) -> bool:
        """True if no block can be probed in the step as it runs; then an uncompiled step is probed
        instead."""
        return False

    def recover(self, error: BaseException) -> str | None:
        """Undoes itself if `error`, raised in warm-up, is its own doing, and says so; None if it is
        not."""
        return None

    def list_candidates(self) -> tuple[Mapping[str, Value], ...]:
        """Runtime values among which runtime=auto chooses the fastest, the one to begin with
        first; empty where the value stays as given."""
        return ()

    def on_fake_device(self) -> None:  # noqa: B027 - most compute alike on any device
        """Called where only bytes are counted, on fake tensors of a CPU: sets itself to what keeps
        the same bytes there."""

    def count_part_bytes(self, part: int) -> float | None:
        """Bytes that an update takes at least, where it works at one part of the parameters after
        the other and the largest has `part` elements; None where it does not."""
        return None

    def copy_to_host(self, tensor: Tensor, /) -> Tensor:
        """A copy in host memory of what the forward pass keeps; a plan follows its bytes."""
        return tensor

    def list_host_tensors(self) -> Iterable[Tensor]:
        """What it keeps in host memory from one step to the next."""
        return ()

    @abstractmethod
    def observe(self, evidence: Evidence) -> Observation:
        """Reads from one profiled step which value is really on."""
