"""Mixed precision: matrix products in 16 bits by autocast; parameters, optimizer state, norms and
the loss in fp32.

`bf16` has 8 bits of mantissa and the range of fp32. `fp16` has 11 bits of mantissa but a small
range, so the loss is scaled (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740). Stored
tensors stay fp32, unless `runtime.weights` changes that. `fp8` is `bf16`, with products of large
layers in 8 bits (accel/techniques/float8.py), by `fp8_recipe`: "tensorwise" has one scale per
tensor, "rowwise" one scale per row, and "rowwise_with_gw_hp" is "rowwise" with the weights'
gradients in bf16.

Mixed precision costs exactness, because products round. A CPU without native instructions computes
16-bit products more slowly than fp32 ones, so the stack switches 16-bit products off on such a CPU.
`runtime.on_unavailable=emulate` uses them nevertheless, to show how a model trains with 16-bit
products. docs/benchmarks/h100.md has its speed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel.evidence import EIGHT_BIT, PRODUCTS, WEIGHT_PRODUCTS, Evidence
from accel.machine import capability_of
from accel.technique import AnyStep, Observation, Planning, Saving, Technique, TrainingStep
from accel.techniques import float8
from accel.techniques.compilation import INDUCTOR_PREFIX

SCALE_GROWTH = 2.0
SCALE_BACKOFF = 0.5
STEPS_TO_GROWTH = 2000
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Value of the key `precision` -> the dtype in which autocast computes."""
DTYPE_NAMES = {
    "bf16": ("BFloat16", "torch.bfloat16"),
    "fp16": ("Half", "torch.float16"),
    "fp32": ("float", "torch.float32"),
    "fp64": ("double", "torch.float64"),
    "fp8": ("Float8_e4m3fn", "Float8_e5m2"),
}
TEMPLATE_PREFIX = "triton_tem_fused"
"""Prefix of the names of the GPU kernels that Inductor generates for matrix products."""


