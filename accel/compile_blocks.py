"""torch.compile, block by block, in place: one graph serves all blocks of a kind, state-dict keys stay as they are.

What it costs: seconds to minutes in warm-up, reported apart from training time. Compiling one block instead of the
whole model keeps that time independent of depth. Speed on a GPU: not measured yet.
`torch.compile` is lazy, so a failure comes in warm-up: there it is undone loudly (`recover`), and only there.
"""

import torch
from torch import nn

from accel.evidence import Evidence
from accel.technique import Model, Observation, Technique, blocks_of


class CompileBlocks(Technique):
    key = "compile"
    loss_rtol = 1e-2  # Inductor reorders 16-bit arithmetic; see the parity test for fp32
    backend = "inductor"
    """`torch.compile` backend; tests use the much quicker "aot_eager"."""

    def __init__(self, value: bool | str, device: torch.device) -> None:
        super().__init__(value, device)
        self.blocks: list[nn.Module] = []
        self.failure: str | None = None

    def on_model(self, model: Model) -> Model:
        if self.enabled:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            self.blocks = list(blocks_of(model))
            for block in self.blocks:
                block.compile(fullgraph=True, backend=self.backend)
        return model

    def recover(self, error: BaseException) -> str | None:
        if not self.blocks or not is_compiler_failure(error):
            return None
        for block in self.blocks:
            block._compiled_call_impl = None  # what Module.compile() set; there is no public way back
        self.blocks = []
        self.failure = f"the compiler failed, so blocks run uncompiled: {first_line(error)}"
        return self.failure

    def observe(self, evidence: Evidence) -> Observation:
        regions = sum(n for op, n in evidence.ops.items() if op.startswith("Torch-Compiled Region"))
        if self.failure:
            return Observation(False, self.failure)
        note = f"{evidence.graphs} graphs, {evidence.graph_breaks} graph breaks, {regions} compiled calls in one step"
        return Observation(regions > 0, note if self.enabled else f"{regions} compiled calls in one step")


def is_compiler_failure(error: BaseException) -> bool:
    """True for errors of Dynamo, AOTAutograd or Inductor, False for the user's own mistakes found while tracing."""
    from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
    from torch._inductor.exc import InductorError

    return isinstance(error, TorchDynamoException | InductorError) and not isinstance(error, TorchRuntimeError)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
