"""The stack: applies all techniques to a run in a fixed order, and finds which of them were really
on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accel.composite_optimizer import MakeOptimizer
from accel.evidence import observe_step
from accel.ledger import AUTO, Ledger, LedgerRow
from accel.sharding import get_world_size, is_true_on_any_rank
from accel.technique import AnyStep, Model, Technique
from accel.techniques.attention_backend import AttentionBackend
from accel.techniques.compilation import Compile
from accel.techniques.cuda_graph import CudaGraph
from accel.techniques.cudnn_benchmark import CudnnBenchmark
from accel.techniques.empty_cache_at_eval import EmptyCacheAtEval
from accel.techniques.fused_adamw import FusedAdamW
from accel.techniques.fused_kernels import (
    FusedAddNorm,
    FusedConv,
    FusedRope,
    FusedScan,
    FusedSwiglu,
)
from accel.techniques.gradient_checkpointing import CheckpointBlocks
from accel.techniques.offload_activations import OffloadActivations
from accel.techniques.offload_optimizer import OffloadOptimizer
from accel.techniques.parallel import DataParallel
from accel.techniques.precision import Precision
from accel.techniques.residual_in_fp32 import ResidualInFp32
from accel.techniques.tf32 import Tf32
from accel.techniques.weights import Weights
from accel.update_probe import watch_updates
from common.errors import UserError

# Techniques act in this order: process flags, module changes, checkpointing, compile, sharding,
# optimizer, autocast, evaluation, CUDA graph. Only `Precision.on_layers`, which replaces layers for
# fp8, runs before anything else. Checkpointing comes before compile, so that a compiled block
# contains its own recomputation. Both come before sharding, so that FSDP gathers a block's
# parameters outside of the compiled and the checkpointed code. The CUDA graph is last, because it
# captures the work of all other techniques.
TECHNIQUES: tuple[type[Technique], ...] = (
    Tf32,
    CudnnBenchmark,
    ResidualInFp32,
    FusedAddNorm,
    FusedScan,
    FusedConv,
    FusedSwiglu,
    FusedRope,
    AttentionBackend,
    Weights,
    CheckpointBlocks,
    Compile,
    DataParallel,
    FusedAdamW,
    OffloadOptimizer,
    Precision,
    OffloadActivations,
    EmptyCacheAtEval,
    CudaGraph,
)

FAILED_ELSEWHERE = "another process failed in warm-up; its message says why"
SAME_BYTES = (
    "off here: it chooses algorithms by their time, and resumed work must end with the same bytes"
)


Kind = TypeVar("Kind", bound=Technique)


class AccelerationStack:
    """Applies the requested techniques and finds which of them are really on.

    `values` maps each technique's key to its requested value.

    `on_unavailable` decides about techniques that this machine cannot run: "degrade" switches them
    off and names them in the ledger; "error" raises a UserError that lists them all; "emulate"
    does the same as "degrade", except that techniques on a CPU stay on if their value is in
    `Precision.emulated`.

    If `same_bytes` is not empty, nondeterministic techniques and cuDNN's nondeterministic
    algorithms stay off, and the ledger shows the text of `same_bytes` as the reason. `only`
    restricts the stack to the techniques with these keys, for work without a training step, such as
    sampling. `extra_rows` are techniques that no runtime key switches, but that have a row in the
    ledger.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        device: torch.device,
        *,
        on_unavailable: str = "degrade",
        deterministic: bool = False,
        only: Collection[str] | None = None,
        extra_rows: Collection[Technique] = (),
        same_bytes: str = "",
    ) -> None:
        self.reasons: dict[str, str] = {}
        self.busy_ms: float | None = None
        """Sum of the times of all GPU kernels in the profiled step of warm-up, in milliseconds;
        None without a GPU, or before warm-up."""
        self.strict = on_unavailable == "error"
        self.device = device
        self.deterministic = deterministic
        self.same_bytes = same_bytes
        switched = [
            kind(values[kind.key], device, **{name: values[name] for name in kind.options})
            for kind in TECHNIQUES
            if only is None or kind.key in only
        ]
        self.techniques: list[Technique] = [*extra_rows, *switched]
        self.requested = self.values
        if only is None:
            self.warn_of_idle_options(values)

        # Collect the reasons for all techniques that this machine cannot run, so that one message
        # lists them.
        refused = []
        for technique in (technique for technique in switched if technique.enabled):
            reason = self.find_obstacle(technique)
            if same_bytes and technique.nondeterministic:
                reason = same_bytes
            elif reason and technique.value != AUTO:
                refused.append(f"runtime.{technique.key}={technique.value} ({reason.rstrip('.')})")
            elif not reason and deterministic and technique.nondeterministic:
                reason = "switched off by deterministic=true"
            emulates = on_unavailable == "emulate" and device.type == "cpu"
            emulable = isinstance(technique, Precision) and technique.value in technique.emulated
            if reason and emulates and emulable:
                self.reasons[technique.key] = f"emulated: {reason}"
            elif reason:
                self.reasons[technique.key] = reason
                technique.value = technique.off
        self.refuse(refused)

    def warn_of_idle_options(self, values: Mapping[str, Any]) -> None:
        """Warns of each option in `values` that is not its default and that its technique does not
        read; not if the technique chose its value itself, because `auto` was requested."""
        for technique in self.techniques:
            if technique.uses_options or values.get(technique.key) == AUTO:
                continue
            for name, default in technique.options.items():
                if values[name] != default:
                    warnings.warn(
                        f"{technique.make_override(values[name], name)} has no effect with "
                        f"{technique.make_override(technique.value)}; change one of them.",
                        stacklevel=3,
                    )

    def find_obstacle(self, technique: Technique) -> str | None:
        """Returns a sentence that says why this machine cannot run a technique; None if it can."""
        return technique.find_obstacle()

    def refuse(self, refused: list[str]) -> None:
        """Under on_unavailable=error raises a UserError that lists `refused`, the techniques that
        this machine cannot run, each with its reason; otherwise does nothing."""
        if refused and self.strict:
            raise UserError(
                f"runtime.on_unavailable=error, and this machine cannot run {', '.join(refused)}. "
                "Switch them off, or set runtime.on_unavailable=degrade."
            )

    @property
    def values(self) -> dict[str, bool | str]:
        """Key of a technique -> its value: the requested one, or the technique's `off` if it was
        switched off, for example because the machine cannot run it."""
        return {technique.key: technique.value for technique in self.techniques}

    def list_launch_savers(self) -> list[str]:
        """Returns overrides, such as runtime.compile=true, that switch on techniques that reduce
        the host's work of launching kernels; only those that are off now and can run on this
        device."""
        return [
            t.make_override(True)
            for t in self.techniques
            if t.saves_launches and not t.enabled and not type(t)(True, self.device).find_obstacle()
        ]

    @property
    def precision(self) -> str:
        """Short name of the dtype for matrix products, such as "bf16", after techniques that the
        machine cannot run were switched off."""
        return str(self.values.get(Precision.key, Precision.off))

    def find(self, kind: type[Kind]) -> Kind | None:
        """Returns the technique of the class `kind`; None if the stack has none."""
        return next((t for t in self.techniques if isinstance(t, kind)), None)

    def describe_arithmetic(self) -> dict[str, bool | str]:
        """Returns a mapping: runtime key that decides how matrix products round -> the key's
        value."""
        techniques = (self.find(Precision), self.find(Tf32))
        return dict(item for t in techniques if t for item in t.settings.items())

    @property
    def hides_blocks(self) -> bool:
        """Whether the whole model is compiled, so that no probe sees its blocks."""
        compiler = self.find(Compile)
        return compiler is not None and compiler.hides_blocks

    def list_savings(self) -> list[str]:
        """Returns changes of runtime keys that save memory (`Planning.savings`) and that this
        device can run, as overrides, the cheapest first."""
        found = []
        for technique in self.techniques:
            for saving in technique.planning.savings:
                value = next(iter(saving.values.values()))
                new = type(technique)(value, self.device)
                if value != technique.value and not new.find_obstacle():
                    words = (f"runtime.{k}={v}" for k, v in saving.values.items())
                    found.append((saving.rank, " ".join(words).lower()))
        return [words for _, words in sorted(found)]

    def explain_separate_training(self) -> str | None:
        """Returns a sentence that says why each process trains a model of its own, without
        exchanging gradients; None if the processes train one model together, or if there is only
        one process."""
        if get_world_size() == 1 or self.values[DataParallel.key] != DataParallel.off:
            return None
        alone = "Each would train a model of its own; use auto, or start one process."
        return self.reasons.get(DataParallel.key, alone)

    def autocast(self) -> AbstractContextManager[object]:
        """Returns the autocast context for a forward pass; if the stack has no `Precision`, a
        context that does nothing."""
        precision = self.find(Precision)
        return precision.autocast() if precision else nullcontext()

    def on_process(self) -> None:
        for technique in self.techniques:
            technique.on_process()
        if self.same_bytes:
            torch.backends.cudnn.deterministic = True

    def on_model(self, model: Model) -> Model:
        if precision := self.find(Precision):
            precision.on_layers(model)
        for technique in self.techniques:
            model = technique.on_model(model)
        return model

    def make_optimizer_kwargs(self) -> dict[str, Any]:
        return dict(pair for t in self.techniques for pair in t.make_optimizer_kwargs().items())

    def on_optimizer(self, make: MakeOptimizer) -> MakeOptimizer:
        """Wraps `make`, the function that builds the optimizer, by `on_optimizer` of each
        technique: first by the last technique, so that the first one is outermost."""
        for technique in reversed(self.techniques):
            make = technique.on_optimizer(make)
        return make

    def on_step(self, step: AnyStep) -> AnyStep:
        for technique in self.techniques:
            step = technique.on_step(step)
        return step

    @contextmanager
    def surround_evaluation(self) -> Iterator[None]:
        """Opens the contexts of all techniques around evaluation or sampling in the middle of
        training."""
        with ExitStack() as contexts:
            for technique in self.techniques:
                contexts.enter_context(technique.surround_evaluation())
            yield

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns a mapping: key of a technique -> the technique's state dict, for the techniques
        that have a state: precision, whose loss scaler has one."""
        precision = self.find(Precision)
        state = precision.state_dict() if precision else {}
        return {Precision.key: state} if state else {}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Loads the techniques' state dicts in place. A technique that was off when they were saved
        keeps its present state."""
        for key, state in self.state_dict().items():
            for name, tensor in state.items() if key in states else ():
                tensor.copy_(states[key][name])

    def run_until_it_works(self, run: Callable[[], object]) -> None:
        """Calls `run` until it raises no error: after each failure the technique that caused it
        switches itself off.

        Raises the failure if no technique caused it, or under `on_unavailable="error"`. If one rank
        fails, all ranks switch a technique off, because all must run the same code.
        """
        while True:
            failure: Exception | None = None
            try:
                run()
            except Exception as error:
                failure = error
            if not is_true_on_any_rank(failure is not None, self.device):
                return

            failure = failure or RuntimeError(FAILED_ELSEWHERE)
            sentences = (t.recover(failure) for t in reversed(self.techniques))
            sentence = next(filter(None, sentences), None)
            if sentence is None or self.strict:
                raise failure
            warnings.warn(sentence, stacklevel=3)

    def warm_up(
        self, run: Callable[[], object], blocks: nn.ModuleList | None = None, step: Any = None
    ) -> Ledger:
        """Calls `run` (a whole training step, or the encoding of a batch) until it works, profiles
        one more call, and returns the ledger of what was on. `step` is the training step of which
        `run` takes one, if it does.

        `run` changes parameters and optimizer: the caller restores them afterwards, in place,
        because techniques may hold the tensors.
        """
        with watch_updates(step) as first:
            self.run_until_it_works(run)
        evidence = observe_step(run, blocks, self.device, self.hides_blocks)
        self.busy_ms = evidence.busy_ms
        with watch_updates(step) as evidence.updates:
            evidence.updates += first
            if step:
                run()
            for technique in self.techniques:
                technique.compare(run, evidence)
        if any([technique.on_warm() for technique in self.techniques]):
            self.run_until_it_works(run)
            evidence.warm_ops = observe_step(run, None, self.device).ops

        ledger = Ledger()
        for technique in self.techniques:
            active, note = technique.observe(evidence)
            reason = self.reasons.get(technique.key)
            if reason:
                note = f"{reason.rstrip('.')}; {note}"
            ledger.append(LedgerRow(technique.key, self.requested[technique.key], active, note))

        # A row may be missing without a reason, because the machine can run the technique but the
        # step did not use it. Under on_unavailable=error this ends the run too.
        missing = [row for row in ledger if row.missing and row.key not in self.reasons]
        if missing and self.strict:
            shown = ", ".join(f"runtime.{row.key} ({row.evidence})" for row in missing)
            raise UserError(
                f"runtime.on_unavailable=error, and one step shows that these are not on: {shown}."
            )
        return ledger
