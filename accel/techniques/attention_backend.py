"""Chooses the kernel that computes softmax attention.

`auto` leaves the choice to PyTorch, which takes the first of its backends flash, cuDNN, efficient
and math that supports the inputs; but in bf16 on a CPU, `auto` computes short sequences by plain
matrix products (accel/kernels/attention/attend.py), which the ledger calls `products`. The name of
a backend allows only that backend. `flex` is FlexAttention, which is compiled even if the model is
not. `flash3` and `flash4` replace the kernels of PyTorch's backend `flash`, in the whole process,
by those of the separate packages FlashAttention-3 and -4; PyTorch calls this replacement a
prototype. Any other value restores PyTorch's kernels. The ledger shows the backend that ran.

The choice costs nothing, except that `math` and `products` store the scores of all L² pairs of L
tokens. For 256 samples of 256 tokens and 12 heads of 64, both passes took 0.93 ms by cuDNN on an
H100, which is what `auto` took, 1.41 by flash and 1.79 by efficient (docs/LOG.md). `flash3` and
`flash4` have never run on a GPU: the tests register stand-ins that have no kernels in PyTorch's
registry of flash implementations. References:
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
and https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html;
torch.nn.attention.activate_flash_attention_impl
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)

from accel.evidence import ACTIVATION_PRODUCTS, NO_KERNEL_SEEN, REGION_PREFIX, Evidence
from accel.ledger import AUTO, UNSEEN, UNUSED
from accel.machine import capability_of, is_installed
from accel.technique import Model, Observation, Planning, Technique, blocks_of, find_switches
from common.errors import UserError
from common.text import shorten_error

FLASH = "aten::_scaled_dot_product_flash_attention"
BACKEND_OF = {
    FLASH: "flash",
    f"{FLASH}_for_cpu": "flash",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_attention_math": "math",
}
"""The profiler's name of an attention operation -> the backend to which the operation belongs."""
KERNELS = tuple(op for op, backend in BACKEND_OF.items() if backend != "math")
"""The operations of `BACKEND_OF` that have one operation for their backward pass."""
REFUSALS = (
    "No available kernel",
    "No viable backend",
    "forward unsupported: ",
    "backward unsupported: ",
)
"""Parts of the error messages by which scaled_dot_product_attention says that no allowed backend
supports the inputs; the last two come from FlashAttention-3 and -4."""


class Implementation(NamedTuple):
    """A package whose kernels can replace PyTorch's own flash attention."""

    name: str
    """The backend's name in `torch.nn.attention`."""
    majors: tuple[int, ...]
    """Supported major compute capabilities, e.g. (9,) for Hopper."""
    module: str
    install: str


HOPPER = "build it from the folder hopper of https://github.com/Dao-AILab/flash-attention"
IMPLEMENTATIONS = {
    "flash3": Implementation("FA3", (9,), "flash_attn_interface", HOPPER),
    "flash4": Implementation(
        "FA4", (9, 10), "flash_attn.cute.interface", "pip install flash-attn-4"
    ),
}
"""Value of the key `attention` -> the package that it needs, and the GPUs that
torch/nn/attention/_fa3.py and _fa4.py support."""


def list_candidates(technique: AttentionBackend) -> tuple[Mapping[str, str], ...]:
    if technique.value != AUTO or technique.device.type != "cuda":
        return ()
    return tuple({"attention": name} for name in ("cudnn", "flash", "efficient"))


def choose_fake_backend(technique: AttentionBackend) -> None:
    if technique.value not in ("flash", "math"):
        technique.value = AUTO


