"""Captures the whole step as one CUDA graph: forward, backward, clipping, optimizer and averages of
the weights. The host then launches all of them by one call.

If the kernels of a step are small, launching them one by one takes the host longer than the GPU
needs to run them; replaying a graph launches all kernels at once. Batches are copied into static
buffers, learning rate and EMA weight are scalars on the device, noise is a function of the samples'
position in the stream, and the optimizer decides on the device whether to skip a step, so nothing
in the step needs the host.

A graph costs memory, because the memory of one step stays reserved, and it fixes all shapes. It
removes the gaps between kernels. The technique needs a fused optimizer. docs/benchmarks/h100.md has
its speed. Reference: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from accel.composite_optimizer import is_fused
from accel.evidence import NO_KERNEL_SEEN, Evidence
from accel.ledger import UNSEEN
from accel.sharding import get_world_size
from accel.technique import AnyStep, Observation, Planning, Technique, TrainingStep, switch_off
from common.errors import UserError
from common.text import shorten_error

SINGLE_LAUNCHES = ("cudaLaunchKernel", "__cudaLaunchKernel", "cuLaunchKernel")
"""Prefixes of the profiler's names for calls that launch one kernel; with CUDA 13 the name begins
with underscores."""
GraphedUpdate = Callable[[Sequence[Any]], Any]


class CudaGraph(Technique):
    key = "cuda_graph"
    summary = "the whole step as one launch"
    examples = ({"cuda_graph": True, "fused_adamw": True},)
    loss_rtol = 1e-5
    used_in = ("training",)
    saves_launches = True
    planning = Planning(
        list_candidates=lambda _: ({"cuda_graph": True},), on_fake_device=switch_off
    )
    update: CapturedUpdate | None = None
    failure: str | None = None

    def find_obstacle(self) -> str | None:
        if self.device.type != "cuda":
            return f"CUDA graphs need an NVIDIA GPU; this run is on {self.device.type}."
        if get_world_size() > 1:
            return (
                "A step that communicates with other processes is not captured; this run has "
                "several."
            )
        return None

    def make_optimizer_kwargs(self) -> dict[str, Any]:
        return {"capturable": True} if self.enabled else {}

    def on_step(self, step: AnyStep) -> AnyStep:
        if self.enabled:
            training = cast(TrainingStep, step)
            if is_fused(training.optimizer):
                self.update = CapturedUpdate(training.update, self.device)
                training.update = self.update
                return step
            self.failure = (
                "the optimizer is not fused and decides on the host, which a graph cannot do"
            )
        return step

    def on_warm(self) -> bool:
        if self.update is None:
            return False
        self.update.armed = True
        return True

    # What would still say "on" if this did nothing? An object that holds a captured graph: nothing
    # may replay it. So count the launches of graphs in a step after warm-up, and the kernels that
    # are still launched one by one: the step itself may run beside its replay.
    def observe(self, evidence: Evidence) -> Observation:
        if self.failure:
            return Observation(False, self.failure)
        if not self.enabled:
            return Observation(False, "no graph was captured")
        launches = evidence.warm_ops["cudaGraphLaunch"]
        if evidence.kernels_unseen and not launches:
            return Observation(UNSEEN, NO_KERNEL_SEEN)
        before, singles = (
            sum(n for op, n in ops.items() if op.startswith(SINGLE_LAUNCHES))
            for ops in (evidence.ops, evidence.warm_ops)
        )
        return Observation(
            launches > 0 and 2 * singles <= before,
            f"{launches} graph launches, {singles} kernels launched one by one in a step; "
            f"{before} without the graph",
        )


class CapturedUpdate:
    """Wraps the step's function `update(batches)`, which returns scalars on the device in a named
    tuple that may hold dicts: runs it uncaptured until `armed` is True, then captures it once and
    replays the graph.

    Batches are named tuples of tensors, nested or not, and must keep their number and shapes. All
    uncaptured calls and the capture run on one side stream, so that tensors which autograd keeps
    from earlier calls belong to the stream of the capture. At least one call must come before the
    capture: it creates moments, workspaces and kernels, which a replay must not create again.

    Raises UserError if the step cannot be captured. The run must then end, and later measurements
    in the same process are invalid: some versions of PyTorch leave the memory allocator in the
    state of a capture.
    """

    buffers: list[Tensor]
    structure: TreeSpec
    result: Tensor

    def __init__(self, update: GraphedUpdate, device: torch.device) -> None:
        self.inner = update
        self.stream = torch.cuda.Stream(device)
        self.calls = 0
        self.armed = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batches: Sequence[Any]) -> Any:
        if not self.armed:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                output = self.inner(batches)
            torch.cuda.current_stream().wait_stream(self.stream)
            self.calls += 1
            return output

        graph = self.graph or self.capture(batches)
        tensors = list_tensors(batches)
        assert [t.shape for t in tensors] == [t.shape for t in self.buffers], (
            "a captured step has one shape"
        )
        torch._foreach_copy_(self.buffers, tensors, non_blocking=True)
        graph.replay()
        # Clone the figures of the step, because the next replay overwrites them.
        return tree_unflatten(self.result.clone().unbind(), self.structure)

    def capture(self, batches: Sequence[Any]) -> torch.cuda.CUDAGraph:
        """Captures the update on copies of `batches`, which become the static buffers; returns the
        graph."""
        assert self.calls > 0
        static = tree_map_only(Tensor, torch.clone, list(batches))
        graph = torch.cuda.CUDAGraph()
        failure = None
        current = torch.cuda.current_stream()
        try:
            # Use "thread_local", so that threads that load data may copy on other streams during
            # the capture without breaking it.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                try:
                    output = self.inner(static)
                    scalars, self.structure = tree_flatten(output)
                    self.result = torch.stack([t.float() for t in scalars])
                except Exception as error:
                    # Keep this error for the message, because PyTorch raises another error when the
                    # context ends, which does not name the cause.
                    failure = error
                    raise
        except Exception as error:
            # Restore the stream here: if the capture fails, PyTorch's context raises before it
            # restores the stream.
            torch.cuda.set_stream(current)
            cause = shorten_error(failure or error)
            raise UserError(
                f"runtime.cuda_graph=true: the step cannot be captured ({cause}); use "
                "runtime.cuda_graph=false."
            ) from failure or error
        self.buffers = list_tensors(static)
        self.graph = graph
        return graph


def list_tensors(batches: Sequence[Any]) -> list[Tensor]:
    """Lists the tensors of batches; an absent text is None."""
    return [leaf for leaf in tree_leaves(list(batches)) if leaf is not None]
