"""Evidence from one real step: what each block did, graphs, kept bytes, and what PyTorch's profiler
records: operations of the host in order, matrix products, kernels of the GPU."""

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

CPU = torch.device("cpu")
EIGHT_BIT = "aten::_scaled_mm"
WEIGHT_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::convolution",
    "aten::convolution_backward",
    EIGHT_BIT,
)
"""Products of a weight, or of its gradient: autocast decides about their dtype."""
ACTIVATION_PRODUCTS = ("aten::bmm", "aten::baddbmm")
"""Batched, so products of two activations as a rule; accel/techniques/precision.py finds those of a
weight. One in fp32 under autocast is meant to be: only a layer that switches autocast off gets
it."""
PRODUCTS = WEIGHT_PRODUCTS + ACTIVATION_PRODUCTS
UPDATE = "Optimizer.step#"
"""PyTorch begins the name of an optimizer's step with this; the class follows."""
REGION = "Torch-Compiled Region"
"""PyTorch begins the name of each call of a compiled function with this."""
FLEX = "fastlatent flex"
"""`accel.kernels.attend.attend_by_flex` gives this name to its calls of FlexAttention, which
compiles itself."""
BLOCK = "fastlatent block"
"""What the profiler calls a call of a probed block, before the block's index."""
NO_KERNEL_SEEN = (
    "the profiler saw no kernel of this GPU, so this cannot be known (another profiler, the "
    "driver, or no permission to read the GPU's counters)"
)
FINE_BITS = 0x1FFF
"""The 13 bits of an fp32 mantissa that neither bf16 nor fp16 has."""


@dataclass
class BlockEvidence:
    """What one call of a block did."""

    input_bytes: int
    saved_bytes: int
    """Storages kept for the backward pass, each once, and caches of selective checkpointing;
    parameters and buffers left out. Of a view that came in, its own bytes."""
    residual_dtype: torch.dtype
    """Of the residual stream as the block returned it."""
    branch_dtype: torch.dtype
    fine_bits: tuple[bool, bool]
    """Whether the residual that came in, and the one that went out, had bits that no 16-bit format
    has."""
    cached: frozenset[str]
    """Names of the operations whose results lie in a cache of selective checkpointing."""
    ops: Counter[str] = field(default_factory=Counter)
    """Profiler event name -> how often it began on the host during the call."""
    left: int = 0
    """Saved bytes of tensors that stay on the device, though they would be worth a move."""

    @property
    def trains(self) -> bool:
        """Whether a backward pass comes: something was kept for it."""
        return self.saved_bytes > 0

    @property
    def recomputes(self) -> bool:
        """One that recomputes keeps its inputs and a generator's state; one that does not, several
        times that."""
        return self.saved_bytes < 1.5 * self.input_bytes


