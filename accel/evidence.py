"""Collects evidence from one real step: calls of each block, compiled graphs, bytes saved for the
backward pass, and events of PyTorch's profiler (operations of the host, matrix products, GPU
kernels)."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accel.saved_tensors import count_saved
from accel.update_probe import LEFT_ALONE, Update

CPU = torch.device("cpu")
EIGHT_BIT = "aten::_scaled_mm"
WEIGHT_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::convolution",
    "aten::convolution_backward",
    EIGHT_BIT,
)
"""Names, in the profiler, of the operations that multiply by a weight or compute a weight's
gradient. In a layer that runs under autocast, autocast chooses their dtype."""
ACTIVATION_PRODUCTS = ("aten::bmm", "aten::baddbmm")
"""Names, in the profiler, of batched matrix products, usually of two activations
(accel/techniques/precision.py finds those that multiply by a weight). Autocast casts the inputs of
these products to 16 bits too, so such a product runs in fp32 only if the layer switches autocast
off on purpose."""
PRODUCTS = WEIGHT_PRODUCTS + ACTIVATION_PRODUCTS
UPDATE_PREFIX = "Optimizer.step#"
"""Prefix of the profiler's name for an optimizer's step; the name of the optimizer's class
follows."""
REGION_PREFIX = "Torch-Compiled Region"
"""Prefix of the profiler's name for a call of a compiled function."""
FLEX_NAME = "fastlatent flex"
"""Name under which accel/kernels/attention/attend.py shows its calls of FlexAttention outside
compiled code to the profiler. FlexAttention is compiled even if the model is not, so such a call is
no sign of a compiled model."""
BLOCK_PREFIX = "fastlatent block"
"""Prefix of the profiler's name for a call of a block by its `BlockProbe`; the block's index
follows."""
NO_KERNEL_SEEN = (
    "the profiler saw no kernel of this GPU, so this cannot be known (another profiler, the "
    "driver, or no permission to read the GPU's counters)"
)
FINE_BITS = 0x1FFF
"""Mask of the 13 lowest bits of an fp32 mantissa, which neither bf16 nor fp16 has."""