class Precision(Technique):
    key = "precision"
    summary = (
        "`bf16`, `fp16`: products in 16 bits, all else fp32; `fp8`: of large layers in 8 bits, "
        "by `fp8_recipe`"
    )
    options: ClassVar = {"fp8_recipe": "tensorwise"}
    examples = (
        *({"precision": name} for name in ("bf16", "fp16")),
        *({"precision": "fp8", "fp8_recipe": recipe} for recipe in float8.BACKWARD_PRODUCTS),
    )
    off = "fp32"
    emulated = ("bf16", "fp16")
    """Values that a CPU can emulate, more slowly, if it has no instructions for them."""
    loss_rtol = 2e-2
    planning = Planning(savings=(Saving({"precision": "bf16"}, "products in bf16", 5),))
    fp8_recipe: str
    scaler: LossScaler | None = None
    layers: float8.Float8Layers | None = None
    around_forward: AbstractContextManager[object] = nullcontext()
    """Context that is open during each forward pass; `compare` sets it for one step, to inspect the
    products of that step."""
    wide_weights: Set[str] = frozenset()
    """Names of those weights that a matrix product multiplied in fp32 although autocast was on, in
    the step that `compare` ran."""

    def find_obstacle(self) -> str | None:
        if self.value == "fp8":
            return float8.find_obstacle(self.device)
        if self.device.type == "cuda":
            major = 8 if self.value == "bf16" else 7
            if capability_of(self.device)[0] >= major:
                return None
            return (
                f"{self.value} needs compute capability {major}.0 or newer; use "
                "runtime.precision=fp32 on this GPU."
            )

        if self.value == "fp16":
            native = torch.cpu._is_amx_fp16_supported()
            instructions = "AMX-FP16"
        else:
            native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
            instructions = "AVX512-BF16 or AMX"
        if native:
            return None
        return (
            f"This CPU has no native {self.value} instructions ({instructions}), so {self.value} "
            "would be slower than fp32."
        )

    @property
    def uses_options(self) -> bool:
        return self.value == "fp8"

    def autocast(self) -> torch.amp.autocast:
        """Returns the autocast context of the forward pass."""
        return torch.amp.autocast(
            self.device.type, AUTOCAST_DTYPES.get(str(self.value)), enabled=self.enabled
        )

    def on_layers(self, model: nn.Module) -> None:
        """Replaces layers in the model's blocks, before any technique wraps a block."""
        if self.value == "fp8":
            self.layers = float8.Float8Layers(model, self.fp8_recipe)

    def on_step(self, step: AnyStep) -> AnyStep:
        if self.enabled:
            forward = step.forward

            @functools.wraps(forward)
            def autocast_forward(*args: Any, **kwargs: Any) -> Any:
                with self.autocast(), self.around_forward:
                    return forward(*args, **kwargs)

            step.forward = autocast_forward
        # Only a training step needs a loss scaler. The step of an encoder has no backward pass, so
        # it has no attribute `scaler`.
        if self.value == "fp16" and hasattr(step, "scaler"):
            self.scaler = LossScaler(self.device)
            cast(TrainingStep, step).scaler = self.scaler
        return step

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state that a resumed run needs, name -> tensor: that of the loss scaler."""
        return self.scaler.state_dict() if self.scaler else {}

    def compare(self, run: Callable[[], object], evidence: Evidence) -> None:
        if self.enabled and self.model is not None and evidence.count_dtypes()["float"]:
            products = WideWeightProducts(self.model)
            self.around_forward = products
            with torch.compiler.set_stance("force_eager"):
                run()
            self.around_forward = nullcontext()
            self.wide_weights = products.wide_weights

    # What would still say "on" if this did nothing? Autocast's flag: products may run in another
    # dtype. So count the dtypes of products. An fp32 product may be intended if it multiplies two
    # activations, but not if it multiplies a weight. The name of the operation does not show what
    # it multiplies, so `compare` inspects the operands.
    def observe(self, evidence: Evidence) -> Observation:
        if self.layers is None:
            return self.observe_autocast(evidence)
        others = {product: n for product, n in evidence.products.items() if product[0] != EIGHT_BIT}
        active, note = self.observe_autocast(replace(evidence, products=Counter(others)))
        if not any(self.layers.large):
            least = f"{float8.MIN_FEATURES:,}"
            why = (
                f"0 of {self.layers.count} layers are large enough for fp8: {least} inputs, more "
                f"than {least} outputs, both multiples of {float8.SIZE_MULTIPLE}"
            )
            return Observation(active, f"{why}; {note}")
        complete, layers_note = self.layers.observe(evidence)
        if evidence.count_dtypes([EIGHT_BIT]):
            active = "fp8" if complete and active == "bf16" else "mixed"
        return Observation(active, f"{layers_note}; of the others {note}")

    def observe_autocast(self, evidence: Evidence) -> Observation:
        """Returns the dtype in which all matrix products ran, or "mixed" if they ran in several
        dtypes, and the evidence; fp32 products that layers intend are allowed. With `precision=fp8`
        the caller has removed 8-bit products from `evidence`, because it judges these
        separately."""
        weights = evidence.count_dtypes(WEIGHT_PRODUCTS)
        dtypes = evidence.count_dtypes()
        calls = evidence.block_calls
        branches = Counter(name_dtype(str(call.branch_dtype)) for call in calls)
        # The profiler sees products that call a library, such as cuBLAS, but not those inside
        # kernels that Inductor generated. If such kernels ran, judge these products by the dtype
        # that the blocks return.
        by_library = all(any(op in call.ops for op in WEIGHT_PRODUCTS) for call in calls)
        unseen = any(
            op.startswith(TEMPLATE_PREFIX) or (op.startswith(INDUCTOR_PREFIX) and not by_library)
            for op in evidence.ops
        )
        if not weights and not (unseen and branches):
            return Observation(False, "no matrix product ran")

        name = name_dtype((weights or branches).most_common(1)[0][0])
        in_dtype = sum(n for dtype, n in dtypes.items() if name_dtype(dtype) == name)
        intended = 0 if name == "fp32" or self.wide_weights else dtypes["float"] - weights["float"]
        note = f"{in_dtype} of {dtypes.total()} products in {name}"
        if intended:
            note += f", {intended} meant to be fp32 (of activations)"
        if self.wide_weights:
            names = sorted(self.wide_weights)
            listed = ", ".join(names[:3]) + ", …" * (len(names) > 3)
            note += f"; in fp32 are products of weights: {listed}"
        if unseen:
            share = evidence.format_share(
                evidence.check_blocks(lambda call: name_dtype(str(call.branch_dtype)) == name)
            )
            note += (
                f"; others in Inductor's own kernels, which do not tell; {share} returned {name}"
            )
        if self.scaler:
            note += "; the loss is scaled on the device"
        complete = in_dtype + intended == dtypes.total() and (
            not unseen or branches.keys() == {name}
        )
        complete &= not self.wide_weights
        return Observation(name if complete else "mixed", note)


def name_dtype(dtype: str) -> str:
    """Converts the name of a dtype in the profiler or in PyTorch to the value of the key
    `precision`, such as "bf16"; returns other names unchanged."""
    return next((name for name, dtypes in DTYPE_NAMES.items() if dtype in dtypes), dtype)


class LossScaler:
    """Scales the loss for fp16 by a factor that changes during training. The device updates the
    factor, so the host never waits for the overflow flag.

    `scale` multiplies the loss and divides the gradients. The scale is halved after a step whose
    gradients overflowed, and doubled after 2,000 steps in a row without overflow;
    torch.amp.GradScaler has the same constants. GradScaler itself does not fit, because it
    overwrites `found_inf`, which `training/step.py` also sets to skip steps for other reasons.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), 65536.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, found_inf: Tensor) -> None:
        """Updates the scale after a step; `found_inf` is 1.0 if the step's scaled gradients were
        not finite, else 0.0."""
        torch._amp_update_scale_(
            self.scale, self.good_steps, found_inf, SCALE_GROWTH, SCALE_BACKOFF, STEPS_TO_GROWTH
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self.good_steps}


