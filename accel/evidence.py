"""What one real step shows: the ops that ran, their dtypes, graphs, and what the last block kept for backward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

MATMUL_OPS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")


@dataclass
class Evidence:
    """Filled by `observe_step`; every field is a measurement, none a setting."""

    ops: Counter[str] = field(default_factory=Counter)
    """Profiler event name -> how often it ran (CPU ops and, on a GPU, kernels)."""
    op_dtypes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Op name -> dtype of its second tensor argument, the one that is never a bias -> how often."""
    graphs: int = 0
    graph_breaks: int = 0
    residual_dtype: torch.dtype | None = None
    """Dtype of the residual stream as the last block returned it."""
    block_saved_bytes: int | None = None
    """Bytes that the last block kept for its backward pass, its parameters and buffers left out."""
    block_input_bytes: int | None = None
    """Bytes of the last block's inputs."""

    def matmul_dtypes(self) -> Counter[str]:
        """Dtype -> number of matrix products (convolutions included) that ran in it."""
        total: Counter[str] = Counter()
        for op in MATMUL_OPS:
            total.update(self.op_dtypes.get(op, {}))
        return total


class BlockProbe(nn.Module):
    """Stands in for the last block during one step and notes what passes through it.

    It goes by the block contract, `(branch, gate, residual, cond) -> (branch, gate, residual)`, so it needs no hook,
    which `torch.compile` would either ignore or trace.
    """

    def __init__(self, block: nn.Module, evidence: Evidence) -> None:
        super().__init__()
        self.block = block
        self.evidence = evidence

    def forward(self, *inputs: torch.Tensor) -> Any:
        own = [*self.block.parameters(), *self.block.buffers()]
        parameters = {tensor.untyped_storage().data_ptr() for tensor in own}
        seen: set[int] = set()
        saved = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            storage = tensor.untyped_storage().data_ptr()
            if storage not in parameters and storage not in seen:
                seen.add(storage)
                saved += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self.block(*inputs)
        self.evidence.block_saved_bytes = saved
        self.evidence.block_input_bytes = sum(t.numel() * t.element_size() for t in inputs)
        self.evidence.residual_dtype = outputs[2].dtype
        return outputs


def observe_step(run: Callable[[], object], blocks: nn.ModuleList | None) -> Evidence:
    """Calls `run` once under the profiler, with the last block probed if there are blocks, and returns what was seen.

    Compile everything before: the profiled step should be a warm one, but the graph counts of the step that
    compiled are included if dynamo's counters were cleared before it.
    """
    evidence = Evidence()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    last = blocks[-1] if blocks else None
    try:
        if blocks and last is not None:
            blocks[-1] = BlockProbe(last, evidence)
        with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    finally:
        if blocks and last is not None:
            blocks[-1] = last
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        evidence.ops[event.name()] += 1
        dtypes = event.dtypes()
        if event.name() in MATMUL_OPS and len(dtypes) > 1:
            evidence.op_dtypes[event.name()][dtypes[1].removeprefix("c10::")] += 1
    evidence.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    evidence.graph_breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return evidence