@dataclass
class BlockEvidence:
    """Measurements of one call of a block."""

    input_bytes: int
    saved_bytes: int
    """Bytes that the call saved for the backward pass, with the caches of selective checkpointing,
    without parameters or buffers. Each storage counts once; of a block input that is a view, only
    the view's bytes count."""
    residual_dtype: torch.dtype
    """Dtype of the residual stream that the block returned."""
    branch_dtype: torch.dtype
    fine_bits: tuple[bool, bool]
    """(before the block, after the block): whether the residual stream is fp32 and has bits that no
    16-bit format has. Such bits show that the stream was not rounded to 16 bits."""
    cached_ops: frozenset[str]
    """Names of the operations whose results selective checkpointing keeps in its caches."""
    ops: Counter[str] = field(default_factory=Counter)
    """Profiler event name -> number of such events that began on the host during the call."""
    sends_back: bool = True
    """Whether the backward pass sends a gradient through the call to the block's inputs."""
    unmoved_bytes: int = 0
    """Bytes of saved tensors that stay on the device although they are large enough to be moved to
    the host."""

    @property
    def trains(self) -> bool:
        """Whether a backward pass follows the call: the call saved tensors for a backward pass."""
        return self.saved_bytes > 0

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes the block again. The block then saves only its inputs
        and the state of the random generator; a block that is not recomputed saves several times as
        many bytes."""
        return self.saved_bytes < 1.5 * self.input_bytes


@dataclass
class Evidence:
    """Measurements of one step, filled in by `observe_step`; no field is copied from the
    configuration."""

    ops: Counter[str] = field(default_factory=Counter)
    """Name of a profiler event (an operation on the host or, on a GPU, a kernel) -> how often it
    ran."""
    products: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(operation's name, dtype) -> number of such matrix products or convolutions; if one runs
    inside another, only one of them is counted (`count_products`)."""
    compiled_calls: int = 0
    """Number of calls of compiled functions, except those inside an optimizer's step or
    FlexAttention: both compile code even if the model is not compiled."""
    graphs: int = 0
    graph_breaks: int = 0
    blocks: list[list[BlockEvidence]] = field(default_factory=list)
    """For each block the evidence of its calls, one call per micro-batch."""
    busy_ms: float | None = None
    """Sum of the times of all GPU kernels in the step, in milliseconds; None without a GPU, or if
    the profiler recorded no kernel."""
    kernels_unseen: bool = False
    """Whether the step ran on a GPU and the profiler recorded no kernel at all. The ledger then
    shows a technique whose only evidence is a kernel as `UNSEEN`, not as off."""
    blocks_uncompiled: bool = False
    """Whether `blocks` was measured in an uncompiled step, because the model is compiled as a whole
    and a probe cannot see its blocks."""
    warm_ops: Counter[str] = field(default_factory=Counter)
    """Profiler event name -> how often it ran in a step after the end of warm-up
    (`Technique.on_warm`)."""
    updates: list[Update] = field(default_factory=list)
    """Each training step of warm-up, but the profiled one, adds here what it did to the
    parameters."""

    @property
    def left_alone(self) -> int:
        """Number of parameters that got a gradient in the latest step and did not move; 0 if the
        step was skipped."""
        taken = [update for update in self.updates[-1:] if update.taken]
        return sum(bool(fate == LEFT_ALONE) for update in taken for fate in update.fates.values())

    @property
    def block_calls(self) -> list[BlockEvidence]:
        """The evidence of all calls of all blocks."""
        return [call for calls in self.blocks for call in calls]

    def count_dtypes(self, ops: Iterable[str] = PRODUCTS) -> Counter[str]:
        """Counts the matrix products and convolutions of each dtype, among the operations whose
        names are in `ops`. Returns a mapping: the profiler's name of a dtype -> number."""
        total: Counter[str] = Counter()
        for (op, dtype), n in self.products.items():
            if op in ops:
                total[dtype] += n
        return total

    def uses(self, ops: tuple[str, ...]) -> bool:
        """Returns whether the results of operations whose names start with one of `ops` were used:
        whether the backward pass went through such operations for each call of a block that ran one
        and sends a gradient back. It passes by a result that was thrown away."""
        backward = sum(n for op, n in self.ops.items() if op.startswith(ops) and "backward" in op)
        calls = [call for call in self.block_calls if call.trains and call.sends_back]
        return backward >= sum(any(op.startswith(ops) for op in call.ops) for call in calls)

    def check_blocks(self, holds: Callable[[BlockEvidence], bool]) -> list[bool]:
        """Returns for each block whether `holds` returns True for all calls of the block; False for
        a block without calls."""
        return [bool(calls) and all(holds(call) for call in calls) for calls in self.blocks]

    def format_share(self, blocks: list[bool]) -> str:
        """Formats how many entries of `blocks` are True, such as "23 of 24 blocks"."""
        uncompiled = " (in an uncompiled step)" * self.blocks_uncompiled
        return f"{sum(blocks)} of {len(blocks)} blocks{uncompiled}"


