"""Times each fused operator and its definition, eager and compiled.

Each kernel is timed in turn with the operator's eager definition: the forward pass alone, and the
forward and backward pass together. Results give bytes per second as a share of the measured copy
rate, and FLOPs per second as a share of the measured rate of matrix products. Several sets of
inputs alternate, so that no call finds its inputs in the cache. On a GPU the times contain no
launches: CUDA events lie around calls that the host queues while the GPU sleeps. On a CPU only the
definitions run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from accel.kernels.add_norm.operator import add_norm, fused_add_norm
from accel.kernels.attention.qk_rope import fused_qk_rope, qk_rope
from accel.kernels.local_mix.operator import count_local_mix_flops, fused_local_mix, local_mix
from accel.kernels.ssd.definition import bidirectional_ssd, count_bidirectional_ssd_flops
from accel.kernels.ssd.mixed import fused_mixed_ssd, mixed_ssd
from accel.kernels.ssd.operator import fused_bidirectional_ssd
from accel.kernels.swiglu.operator import fused_swiglu, silu_product
from common.environment import pick_device
from models.mixers.attention import axial_rotations
from scripts.bench import TABLES, BenchConfig, Case, Figures
from scripts.capabilities import measure_rates
from scripts.timing import compute_ratios, measure_device_seconds, summarise, time_in_turn

SHAPES = TABLES["shapes"]
"""Name of a setting -> letter or name of a size -> the size."""
INPUTS = TABLES["inputs"]
"""Name of an operator -> its input tensors, as text."""
INPUT_SETS = 4
Function = Callable[..., Any]


def draw_inputs(operator: str, sizes: dict[str, int], device: torch.device) -> list[Tensor]:
    """Draws the random input tensors that `INPUTS` lists for an operator; all require a
    gradient."""
    inputs = []
    for text in INPUTS[operator].split(", "):
        kind, _, rest = text.partition(" ")
        names = ["2", "K"] if not rest else (rest if kind == "fp32" else text).split()
        x = torch.randn([sizes.get(name) or int(name) for name in names], device=device)
        if kind == "dt_bias":
            x = x - 4.0
        elif kind == "A_log":
            x = (16.0 * torch.rand_like(x)).log()
        elif kind != "fp32":
            x = x.bfloat16()
        inputs.append(x.requires_grad_())
    return inputs


class Op(NamedTuple):
    """An operator's definition in plain PyTorch, its fused implementation, and the FLOPs of its
    forward pass (0: not counted)."""

    definition: Function
    fused: Function
    flops: int = 0


def swiglu(joined: Tensor) -> Tensor:
    """Computes SwiGLU by its definition, silu(gate)·value; the last axis of `joined` (…, 2·hidden)
    holds first the gate, then the value."""
    return silu_product(*joined.chunk(2, dim=-1))


def make_operators(setting: str, device: torch.device) -> dict[str, Op]:
    """Returns name of an operator -> its definition, fused implementation and FLOPs."""
    sizes = SHAPES[setting]
    grid = (sizes["rows"], sizes["columns"])

    def make_op(definition: Function, fused: Function, fourth: Any, flops: int = 0) -> Op:
        """Makes an operator whose fourth argument is no input."""
        one, other = (
            lambda *inputs, call=call: call(*inputs[:3], fourth, *inputs[3:])
            for call in (definition, fused)
        )
        return Op(one, other, flops)

    B, L, K, P, N = (sizes[letter] for letter in "BLKPN")
    scanning = B * count_bidirectional_ssd_flops(L, K, P, N)
    mixing = B * count_local_mix_flops(L, sizes["mixed"])
    scan = Op(bidirectional_ssd, fused_bidirectional_ssd, scanning)
    return {
        "add_norm": Op(add_norm, fused_add_norm),
        "bidirectional_ssd": scan,
        "bidirectional_ssd, gated": scan,
        "local_mix": make_op(local_mix, fused_local_mix, grid, mixing),
        "ssd_mixed": make_op(mixed_ssd, fused_mixed_ssd, grid, scanning + mixing),
        "swiglu": Op(swiglu, fused_swiglu),
        "qk_rope": make_op(qk_rope, fused_qk_rope, axial_rotations(grid, P).to(device)),
    }


WAYS = {
    "eager": lambda op: op.definition,
    "compiled": lambda op: torch.compile(op.definition),
    "fused": lambda op: op.fused,
}
"""Name of an implementation -> function that takes an `Op` and returns the function to time."""


def make_runner(
    function: Function, sets: list[list[Tensor]], steps: int, backward: bool
) -> Callable[[], None]:
    """Returns a function that calls `function` `steps` times, each time on the next of the input
    `sets`, with the backward pass if `backward`. The returned function has run once already, as a
    warm-up."""
    with torch.no_grad():
        weights = [torch.randn_like(t) for t in tree_leaves(function(*sets[0]))]

    def run() -> None:
        for i in range(steps):
            inputs = sets[i % len(sets)]
            with torch.set_grad_enabled(backward):
                out = function(*inputs)
            if backward:
                torch.autograd.grad(out, inputs, weights)

    run()
    return run


def count_bytes(op: Op, inputs: list[Tensor]) -> int:
    """Counts the bytes that a forward and backward pass must at least read or write. Both passes
    read the inputs; the forward pass writes the outputs; the backward pass reads the outputs'
    gradients and writes the inputs' gradients."""
    with torch.no_grad():
        outputs = tree_leaves(op.definition(*inputs))
    return 3 * sum(t.nbytes for t in inputs) + 2 * sum(t.nbytes for t in outputs)


def time_kernel(case: Case, cfg: BenchConfig) -> Figures:
    """Times the implementation of an operator that the case names, in turn with the operator's
    eager definition on the same inputs. `speed` is the ratio of the two times."""
    device = pick_device("auto")
    operator = case.labels["operator"]
    way = case.labels["way"]
    if device.type == "cpu" and way == "fused":
        return {"reason": "a CPU runs the definition"}
    setting = str(cfg.setting)
    op = make_operators(setting, device)[operator]
    function = WAYS[way](op)
    sizes = SHAPES[setting]
    sets = [draw_inputs(operator, sizes, device) for _ in range(INPUT_SETS)]
    figures: Figures = {"sizes": sizes}
    for name, backward in (("forward_", False), ("", True)):
        runs = {"case": make_runner(function, sets, cfg.steps, backward)}
        if way != "eager":
            runs["eager"] = make_runner(op.definition, sets, cfg.steps, backward)
        seconds = time_in_turn(runs, cfg.repeats, device, measure=measure_device_seconds)
        figures |= summarise(f"{name}us", [1e6 * s / cfg.steps for s in seconds["case"]])
        speed = compute_ratios(seconds.get("eager", seconds["case"]), seconds["case"])
        figures |= summarise(f"{name}speed", speed)

    rate = measure_rates(device)
    gb_s = count_bytes(op, sets[0]) / figures["us"] / 1e3
    # A backward pass takes twice the FLOPs of its forward pass, so the two passes together take 3 *
    # `op.flops`.
    tflops = 3 * op.flops / figures["us"] / 1e6
    return figures | {
        "gb_s": gb_s,
        "share_of_copy_rate": gb_s / rate["copy_gb_s"],
        "tflops": tflops,
        "share_of_product_rate": tflops
        / rate.get("bf16_product_tflops", rate["fp32_product_tflops"]),
    }
