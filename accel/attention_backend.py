"""Which kernel computes softmax attention.

`auto` leaves the choice to PyTorch (flash, cuDNN, efficient, math: the first that takes the inputs); a name asks for
that one only. `flex` is FlexAttention, compiled by itself where the model is not. The ledger shows the one that ran.

What it costs: nothing; `math` stores all L² scores. Speed on a GPU: not measured yet.
References: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html and
https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html
"""

import torch

from accel.evidence import Evidence
from accel.ledger import AUTO, UNUSED
from accel.technique import Model, Observation, Technique, blocks_of

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
        self.failure: str | None = None

    def unavailable(self) -> str | None:
        if self.device.type != "cuda" and self.value in ("cudnn", "efficient", "flex"):
            return f"PyTorch has no {self.value} attention with a backward pass for {self.device.type}."
        if self.device.type == "cuda" and self.value == "flash" and torch.cuda.get_device_capability() < (8, 0):
            return "Flash attention needs compute capability 8.0 or newer; use runtime.attention=auto."
        return None

    def on_model(self, model: Model) -> Model:
        self.switches = [m for block in blocks_of(model) for m in block.modules() if hasattr(m, "attention_backend")]
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
        ran = {name: sum(evidence.ops[op] for op in ops) for name, ops in OPS.items()}
        ran["flex"] = sum(n for op, n in evidence.ops.items() if "flex_attention" in op)
        if not self.switches:
            return Observation(UNUSED, "the model has no softmax attention")
        note = ", ".join(f"{name} ran {n} times in one step" for name, n in ran.items() if n)
        if not note and evidence.matmul_dtypes():  # compiling dissolves `math` into products and a softmax
            ran["math"], note = 1, "no attention kernel ran in one step, but products"
        active = max(ran, key=lambda name: ran[name]) if any(ran.values()) else False
        return Observation(active, f"{self.failure}; {note}" if self.failure else note)
