"""Which kernel computes softmax attention.

`auto` leaves the choice to PyTorch (flash, cuDNN, efficient, math: the first that takes the inputs); a name asks for
that one only. `flex` is FlexAttention, compiled by itself where the model is not. The ledger shows the one that ran.

What it costs: nothing; `math` stores all L² scores. Speed on a GPU: not measured yet.
References: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html and
https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html
"""

import functools
from collections import Counter

import torch

from accel.compilation import REGION
from accel.evidence import ACTIVATION_PRODUCTS, Evidence
from accel.ledger import AUTO, UNUSED
from accel.technique import Model, Observation, Technique, blocks_of, switches

OPS = {
    "flash": ("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    "cudnn": ("aten::_scaled_dot_product_cudnn_attention",),
    "efficient": ("aten::_scaled_dot_product_efficient_attention",),
    "math": ("aten::_scaled_dot_product_attention_math",),
}
"""Backend -> the ops that only it runs."""
REFUSALS = ("No available kernel", "No viable backend")
"""How scaled_dot_product_attention says that no allowed backend takes the inputs."""


class AttentionBackend(Technique):
    key = "attention"
    summary = "`auto`, or one backend: `flash`, `cudnn`, `efficient`, `math`, `flex`"
    examples = tuple({"attention": name} for name in (*OPS, "flex"))
    off = AUTO
    loss_rtol = 2e-2

    def __init__(self, value: bool | str, device: torch.device) -> None:
        super().__init__(value, device)
        self.switches: list[torch.nn.Module] = []
        self.layers: list[int] = []
        """How many of them each block has."""
        self.failure: str | None = None

    def unavailable(self) -> str | None:
        if self.device.type != "cuda" and self.value in ("cudnn", "efficient", "flex"):
            return f"PyTorch has no {self.value} attention with a backward pass for {self.device.type}."
        if self.device.type == "cuda" and self.value == "flash" and torch.cuda.get_device_capability() < (8, 0):
            return "Flash attention needs compute capability 8.0 or newer; use runtime.attention=auto."
        return None

    def on_model(self, model: Model) -> Model:
        found = [switches(block, "attention_backend") for block in blocks_of(model)]
        self.switches, self.layers = [m for modules in found for m in modules], [len(modules) for modules in found]
        self.switch(str(self.value))
        return model

    def switch(self, backend: str) -> None:
        for module in self.switches:
            module.attention_backend = backend  # pyright: ignore[reportArgumentType]

    def recover(self, error: BaseException) -> str | None:
        if not self.enabled or self.failure or not any(refusal in str(error) for refusal in REFUSALS):
            return None
        self.switch(AUTO)
        self.failure = f"{self.value} attention does not take this model's heads and dtype, so PyTorch chooses"
        return self.failure

    def observe(self, evidence: Evidence) -> Observation:
        if not self.switches:
            return Observation(UNUSED, "the model has no softmax attention")
        ran = self.layers_by_backend(evidence)
        note = ", ".join(f"{name} in {n} of {len(self.switches)} layers" for name, n in ran.items())
        note = (note or "no attention ran") + " (in an uncompiled step)" * evidence.blocks_uncompiled
        complete = ran.total() == len(self.switches)
        active = "mixed" if len(ran) > 1 else next(iter(ran)) if complete else False
        return Observation(active, f"{self.failure}; {note}" if self.failure else note)

    def layers_by_backend(self, evidence: Evidence) -> Counter[str]:
        """Backend -> number of attention layers whose forward pass it computed in every micro-batch."""
        total: Counter[str] = Counter()
        flex_on_device = any("flex_attention" in op for op in evidence.ops)
        for layers, calls in zip(self.layers, evidence.blocks, strict=False):
            found = [backends(call.ops) for call in calls]
            ran = functools.reduce(Counter.__and__, found) if found else Counter()
            ran = Counter({name: min(n, layers) for name, n in ran.items()})
            if calls and not ran and flex_on_device:  # its kernel has no event on the host
                ran["flex"] = layers
            elif calls and all(is_dissolved(call.ops) for call in calls):
                ran["math"] += max(0, layers - ran.total())
            total += ran
        return total


def backends(ops: Counter[str]) -> Counter[str]:
    """Backend -> its calls among these ops."""
    ran = Counter({name: sum(ops[op] for op in its) for name, its in OPS.items()})
    ran["flex"] = sum(n for op, n in ops.items() if "flex_attention" in op)
    return +ran


def is_dissolved(ops: Counter[str]) -> bool:
    """Whether attention can have run as products and a softmax, into which compiling turns `math`."""
    return any(op in ACTIVATION_PRODUCTS or op.startswith(REGION) for op in ops)