class WideWeightProducts(TorchDispatchMode):
    """Inside the context, collects in `wide_weights` the names of those matrices of `model` that a
    product multiplies in fp32.

    The name of an operation does not show whether it multiplies a weight: einsum computes a bmm
    with a weight, attention a bmm of two activations. So the mode remembers which storages hold
    weights, also after an operation that takes only weights, such as a cast or a reshape. The mode
    does not recognise the parameters of a sharded model, because FSDP gathers them into other
    storages.
    """

    # Without this attribute the mode cannot surround FlexAttention, a higher-order operator.
    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wide_weights: set[str] = set()
        # Weak reference to a storage -> name of its weight. While a weak reference exists, no other
        # storage gets the same address, even after the memory is freed.
        self.names = {
            storage_of(p): name.removeprefix("model.")
            for name, p in model.named_parameters()
            if p.ndim >= 2
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = find_plain_tensors(result)
        names = [self.names.get(storage_of(t)) for t in find_plain_tensors((args, kwargs))]
        if str(func).startswith(DISPATCHED_PRODUCTS):
            wide = all(tensor.dtype is torch.float32 for tensor in outputs)
            self.wide_weights |= {name for name in names if name and wide}
        elif names and None not in names:
            self.names |= {storage_of(tensor): str(names[0]) for tensor in outputs}
        return result


DISPATCHED_PRODUCTS = tuple(f"{name.replace('::', '.')}." for name in PRODUCTS)
"""Prefixes of the names that a dispatch mode sees for matrix products, such as "aten.mm."."""


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Returns a weak reference to the storage of a tensor."""
    return StorageWeakRef(tensor.untyped_storage())


def find_plain_tensors(tree: Any) -> list[Tensor]:
    """Finds the tensors in nested lists, tuples and dicts; leaves out tensors of subclasses,
    because they may have no storage."""
    return [leaf for leaf in tree_leaves(tree) if type(leaf) in (Tensor, nn.Parameter)]
