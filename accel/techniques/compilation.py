"""Compiles with torch.compile in place, without changing state-dict keys.

`compile_scope`: "blocks" compiles block by block, so one or two graphs serve all blocks and compile
time does not grow with depth; "model" compiles the denoiser with its heads as one graph.
`compile_mode` is the mode of `torch.compile`: "default"; "max-autotune-no-cudagraphs" tries more
kernels for longer; "reduce-overhead" uses Inductor's own CUDA graphs, for the whole model and one
accumulation step only (the configuration refuses all other cases; `cuda_graph` has no such limits).

Compiling costs seconds to minutes in warm-up; reports show this time apart from training time.
docs/benchmarks/h100.md has its speed. `torch.compile` is lazy, so an error of the compiler appears
in warm-up: `recover` then switches the technique off, with a warning.
"""

from __future__ import annotations

import os
import shutil
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from accel.evidence import REGION_PREFIX, Evidence
from accel.machine import capability_of, is_installed
from accel.technique import Model, Observation, Planning, Saving, Technique, blocks_of
from common.text import shorten_error

INDUCTOR_PREFIX = "## Call CompiledFxGraph"
"""Prefix of the profiler's name for a call of a graph that Inductor compiled."""

PARTITION_BACKEND = "aot_eager_decomp_partition"
"""Name of the `torch.compile` backend in plans (scripts/plan): it splits a compiled block into
forward and backward pass as Inductor does, but generates no code."""


def generate_no_code(technique: Compile) -> None:
    technique.backend = PARTITION_BACKEND


class Compile(Technique):
    key = "compile"
    summary = "compiles in place; `compile_scope`: `blocks`, `model`; `compile_mode`"
    options: ClassVar = {"compile_scope": "blocks", "compile_mode": "default"}
    examples = tuple({"compile": True, "compile_scope": scope} for scope in ("blocks", "model"))
    planning = Planning(
        savings=(Saving({"compile": True}, "a minute of warm-up", 10),),
        may_keep_less=(True,),
        list_candidates=lambda technique: technique.examples,
        on_fake_device=generate_no_code,
    )
    # Inductor reorders arithmetic, which in 16 bits can change the loss by up to 1 %; in fp32 the
    # loss changes far less.
    loss_rtol = 1e-2
    saves_launches = True
    keeps_parity = True
    backend = "inductor"
    """Name of the `torch.compile` backend; tests use "aot_eager", which compiles much faster."""
    compile_scope: str
    compile_mode: str
    compiled: Sequence[nn.Module] = ()
    failure: str | None = None

    def find_obstacle(self) -> str | None:
        if not self.uses_inductor:
            return None
        if self.device.type == "cuda":
            if not is_installed("triton"):
                return "Compiling for a GPU needs triton; install it with pip."
            if capability_of(self.device) < (7, 0):
                return "Compiling for a GPU needs compute capability 7.0 or newer."
        elif find_cxx_compiler() is None:
            return (
                "Compiling for a CPU needs a C++ compiler, such as g++; there is none on the PATH."
            )
        return None

    @property
    def hides_blocks(self) -> bool:
        """Returns whether the whole model is compiled, so that no probe sees its blocks."""
        return self.compile_scope == "model" and bool(self.compiled)

    def on_model(self, model: Model) -> Model:
        if self.enabled:
            # Make Dynamo forget what an earlier run in this process compiled, because it limits the
            # number of recompilations per process.
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            self.compiled = [model] if self.compile_scope == "model" else list(blocks_of(model))
            mode = self.compile_mode if self.uses_inductor else None
            for module in self.compiled:
                module.compile(fullgraph=True, backend=self.backend, mode=mode)
        return model

    def recover(self, error: BaseException) -> str | None:
        if not self.compiled or not is_compiler_failure(error):
            return None
        for module in self.compiled:
            # PyTorch has no public function that undoes Module.compile(), so clear the attribute
            # that it has set.
            module._compiled_call_impl = None
        self.compiled = ()
        where = traceback.extract_tb(error.__traceback__)[-1]
        self.failure = (
            f"the compiler failed, so nothing runs compiled: {shorten_error(error)} (in "
            f"{Path(where.filename).name}, {where.name})"
        )
        if self.compile_mode != "default":
            self.failure += f"; without runtime.compile_mode={self.compile_mode} it may not"
        return self.failure

    # What would still say "on" if this did nothing? A block on which compile() was called:
    # compilation is lazy and may never happen. So count the calls of compiled functions in each
    # block, and with Inductor also those of graphs that Inductor compiled, and see that the
    # backward pass goes through them.
    def observe(self, evidence: Evidence) -> Observation:
        regions = evidence.compiled_calls
        if self.failure:
            return Observation(False, self.failure)
        if not self.enabled:
            return Observation(regions > 0, f"{regions} compiled calls in one step")
        if self.compile_scope == "blocks" and evidence.blocks:
            compiled = evidence.check_blocks(lambda call: self.is_compiled(call.ops))
            on = all(compiled)
            scope = evidence.format_share(compiled)
        else:
            # If the whole model is compiled, or if it has no blocks (an encoder), require at least
            # one compiled call per micro-batch.
            micro_batches = max([1, *map(len, evidence.blocks)])
            on = self.is_compiled(evidence.ops) and regions >= micro_batches
            scope = "the model"
        note = (
            f"{scope} compiled: {evidence.graphs} graphs, {evidence.graph_breaks} graph breaks, "
            f"{regions} calls"
        )
        # The backward pass does not go through a compiled function whose result was thrown away.
        on &= evidence.ops["CompiledFunction"] <= evidence.ops["CompiledFunctionBackward"]
        return Observation(on, f"{note}; scope {self.compile_scope}, mode {self.compile_mode}")

    def is_compiled(self, ops: Counter[str]) -> bool:
        """Returns whether `ops`, names of profiled operations, contain a call of a compiled
        function and, if the backend is Inductor, of a graph that Inductor compiled."""
        prefixes = (REGION_PREFIX, INDUCTOR_PREFIX) if self.uses_inductor else (REGION_PREFIX,)
        return all(any(op.startswith(prefix) for op in ops) for prefix in prefixes)

    @property
    def uses_inductor(self) -> bool:
        """Whether the backend is Inductor, which generates code."""
        return self.backend == "inductor"


def find_cxx_compiler() -> str | None:
    """Returns the path of the C++ compiler that Inductor needs on a CPU: the first that exists of
    $CXX (c++ if it is not set), g++ and clang++; None if none exists."""
    names = (os.environ.get("CXX", "c++"), "g++", "clang++")
    return next(filter(None, map(shutil.which, names)), None)


def is_compiler_failure(error: BaseException) -> bool:
    """Returns True for an error of Dynamo, AOTAutograd or Inductor itself, False for any other
    error, such as a mistake in the model that tracing found."""
    from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
    from torch._inductor.exc import InductorError

    from_compiler = isinstance(error, TorchDynamoException | InductorError)
    return from_compiler and not isinstance(error, TorchRuntimeError)
