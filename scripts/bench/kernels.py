"""Each fused operator beside its definition, run as it is and compiled.

    python -m scripts.bench kernels
    python -m scripts.bench kernels setting=b256 steps=50

Time of the forward pass and of both passes; bytes that must be moved over the time, as a share of the measured copy
rate; FLOPs over the time, as a share of the measured matrix product rate. Several input sets are used in turn, so that
no run finds its inputs in the cache. On a CPU the operators are their definitions, so only the harness is exercised.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.kernels.add_norm import add_norm, fused_add_norm
from accel.kernels.bidirectional_ssd import bidirectional_ssd, bidirectional_ssd_flops
from accel.kernels.fused_ssd import fused_bidirectional_ssd
from accel.kernels.local_mix import fused_local_mix, local_mix, local_mix_flops
from scripts.bench.report import table, write_result
from scripts.bench.settings import BenchConfig, parse
from scripts.bench.timing import Spread, interleaved
from scripts.doctor import rates
from training.run import pick_device

SHAPES = {"tiny": (2, 64, 64, 32, 16), "s32": (32, 256, 384, 64, 64), "s256": (256, 256, 384, 64, 64)}
SHAPES["b256"] = (256, 256, 768, 64, 64)
"""Setting -> samples, tokens, width, head dim, state size."""
INPUT_SETS = 4


class Op(NamedTuple):
    """One operator: how to make inputs, both ways to compute it, and what the algorithm needs."""

    name: str
    inputs: Callable[[], list[Tensor]]
    definition: Callable[..., Any]
    fused: Callable[..., Any]
    bytes_forward: int
    bytes_backward: int
    flops: int
    """Of the forward pass; the backward pass has twice as many."""


def operators(setting: str, device: torch.device) -> list[Op]:
    B, L, D, P, N = SHAPES[setting]
    inner, rows = 2 * D, int(L**0.5)
    K, mixed, dtype = inner // P, inner + 4 * N, torch.bfloat16

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    def stream() -> list[Tensor]:
        vectors = [normal(B, D) for _ in range(3)]
        return [normal(B, L, D), vectors[0], normal(B, L, D, dtype=torch.float32), *vectors[1:]]

    def scan() -> list[Tensor]:
        dt = torch.nn.functional.softplus(torch.randn(B, L, 2, K, device=device) - 4.0).requires_grad_()
        A = (-16.0 * torch.rand(2, K, device=device)).requires_grad_()
        return [normal(B, L, K, P), dt, A, normal(B, L, 2, N), normal(B, L, 2, N), normal(K, dtype=torch.float32)]

    def image() -> list[Tensor]:
        return [normal(B, L, mixed), normal(mixed, 1, 3, 3, dtype=torch.float32), normal(mixed, dtype=torch.float32)]

    grid, tokens = (rows, rows), B * L
    of_scan = tokens * (2 * inner + 4 * N) * 2 + tokens * 4 * K * 4
    return [
        Op("add_norm", stream, add_norm, fused_add_norm, 12 * tokens * D, 18 * tokens * D, 0),
        Op(
            "bidirectional_ssd",
            scan,
            bidirectional_ssd,
            fused_bidirectional_ssd,
            of_scan,
            2 * of_scan,
            B * bidirectional_ssd_flops(L, K, P, N),
        ),
        Op(
            "local_mix",
            image,
            partial(local_mix, grid=grid),
            partial(fused_local_mix, grid=grid),
            4 * tokens * mixed,
            6 * tokens * mixed,
            B * local_mix_flops(L, mixed),
        ),
    ]


def runner(function: Callable[..., Any], sets: list[list[Tensor]], steps: int, backward: bool) -> Callable[[], None]:
    """`steps` calls, each on the next input set; with `backward` through both passes."""
    with torch.no_grad():
        first = function(*sets[0])
    weights = [torch.randn_like(t) for t in (first if isinstance(first, tuple) else (first,))]

    def run() -> None:
        for i in range(steps):
            inputs = sets[i % len(sets)]
            with torch.set_grad_enabled(backward):
                out = function(*inputs)
            if backward:
                torch.autograd.grad(out, inputs, weights)

    return run


def measure(op: Op, cfg: BenchConfig, device: torch.device, ceilings: dict[str, float]) -> list[dict[str, Any]]:
    sets = [op.inputs() for _ in range(INPUT_SETS)]
    ways = {"eager": op.definition, "compiled": torch.compile(op.definition), "fused": op.fused}
    entries = []
    for backward in (False, True):
        runs = {name: runner(function, sets, cfg.steps, backward) for name, function in ways.items()}
        for run in runs.values():
            run()
        taken = interleaved(runs, cfg.repeats, device)
        for name, seconds in taken.items():
            spread = Spread.of([1e6 * s / cfg.steps for s in seconds])
            moved = op.bytes_forward + (op.bytes_backward if backward else 0)
            flops = op.flops * (3 if backward else 1)
            gb_s, tflops = moved / spread.median / 1e3, flops / spread.median / 1e6
            entries.append(
                {
                    "name": f"{op.name} {name}{', both passes' if backward else ''}",
                    **spread.as_json("us"),
                    "gb_s": gb_s,
                    "share_of_copy_rate": gb_s / ceilings["copy_gb_s"],
                    "tflops": tflops,
                    "share_of_product_rate": tflops / ceilings["product_tflops"],
                }
            )
    return entries


def main(words: list[str]) -> None:
    cfg, _ = parse(BenchConfig, "kernels", words, __doc__ or "")
    assert cfg.setting is not None
    assert cfg.out is not None
    device = pick_device("auto")
    found = rates(device)
    products = found.get("bf16_product_tflops", found["fp32_product_tflops"])
    ceilings = {"copy_gb_s": found["copy_gb_s"], "product_tflops": products}
    entries = [e for op in operators(cfg.setting, device) for e in measure(op, cfg, device, ceilings)]
    head = ("operator", "µs", "range", "GB/s", "of copy rate", "TFLOP/s", "of product rate")
    rows: list[tuple[object, ...]] = [head]
    for e in entries:
        spread = f"{e['us_min']:.1f}–{e['us_max']:.1f}"
        shares = (f"{e['share_of_copy_rate']:.0%}", f"{e['tflops']:.2f}", f"{e['share_of_product_rate']:.0%}")
        rows.append((e["name"], f"{e['us']:.1f}", spread, f"{e['gb_s']:.0f}", *shares))
    text = table(rows)
    print(f"\n{text}")
    B, L, D, P, N = SHAPES[cfg.setting]
    shape = {"samples": B, "tokens": L, "width": D, "head_dim": P, "state_dim": N}
    write_result(cfg.out, {"setting": cfg.setting, "shape": shape, "ceilings": ceilings, "ops": entries}, device, text)