@dataclass
class Evidence:
    """Filled by `observe_step`; every field is a measurement, none a setting."""

    ops: Counter[str] = field(default_factory=Counter)
    """Profiler event name -> how often it ran (CPU ops and, on a GPU, kernels)."""
    products: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(Op name, dtype) -> number of matrix products, convolutions included; nested events count
    once."""
    compiled_calls: int = 0
    """Calls of compiled functions, without those with which an optimizer or FlexAttention compiles
    itself."""
    graphs: int = 0
    graph_breaks: int = 0
    blocks: list[list[BlockEvidence]] = field(default_factory=list)
    """Of every block its calls, one for each micro-batch."""
    busy_ms: float | None = None
    """Milliseconds that the device worked; None without a GPU, and where the profiler saw no
    kernel."""
    kernels_unseen: bool = False
    """True if the step ran on a GPU and the profiler recorded none of its kernels. Then a missing
    kernel shows
    nothing: the techniques whose kernels are their only evidence are `UNSEEN`, not off."""
    blocks_uncompiled: bool = False
    """True if the blocks were seen in an uncompiled step, because the compiled one has no blocks to
    look at."""
    warm_ops: Counter[str] = field(default_factory=Counter)
    """Like `ops`, in the step as it runs after `Technique.on_warm`."""

    def count_dtypes(self, ops: Iterable[str] = PRODUCTS) -> Counter[str]:
        """Dtype -> number of products of these kinds that ran in it."""
        total: Counter[str] = Counter()
        for (op, dtype), n in self.products.items():
            if op in ops:
                total[dtype] += n
        return total

    def check_blocks(self, holds: Callable[[BlockEvidence], bool]) -> list[bool]:
        """For each block, whether `holds` in all of its calls; a block that was not called has not
        shown it."""
        return [bool(calls) and all(holds(call) for call in calls) for calls in self.blocks]

    def format_share(self, found: list[bool]) -> str:
        """Says of how many blocks something holds, such as "23 of 24 blocks"."""
        uncompiled = " (in an uncompiled step)" * self.blocks_uncompiled
        return f"{sum(found)} of {len(found)} blocks{uncompiled}"


class BlockProbe(nn.Module):
    """Stands in for a block during one step and notes what passes through it and what it keeps for
    backward.

    It goes by the block contract, `(branch, gate, residual, cond) -> (branch, gate, residual)`, so
    it needs no hook, which `torch.compile` would either ignore or trace.
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
            return getattr(self.block, name)  # switches that the model reads

    def forward(self, *inputs: Tensor) -> Any:
        given: Counter[int] = Counter()
        for tensor in inputs:
            given[tensor.untyped_storage()._cdata] += tensor.nbytes
        with (
            torch.profiler.record_function(f"{BLOCK} {self.index}"),
            count_saved(self.block, given) as kept,
        ):
            outputs = self.block(*inputs)
        note = BlockEvidence(
            input_bytes=given.total(),
            saved_bytes=kept.bytes,
            residual_dtype=outputs[2].dtype,
            branch_dtype=outputs[0].dtype,
            fine_bits=(has_fine_bits(inputs[2]), has_fine_bits(outputs[2])),
            cached=frozenset(kept.cached_ops),
            left=sum(kept.large_unmoved.values()),
        )
        self.notes.append(note)
        return outputs


def has_fine_bits(tensor: Tensor) -> bool:
    """True for an fp32 tensor that has not been rounded to 16 bits. Waits for the device."""
    return tensor.dtype == torch.float32 and bool(
        (tensor.detach().view(torch.int32) & FINE_BITS).any()
    )


@contextmanager
def probe_blocks(blocks: nn.ModuleList, notes: list[list[BlockEvidence]]) -> Iterator[None]:
    """Every block writes to its own list in `notes` inside."""
    own = list(blocks)
    notes[:] = [[] for _ in own]
    try:
        for i, block in enumerate(own):
            blocks[i] = BlockProbe(block, notes[i], i)
        yield
    finally:
        for i, block in enumerate(own):
            blocks[i] = block


def assign_ops(blocks: list[list[BlockEvidence]], events: list[Any]) -> None:
    """Gives each call of a block the host's events that began during it."""
    calls = [event for event in events if event.name().startswith(BLOCK)]
    starts = [call.start_ns() for call in calls]
    waiting = [iter(notes) for notes in blocks]
    notes = [next(waiting[int(call.name().removeprefix(BLOCK))]) for call in calls]
    for event in events:
        i = bisect_right(starts, event.start_ns()) - 1
        if i >= 0 and event is not calls[i] and contains(calls[i], event):
            notes[i].ops[event.name()] += 1


def record_events(run: Callable[[], object], device: torch.device) -> list[Any]:
    """The profiler's events of one call of `run`, those of the host and those of `device`, as
    recorded.

    torch.profiler would parse them into its own classes, which takes several times as long as a
    small step.
    """
    use_device = "cuda" if device.type == "cuda" else None
    # Without use_kineto this class asks no GPU for its kernels, and says nothing about it.
    profiler = torch.autograd.profiler.profile(
        use_device=use_device, use_kineto=True, record_shapes=True
    )
    with profiler:
        run()  # the profiler waits for the device at its end
    assert profiler.kineto_results is not None
    return list(profiler.kineto_results.events())


def select_kernels(events: Iterable[Any]) -> list[Any]:
    """Returns the events of the device: kernels, copies and fills.

    The profiler also repeats the host's annotations on the device, around their kernels; these are
    left out.
    """
    device = (event for event in events if event.device_type() != torch.autograd.DeviceType.CPU)
    return [event for event in device if not event.is_user_annotation()]