class BlockProbe(nn.Module):
    """Stands in for a block during one step: runs it, and appends a record of each call to `notes`
    (bytes of inputs, saved bytes, dtypes).

    The probe relies on the interface of blocks, `(branch, gate, residual, cond) -> (branch, gate,
    residual)`, and uses no hook, because `torch.compile` ignores or traces hooks.
    """

    def __init__(self, block: nn.Module, notes: list[BlockEvidence], index: int = 0) -> None:
        super().__init__()
        self.block = block
        self.notes = notes
        self.index = index

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Forward unknown attributes to the block, because the model reads attributes of its
            # blocks.
            return getattr(self.block, name)

    def forward(self, *inputs: Tensor, **options: Any) -> Any:
        input_bytes: Counter[int] = Counter()
        for tensor in inputs:
            input_bytes[tensor.untyped_storage()._cdata] += tensor.nbytes
        with (
            torch.profiler.record_function(f"{BLOCK_PREFIX} {self.index}"),
            count_saved(self.block, input_bytes) as saved,
        ):
            outputs = self.block(*inputs, **options)

        note = BlockEvidence(
            input_bytes=input_bytes.total(),
            saved_bytes=sum(saved.storages.values()),
            residual_dtype=outputs[2].dtype,
            branch_dtype=outputs[0].dtype,
            fine_bits=(has_fine_bits(inputs[2]), has_fine_bits(outputs[2])),
            cached_ops=frozenset(saved.cached_ops),
            unmoved_bytes=sum(saved.large_unmoved.values()),
            sends_back=torch.is_grad_enabled() and any(t.requires_grad for t in inputs),
        )
        self.notes.append(note)
        return outputs


def has_fine_bits(tensor: Tensor) -> bool:
    """Returns whether a tensor is fp32 and has bits that 16-bit formats lack. The host waits for
    the device."""
    return tensor.dtype == torch.float32 and bool(
        (tensor.detach().view(torch.int32) & FINE_BITS).any()
    )


@contextmanager
def probe_blocks(blocks: nn.ModuleList, notes: list[list[BlockEvidence]]) -> Iterator[None]:
    """Inside the context, a `BlockProbe` replaces each block and appends the evidence of each call
    to the block's list in `notes`."""
    originals = list(blocks)
    notes[:] = [[] for _ in originals]
    try:
        for i, block in enumerate(originals):
            blocks[i] = BlockProbe(block, notes[i], i)
        yield
    finally:
        for i, block in enumerate(originals):
            blocks[i] = block


def assign_ops(blocks: list[list[BlockEvidence]], events: list[Any]) -> None:
    """Sets `ops` in the evidence of each call of a block: counts the host's `events` that began
    during the call."""
    calls = [event for event in events if event.name().startswith(BLOCK_PREFIX)]
    starts = [call.start_ns() for call in calls]
    waiting = [iter(notes) for notes in blocks]
    notes = [next(waiting[int(call.name().removeprefix(BLOCK_PREFIX))]) for call in calls]
    for event in events:
        i = bisect_right(starts, event.start_ns()) - 1
        if i >= 0 and event is not calls[i] and contains(calls[i], event):
            notes[i].ops[event.name()] += 1


def record_events(run: Callable[[], object], device: torch.device) -> list[Any]:
    """Profiles one call of `run`; returns the raw events of the host and of `device`.

    The function leaves the events raw, because torch.profiler takes several times as long as a
    small step to parse events into its own classes.
    """
    use_device = "cuda" if device.type == "cuda" else None
    # Set use_kineto: without this argument the profiler records no kernels, and raises no error
    # either.
    profiler = torch.autograd.profiler.profile(
        use_device=use_device, use_kineto=True, record_shapes=True
    )
    with profiler:
        run()
    assert profiler.kineto_results is not None
    return list(profiler.kineto_results.events())


def select_kernels(events: Iterable[Any]) -> list[Any]:
    """Selects the events of the device: kernels, copies and fills.

    Leaves out annotations such as `record_function`: the profiler repeats them on the device,
    around the kernels that they annotate.
    """
    return [
        event
        for event in events
        if event.device_type() != torch.autograd.DeviceType.CPU and not event.is_user_annotation()
    ]


def select_host_events(events: Iterable[Any]) -> list[Any]:
    """Selects the events of the host, and sorts them by thread and start time, so that an event
    stands before the events that run inside it."""
    events = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    return sorted(
        events, key=lambda event: (event.start_thread_id(), event.start_ns(), -event.duration_ns())
    )


