"""Evidence from one real step: the ops that ran, their dtypes, graphs, and the bytes that blocks kept for backward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

MATMUL_OPS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")


@dataclass
class BlockEvidence:
    """What one block did in one step."""

    input_bytes: int
    saved_bytes: int
    """Kept for the backward pass, parameters and buffers left out."""
    residual_dtype: torch.dtype
    """Of the residual stream as the block returned it."""


@dataclass
class Evidence:
    """Filled by `observe_step`; every field is a measurement, none a setting."""

    ops: Counter[str] = field(default_factory=Counter)
    """Profiler event name -> how often it ran (CPU ops and, on a GPU, kernels)."""
    op_dtypes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Op name -> dtype of its second tensor argument, the one that is never a bias -> how often."""
    graphs: int = 0
    graph_breaks: int = 0
    blocks: list[BlockEvidence] = field(default_factory=list)
    """The last two blocks, in order."""
    blocks_uncompiled: bool = False
    """True if the blocks were seen in an uncompiled step, because the compiled one has no blocks to look at."""
    warm_ops: Counter[str] = field(default_factory=Counter)
    """Like `ops`, in the step as it runs after `Technique.on_warm`."""

    def matmul_dtypes(self) -> Counter[str]:
        """Dtype -> number of matrix products (convolutions included) that ran in it."""
        total: Counter[str] = Counter()
        for op in MATMUL_OPS:
            total.update(self.op_dtypes.get(op, {}))
        return total


class BlockProbe(nn.Module):
    """Stands in for a block during one step and notes what passes through it.

    It goes by the block contract, `(branch, gate, residual, cond) -> (branch, gate, residual)`, so it needs no hook,
    which `torch.compile` would either ignore or trace.
    """

    def __init__(self, block: nn.Module, notes: list[BlockEvidence]) -> None:
        super().__init__()
        self.block = block
        self.notes = notes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.block, name)  # switches that the model reads

    def forward(self, *inputs: torch.Tensor) -> Any:
        parameters: set[int] = set()
        seen: set[int] = set()
        saved = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            if not parameters:  # only now: sharded ones have been gathered
                own = [*self.block.parameters(), *self.block.buffers()]
                parameters.update(p.untyped_storage().data_ptr() for p in own)
            storage = tensor.untyped_storage().data_ptr()
            if storage not in parameters and storage not in seen:
                seen.add(storage)
                saved += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self.block(*inputs)
        input_bytes = sum(t.numel() * t.element_size() for t in inputs)
        self.notes.append(BlockEvidence(input_bytes, saved, outputs[2].dtype))
        return outputs


@contextmanager
def probed(blocks: nn.ModuleList, notes: list[BlockEvidence], count: int = 2) -> Iterator[None]:
    """The last `count` blocks write to `notes` inside."""
    last = list(blocks)[-count:]
    start = len(blocks) - len(last)
    try:
        for i, block in enumerate(last):
            blocks[start + i] = BlockProbe(block, notes)
        yield
    finally:
        for i, block in enumerate(last):
            blocks[start + i] = block


def profiler_activities() -> list[torch.profiler.ProfilerActivity]:
    """The activities that the profiler can record on this machine: the host, and the GPU where there is one."""
    device = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [torch.profiler.ProfilerActivity.CPU, *device]


def profiled_events(run: Callable[[], object]) -> list[Any]:
    """The profiler's events of one call of `run`, host and device."""
    with torch.profiler.profile(activities=profiler_activities(), record_shapes=True, acc_events=True) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    return list(profiler.profiler.kineto_results.events())


def observe_step(run: Callable[[], object], blocks: nn.ModuleList | None, hidden: bool = False) -> Evidence:
    """Calls `run` once under the profiler, with the last blocks probed if there are any, and returns the evidence.

    `hidden` blocks, inside a model compiled as a whole, are probed in one more step that runs uncompiled. Compile
    before: graphs are counted since dynamo's counters were last cleared.
    """
    evidence = Evidence(blocks_uncompiled=hidden)
    with probed(blocks, evidence.blocks) if blocks and not hidden else nullcontext():
        events = profiled_events(run)
    for event in events:
        evidence.ops[event.name()] += 1
        dtypes = event.dtypes()
        if event.name() in MATMUL_OPS and len(dtypes) > 1:
            evidence.op_dtypes[event.name()][dtypes[1].removeprefix("c10::")] += 1
    evidence.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    evidence.graph_breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    if blocks and hidden:
        with torch.compiler.set_stance("force_eager"), probed(blocks, evidence.blocks):
            run()
    evidence.blocks = evidence.blocks[-2:]  # accumulation runs each block more than once
    return evidence


def observe_ops(run: Callable[[], object]) -> Counter[str]:
    """Profiler event name -> how often it ran in one call of `run`."""
    return Counter(event.name() for event in profiled_events(run))