class AttentionBackend(Technique):
    key = "attention"
    summary = (
        "`auto`, or one backend: `flash`, `cudnn`, `efficient`, `math`, `flex`, `flash3`, `flash4`"
    )
    examples = tuple(
        {"attention": name}
        for name in ("flash", "cudnn", "efficient", "math", "flex", *IMPLEMENTATIONS)
    )
    off = AUTO
    loss_rtol = 2e-2
    used_in = ("training", "sampling")
    keeps_parity = True
    planning = Planning(
        may_keep_less=("flex",), list_candidates=list_candidates, on_fake_device=choose_fake_backend
    )
    layers: Sequence[Sequence[torch.nn.Module]] = ()
    """For each block the list of its attention layers."""
    failure: str | None = None

    @property
    def implementation(self) -> Implementation | None:
        return IMPLEMENTATIONS.get(str(self.value))

    def find_obstacle(self) -> str | None:
        on_gpu = self.device.type == "cuda"
        if self.implementation:
            return find_implementation_obstacle(self.implementation, self.device)
        if not on_gpu and self.value in ("cudnn", "efficient", "flex"):
            return (
                f"PyTorch has no {self.value} attention with a backward pass for "
                f"{self.device.type}."
            )
        if on_gpu and self.value == "flash" and capability_of(self.device) < (8, 0):
            return (
                "Flash attention needs compute capability 8.0 or newer; use runtime.attention=auto."
            )
        return None

    def on_process(self) -> None:
        if not self.implementation:
            restore_flash()
            return
        try:
            activate_flash_attention_impl(self.implementation.name)
        except (ImportError, OSError, RuntimeError) as error:
            fault = f"{self.implementation.module} does not load ({shorten_error(error)})"
            raise UserError(
                f"runtime.attention={self.value}: {fault}; reinstall it or use "
                "runtime.attention=flash."
            ) from error

    def on_model(self, model: Model) -> Model:
        self.layers = [find_switches(block, "attention_backend") for block in blocks_of(model)]
        self.set_backend("flash" if self.implementation else str(self.value))
        return model

    def set_backend(self, backend: str) -> None:
        """Sets the backend of all attention layers."""
        for module in chain(*self.layers):
            module.attention_backend = backend  # pyright: ignore[reportArgumentType]

    def recover(self, error: BaseException) -> str | None:
        refused = any(refusal in str(error) for refusal in REFUSALS)
        if not self.enabled or self.failure or not refused:
            return None
        self.set_backend(AUTO)
        restore_flash()
        self.failure = (
            f"{self.value} attention does not take this model's heads, windows, text or dtype, so "
            "PyTorch chooses"
        )
        return self.failure

    # What would still say "on" if this did nothing? The attribute `attention_backend` of the
    # layers: a layer may have it and run another backend. So count the operations and kernels that
    # ran in each block, and see that the backward pass goes through them.
    def observe(self, evidence: Evidence) -> Observation:
        count = sum(map(len, self.layers))
        if not count:
            return Observation(UNUSED, "the model has no softmax attention")
        implementation = current_flash_attention_impl()
        ran = self.count_layers_by_backend(evidence, implementation)

        note = ", ".join(f"{name} in {n} of {count} layers" for name, n in ran.items())
        note += f"; PyTorch says that {implementation} is active" * bool(implementation)
        note = note or "no attention ran"
        note += " (in an uncompiled step)" * evidence.blocks_uncompiled
        active = False
        if UNSEEN in ran:
            active = UNSEEN
            note += f": {NO_KERNEL_SEEN}"
        elif not evidence.uses(KERNELS):
            note += ", by which the backward pass did not go"
        elif len(ran) > 1:
            active = "mixed"
        elif ran.total() == count:
            active = next(iter(ran))
        return Observation(active, f"{self.failure}; {note}" if self.failure else note)

    def count_layers_by_backend(
        self, evidence: Evidence, implementation: str | None
    ) -> Counter[str]:
        """Returns a mapping: backend -> number of attention layers whose forward pass this backend
        computed in every micro-batch.

        `implementation` is PyTorch's name of the kernels that replace its flash attention, or None.
        In a compiled step `flex` and `math` leave no event on the host. If the profiler recorded no
        kernels either, the function counts the layers under `UNSEEN`. On a CPU PyTorch chooses
        `math` only if it is named; so with `auto`, attention without an event was `products`.
        """
        is_auto = not self.enabled or self.failure is not None
        decomposed = "products" if is_auto and self.device.type == "cpu" else "math"
        values = {found.name: value for value, found in IMPLEMENTATIONS.items()}
        backend_of = BACKEND_OF
        if implementation:
            backend_of = BACKEND_OF | {FLASH: values.get(implementation, implementation)}
        flex_on_device = any("flex_attention" in op for op in evidence.ops)
        total: Counter[str] = Counter()
        for layers, calls in zip(map(len, self.layers), evidence.blocks, strict=False):
            counts = [count_backends(call.ops, backend_of) for call in calls]
            ran = functools.reduce(Counter.__and__, counts) if counts else Counter()
            ran = Counter({name: min(n, layers) for name, n in ran.items()})

            # Compiled FlexAttention has no event on the host, only a kernel on the device. So if a
            # block shows no other backend and such a kernel ran, count the block's layers under
            # `flex`.
            if calls and not ran and flex_on_device:
                ran["flex"] = layers
            # A compiler decomposes the backend `math` into matrix products and a softmax.
            elif calls and all(
                any(op in ACTIVATION_PRODUCTS or op.startswith(REGION_PREFIX) for op in call.ops)
                for call in calls
            ):
                ran[UNSEEN if evidence.kernels_unseen else decomposed] += max(
                    0, layers - ran.total()
                )
            total += ran
        return total


def count_backends(ops: Counter[str], backend_of: Mapping[str, str]) -> Counter[str]:
    """Returns a mapping: backend -> number of its calls. `ops` counts profiled operations by name;
    `backend_of` maps an operation to its backend."""
    ran: Counter[str] = Counter()
    for op, n in ops.items():
        ran[backend_of.get(op, "flex" if "flex_attention" in op else "")] += n
    del ran[""]
    return ran


def restore_flash() -> None:
    """Restores PyTorch's own kernels of flash attention, if those of another package have replaced
    them."""
    if current_flash_attention_impl():
        restore_flash_attention_impl()


def find_implementation_obstacle(wanted: Implementation, device: torch.device) -> str | None:
    """Returns a sentence that says why `device` cannot run the package `wanted`, FlashAttention-3
    or -4; None if it can."""
    name = f"FlashAttention-{wanted.name[-1]}"
    instead = "use runtime.attention=flash"
    if device.type != "cuda":
        return f"{name} needs an NVIDIA GPU; this run is on {device.type}; {instead}."
    if capability_of(device)[0] not in wanted.majors:
        needed = " or ".join(f"{major}.x" for major in wanted.majors)
        return f"{name} needs compute capability {needed}; {instead} on this GPU."
    if wanted.name not in list_flash_attention_impls():
        return f"PyTorch {torch.__version__} does not list {wanted.name}; {instead}."
    if not is_installed(wanted.module):
        return (
            f"{name} needs {wanted.module}, which is not installed: {wanted.install}, or {instead}."
        )
    return None