def select_host_events(events: Iterable[Any]) -> list[Any]:
    """Events of the host in the order in which they began, an outer one before those in it."""
    found = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    return sorted(
        found, key=lambda event: (event.start_thread_id(), event.start_ns(), -event.duration_ns())
    )


def count_products(events: list[Any]) -> Counter[tuple[str, str]]:
    """(Op name, dtype) -> number of products among the host's events.

    Of an op inside one of the same name (a dispatch mode or autocast enters it twice) the inner one
    counts; one inside another product is a part of that. But an 8-bit product is what the one
    around it has become, and counts in its place. Those of the optimizer, such as Muon's, are none
    of the step's precision. The dtype is that of the second tensor argument, which is never a bias.
    """
    updates = [event for event in events if event.name().startswith(UPDATE)]
    open_ones: list[list[Any]] = []  # [event, whether it counts], those around the present one
    found: list[list[Any]] = []
    for event in events:
        if event.name() not in PRODUCTS or len(event.dtypes()) < 2:
            continue
        if any(contains(update, event) for update in updates):
            continue
        while open_ones and not contains(open_ones[-1][0], event):
            open_ones.pop()
        name = event.name()
        within = {outer.name() for outer, _ in open_ones}
        entry = [event, not within - {name} or (name == EIGHT_BIT and EIGHT_BIT not in within)]
        if entry[1]:
            for outer in open_ones:
                outer[1] = False
        open_ones.append(entry)
        found.append(entry)
    return Counter(
        (event.name(), event.dtypes()[1].removeprefix("c10::"))
        for event, counts in found
        if counts
    )


def contains(outer: Any, event: Any) -> bool:
    """Returns whether `event` ran within `outer`, in the same thread."""
    if outer.start_thread_id() != event.start_thread_id() or event.start_ns() < outer.start_ns():
        return False
    return event.start_ns() + event.duration_ns() <= outer.start_ns() + outer.duration_ns()


def observe_step(
    run: Callable[[], object],
    blocks: nn.ModuleList | None,
    device: torch.device = CPU,
    hidden: bool = False,
) -> Evidence:
    """Calls `run` once under the profiler, with all blocks probed if there are any, and returns the
    evidence.

    `hidden` blocks, inside a model compiled as a whole, are probed in one more step that runs
    uncompiled. Compile
    before: graphs are counted since dynamo's counters were last cleared.
    """
    evidence = Evidence(blocks_uncompiled=hidden)
    with probe_blocks(blocks, evidence.blocks) if blocks and not hidden else nullcontext():
        events = record_events(run, device)
    host = select_host_events(events)
    kernels = select_kernels(events)
    evidence.ops.update(event.name() for event in (*host, *kernels))
    evidence.products = count_products(host)
    evidence.compiled_calls = count_compiled_calls(host)
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


def observe_ops(run: Callable[[], object], device: torch.device = CPU) -> Counter[str]:
    """Profiler event name -> how often it ran in one call of `run`."""
    events = record_events(run, device)
    return Counter(event.name() for event in (*select_host_events(events), *select_kernels(events)))


def observe_kernels(run: Callable[[], object], device: torch.device) -> set[str]:
    """Names of the device's kernels in one call of `run`; copies and fills left out."""
    names = {kernel.name() for kernel in select_kernels(record_events(run, device))}
    return {name for name in names if not name.startswith(("Memcpy", "Memset"))}


def count_compiled_calls(host: list[Any]) -> int:
    """Calls of compiled functions among the host's events; those inside an optimizer's step or
    FlexAttention not."""
    others = [event for event in host if event.name().startswith((UPDATE, FLEX))]
    regions = [event for event in host if event.name().startswith(REGION)]
    return sum(not any(contains(other, region) for other in others) for region in regions)


def count_graphs() -> int:
    """Graphs that this process has compiled since dynamo's counters were last cleared."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def explain_last_graph() -> str:
    """Why the newest graph was compiled: the first guard that failed, or that its code was new."""
    found = torch._dynamo.utils.get_compilation_metrics()
    reason = found[-1].recompile_reason if found else None
    return (reason or "code that had not run before").strip().splitlines()[0]
