"""Each fused operator beside its definition, run as it is and compiled, and beside what other packages offer.

    python -m scripts.bench kernels
    python -m scripts.bench kernels setting=b256 steps=50

Time of the forward pass and of both passes; bytes that must be moved over the time, as a share of the measured copy
rate; FLOPs over the time, as a share of the measured matrix product rate. Several input sets are used in turn, so that
no run finds its inputs in the cache. On a GPU, mamba-ssm, Liger and fla take part where they are installed (peers.py).
On a CPU the operators are their definitions, so only the harness is exercised.
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
from scripts.bench import peers
from scripts.bench.report import Bar, bar_chart, entries_table, publish
from scripts.bench.settings import BenchConfig, parse
from scripts.bench.timing import Spread, interleaved, rates, times_as_fast
from scripts.bench.workload import attempt
from training.environment import pick_device

SHAPES = {"tiny": (2, 64, 64, 32, 16), "s32": (32, 256, 384, 64, 64), "s256": (256, 256, 384, 64, 64)}
SHAPES["b256"] = (256, 256, 768, 64, 64)
"""Setting -> samples, tokens, width, head dim, state size."""
INPUT_SETS = 4
BOTH = ", both passes"


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
        dt_bias = (torch.randn(2, K, device=device) - 4.0).requires_grad_()
        A_log = (16.0 * torch.rand(2, K, device=device)).log().requires_grad_()
        groups = normal(B, L, 2, N), normal(B, L, 2, N)
        return [normal(B, L, K, P), normal(B, L, 2, K), dt_bias, A_log, *groups, normal(K, dtype=torch.float32)]

    def gated_scan() -> list[Tensor]:
        return [*scan(), normal(B, L, K, P), normal(K, P, dtype=torch.float32)]

    def image() -> list[Tensor]:
        return [normal(B, L, mixed), normal(mixed, 1, 3, 3, dtype=torch.float32), normal(mixed, dtype=torch.float32)]

    grid, tokens = (rows, rows), B * L
    of_scan = tokens * (2 * inner + 4 * N + 2 * K) * 2  # x, B, C and dt in, y out
    gated = of_scan + tokens * inner * 2
    scans = bidirectional_ssd, fused_bidirectional_ssd
    mixes = partial(local_mix, grid=grid), partial(fused_local_mix, grid=grid)
    scan_flops = B * bidirectional_ssd_flops(L, K, P, N)
    return [
        Op("add_norm", stream, add_norm, fused_add_norm, 12 * tokens * D, 18 * tokens * D, 0),
        Op("bidirectional_ssd", scan, *scans, of_scan, 2 * of_scan, scan_flops),
        Op("bidirectional_ssd, gated", gated_scan, *scans, gated, 2 * gated, scan_flops),
        Op("local_mix", image, *mixes, 4 * tokens * mixed, 6 * tokens * mixed, B * local_mix_flops(L, mixed)),
    ]


def runner(function: Callable[..., Any], sets: list[list[Tensor]], steps: int, backward: bool) -> Callable[[], None]:
    """`steps` calls, each on the next input set; with `backward` through both passes. Runs them once, to warm up."""
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

    run()
    return run


def measure(
    op: Op, others: dict[str, Callable[..., Any]], cfg: BenchConfig, device: torch.device, ceilings: dict[str, float]
) -> list[dict[str, Any]]:
    sets = [op.inputs() for _ in range(INPUT_SETS)]
    ways = {"eager": op.definition, "compiled": torch.compile(op.definition), "fused": op.fused} | others
    entries: list[dict[str, Any]] = []
    for backward in (False, True):
        passes = BOTH if backward else ""
        runs = {}
        for way, function in ways.items():
            # Another package may fail in any way; ours may run out of memory, in eager.
            errors = Exception if way in others else torch.OutOfMemoryError
            made = attempt(partial(runner, function, sets, cfg.steps, backward), errors)
            if isinstance(made, str):
                entries.append({"name": f"{op.name} {way}{passes}", "error": made})
            else:
                runs[way] = made
        taken = interleaved(runs, cfg.repeats, device)
        for way, seconds in taken.items():
            spread = Spread.of([1e6 * s / cfg.steps for s in seconds])
            moved = op.bytes_forward + (op.bytes_backward if backward else 0)
            flops = op.flops * (3 if backward else 1)
            gb_s, tflops = moved / spread.median / 1e3, flops / spread.median / 1e6
            entries.append(
                {
                    "name": f"{op.name} {way}{passes}",
                    **spread.as_json("us"),
                    "times_eager": times_as_fast(taken["eager"], seconds) if "eager" in taken else None,
                    "gb_s": gb_s,
                    "share_of_copy_rate": gb_s / ceilings["copy_gb_s"],
                    "tflops": tflops,
                    "share_of_product_rate": tflops / ceilings["product_tflops"],
                }
            )
    return entries


COLUMNS = {
    "µs": "{us:.1f}",
    "range": "{us_min:.1f}–{us_max:.1f}",
    "×eager": "{times_eager:.2f}",
    "GB/s": "{gb_s:.0f}",
    "of copy rate": "{share_of_copy_rate:.0%}",
    "TFLOP/s": "{tflops:.2f}",
    "of product rate": "{share_of_product_rate:.0%}",
}


def main(words: list[str]) -> None:
    cfg, _ = parse(BenchConfig, "kernels", words, __doc__ or "")
    assert cfg.setting is not None
    device = pick_device("auto")
    rate = rates(device)
    products = rate.get("bf16_product_tflops", rate["fp32_product_tflops"])
    ceilings = {"copy_gb_s": rate["copy_gb_s"], "product_tflops": products}
    others, absent = peers.found() if device.type == "cuda" else ({}, {"all": "they need a GPU"})
    entries: list[dict[str, Any]] = []
    for op in operators(cfg.setting, device):
        entries += measure(op, others.get(op.name, {}), cfg, device, ceilings)
    notes = "\n".join(f"Not compared with {name}: {reason}" for name, reason in absent.items())
    shape = dict(zip(("samples", "tokens", "width", "head_dim", "state_dim"), SHAPES[cfg.setting], strict=True))
    found = {"shape": shape, "ceilings": ceilings, "ops": entries, "absent": absent}
    file = publish(cfg, [], device, found, entries_table(COLUMNS, entries), notes)
    bars = [
        Bar(e["name"].removesuffix(BOTH), e["times_eager"], f"x{e['times_eager']:.2f}  {e['us']:.0f} us")
        for e in entries
        if e["name"].endswith(BOTH) and e.get("times_eager") is not None
    ]
    if bars:
        bar_chart(file, "forward and backward, times as fast as eager", device, bars)