def count_products(events: list[Any]) -> Counter[tuple[str, str]]:
    """Counts the matrix products and convolutions among the host's events by (op name, dtype).

    If a product contains another one, only one of them counts: the inner one if both have the same
    name (a dispatch mode or autocast enters an operation twice), otherwise the outer one. But an
    8-bit product always counts instead of the product around it. Products of the optimizer, such as
    Muon's, do not count: they say nothing about the step's precision. The dtype of a product is
    that of its second argument, which is never a bias.
    """
    updates = [event for event in events if event.name().startswith(UPDATE_PREFIX)]
    # An entry is [event, whether it counts]. `around` holds the entries of those events that
    # contain the present event.
    around: list[list[Any]] = []
    entries: list[list[Any]] = []
    for event in events:
        name = event.name()
        if name not in PRODUCTS or len(event.dtypes()) < 2:
            continue
        if any(contains(update, event) for update in updates):
            continue
        while around and not contains(around[-1][0], event):
            around.pop()

        outer_names = {outer.name() for outer, _ in around}
        replaces_outer = name == EIGHT_BIT and EIGHT_BIT not in outer_names
        counts = not outer_names - {name} or replaces_outer
        if counts:
            for outer in around:
                outer[1] = False
        around.append([event, counts])
        entries.append(around[-1])
    return Counter(
        (event.name(), event.dtypes()[1].removeprefix("c10::"))
        for event, counts in entries
        if counts
    )


def contains(outer: Any, event: Any) -> bool:
    """Returns whether `event` ran during `outer`, in the same thread."""
    if outer.start_thread_id() != event.start_thread_id() or event.start_ns() < outer.start_ns():
        return False
    return event.start_ns() + event.duration_ns() <= outer.start_ns() + outer.duration_ns()


def observe_step(
    run: Callable[[], object],
    blocks: nn.ModuleList | None,
    device: torch.device = CPU,
    hidden: bool = False,
) -> Evidence:
    """Profiles one call of `run`, probes the blocks, and returns the evidence.

    `hidden`: the model is compiled as a whole, so no probe can see its blocks; they are probed in a
    second step, which runs uncompiled. The fields `graphs` and `graph_breaks` count all compilation
    since Dynamo's counters were last cleared, also compilation before this call.
    """
    evidence = Evidence(blocks_uncompiled=hidden)
    with probe_blocks(blocks, evidence.blocks) if blocks and not hidden else nullcontext():
        events = record_events(run, device)
    host = select_host_events(events)
    kernels = select_kernels(events)
    evidence.ops.update(event.name() for event in (*host, *kernels))
    evidence.products = count_products(host)
    # Calls of compiled functions inside an optimizer's step or FlexAttention do not count.
    others = [event for event in host if event.name().startswith((UPDATE_PREFIX, FLEX_NAME))]
    evidence.compiled_calls = sum(
        event.name().startswith(REGION_PREFIX) and not any(contains(x, event) for x in others)
        for event in host
    )
    evidence.kernels_unseen = device.type == "cuda" and not kernels
    if kernels:
        evidence.busy_ms = sum(kernel.duration_ns() for kernel in kernels) / 1e6
    evidence.graphs = count_graphs()
    evidence.graph_breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    if blocks and hidden:
        with torch.compiler.set_stance("force_eager"), probe_blocks(blocks, evidence.blocks):
            host = select_host_events(record_events(run, device))
    assign_ops(evidence.blocks, host)
    return evidence


def observe_kernels(run: Callable[[], object], device: torch.device) -> set[str]:
    """Returns the names of the kernels in one call of `run`, without copies and fills."""
    names = {kernel.name() for kernel in select_kernels(record_events(run, device))}
    return {name for name in names if not name.startswith(("Memcpy", "Memset"))}


def count_graphs() -> int:
    """Counts the graphs that this process has compiled since Dynamo's counters were last
    cleared."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def explain_last_graph() -> str:
    """Returns the reason why Dynamo compiled the newest graph: the first guard that failed, or a
    phrase which says that the code had not run before."""
    metrics = torch._dynamo.utils.get_compilation_metrics()
    reason = metrics[-1].recompile_reason if metrics else None
    return (reason or "code that had not run before").strip().splitlines()[0]
