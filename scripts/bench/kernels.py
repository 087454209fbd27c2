"""Each fused operator beside its definition, run as it is and compiled, and beside what other
packages offer.

    python -m scripts.bench kernels
    python -m scripts.bench kernels setting=b256 steps=50

Time of the forward pass and of both passes, in turn with the definition as it is; bytes that must
be moved over the time, as a share of the measured copy rate; FLOPs over the time, as a share of the
measured matrix product rate. Several input sets are used in turn, so that no run finds its inputs
in the cache. On a GPU, mamba-ssm, Liger and fla take part where they are installed (peers.py). A
CPU runs the definitions, as they are and compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.kernels.add_norm import add_norm, fused_add_norm
from accel.kernels.bidirectional_ssd import bidirectional_ssd, bidirectional_ssd_flops
from accel.kernels.fused_ssd import fused_bidirectional_ssd
from accel.kernels.local_mix import fused_local_mix, local_mix, local_mix_flops
from accel.kernels.qk_rope import fused_qk_rope, qk_rope
from accel.kernels.ssd_mixed import fused_mixed_ssd, mixed_ssd
from accel.kernels.swiglu import fused_swiglu, silu_product
from common.text import first_line
from models.mixers.attention import axial_rotations
from scripts.bench import peers
from scripts.bench.report import Bar, entries_table, with_difference
from scripts.bench.rows import LEFT_OUT, Benchmark, Row
from scripts.bench.settings import BenchConfig
from scripts.bench.workload import Kept
from scripts.timing import Spread, interleaved, rates

SHAPES = {
    "tiny": (2, 64, 64, 32, 16),
    "s32": (32, 256, 384, 64, 64),
    "s256": (256, 256, 384, 64, 64),
}
SHAPES["b256"] = (256, 256, 768, 64, 64)
"""Setting -> samples, tokens, width, head dim, state size."""
ON_A_CPU = "a CPU runs the definition"
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


def swiglu(joined: Tensor) -> Tensor:
    return silu_product(*joined.chunk(2, dim=-1))


def operators(setting: str, device: torch.device) -> list[Op]:
    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    side = int(SHAPES[setting][1] ** 0.5)
    rotations = axial_rotations((side, side), SHAPES[setting][3]).to(device)
    add, *others = of_a_block(*SHAPES[setting][:3], rotations, normal)
    return [add, *of_the_scan(*SHAPES[setting], normal), *others]


def of_a_block(
    B: int, L: int, D: int, rotations: Tensor, normal: Callable[..., Tensor]
) -> list[Op]:
    """What stands around products and mixers, and in attention."""
    P = rotations.shape[2]
    n = B * L * D

    def stream() -> list[Tensor]:
        vectors = [normal(B, D) for _ in range(3)]
        return [normal(B, L, D), vectors[0], normal(B, L, D, dtype=torch.float32), *vectors[1:]]

    def queries() -> list[Tensor]:
        return [normal(B, L, 3, D // P, P), *(normal(P, dtype=torch.float32) for _ in range(2))]

    def placing(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda qkv, *weights: function(qkv, *weights, rotations)

    return [
        Op("add_norm", stream, add_norm, fused_add_norm, 12 * n, 18 * n, 0),
        Op("swiglu", lambda: [normal(B, L, 4 * D)], swiglu, fused_swiglu, 12 * n, 20 * n, 0),
        Op("qk_rope", queries, placing(qk_rope), placing(fused_qk_rope), 8 * n, 16 * n, 0),
    ]


def of_the_scan(B: int, L: int, D: int, P: int, N: int, normal: Callable[..., Tensor]) -> list[Op]:
    """The scan, what is before it, and all of it from the projection on."""
    inner = 2 * D
    rows = int(L**0.5)
    tokens = B * L
    K = inner // P
    mixed = inner + 4 * N
    grid = (rows, rows)

    def decays() -> tuple[Tensor, Tensor]:
        dt_bias = (normal(2, K, dtype=torch.float32).detach() - 4.0).requires_grad_()
        return dt_bias, (16.0 * torch.rand_like(dt_bias)).log().requires_grad_()

    def scan() -> list[Tensor]:
        groups = normal(B, L, 2, N), normal(B, L, 2, N)
        return [
            normal(B, L, K, P),
            normal(B, L, 2, K),
            *decays(),
            *groups,
            normal(K, dtype=torch.float32),
        ]

    def gated_scan() -> list[Tensor]:
        return [*scan(), normal(B, L, K, P), normal(K, P, dtype=torch.float32)]

    def image(channels: int) -> list[Tensor]:
        taps = normal(mixed, 1, 3, 3, dtype=torch.float32)
        return [normal(B, L, channels), taps, normal(mixed, dtype=torch.float32)]

    def projection() -> list[Tensor]:
        heads = [normal(*shape, dtype=torch.float32) for shape in ((K,), (K, P))]
        return [*image(inner + mixed + 2 * K), *decays(), *heads]

    def on_grid(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, weight, bias, *rest: function(x, weight, bias, grid, *rest)

    of_scan = tokens * (2 * inner + 4 * N + 2 * K) * 2  # x, B, C and dt in, y out
    gated = of_scan + tokens * inner * 2
    all_of_it = tokens * (2 * inner + mixed + 2 * K) * 2  # the projection in, y out
    scans = bidirectional_ssd, fused_bidirectional_ssd
    flops = B * bidirectional_ssd_flops(L, K, P, N)
    mixing = B * local_mix_flops(L, mixed)
    mixes = on_grid(local_mix), on_grid(fused_local_mix)
    alls = on_grid(mixed_ssd), on_grid(fused_mixed_ssd)
    return [
        Op("bidirectional_ssd", scan, *scans, of_scan, 2 * of_scan, flops),
        Op("bidirectional_ssd, gated", gated_scan, *scans, gated, 2 * gated, flops),
        Op(
            "local_mix",
            lambda: image(mixed),
            *mixes,
            4 * tokens * mixed,
            6 * tokens * mixed,
            mixing,
        ),
        Op("ssd_mixed", projection, *alls, all_of_it, 2 * all_of_it, flops + mixing),
    ]


def runner(
    function: Callable[..., Any], sets: list[list[Tensor]], steps: int, backward: bool
) -> Callable[[], None]:
    """`steps` calls, each on the next input set; with `backward` through both passes. Runs them
    once, to warm up."""
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


class Kernels:
    """What the rows of a command share: inputs of one operator at a time, measured rates, other
    packages."""

    def __init__(self, cfg: BenchConfig, device: torch.device) -> None:
        self.cfg = cfg
        self.device = device
        self.inputs: Kept[list[list[Tensor]]] = Kept()
        self.rates: Kept[dict[str, float]] = Kept()

    def measure(self, op: Op, function: Callable[..., Any], backward: bool) -> dict[str, Any]:
        """One way to compute an operator, timed in turn with its definition, both on the same input
        sets."""
        sets = self.inputs.get(op.name, lambda: [op.inputs() for _ in range(INPUT_SETS)])
        runs = {"own": runner(function, sets, self.cfg.steps, backward)}
        lacking = None
        if function is not op.definition:
            try:
                runs["eager"] = runner(op.definition, sets, self.cfg.steps, backward)
            except torch.OutOfMemoryError as error:
                lacking = (
                    f"without a ratio, since the definition is out of memory: {first_line(error)}"
                )
        taken = interleaved(runs, self.cfg.repeats, self.device)
        spread = Spread.of([1e6 * s / self.cfg.steps for s in taken["own"]])
        ratio = None if lacking else Spread.of_ratio(taken.get("eager", taken["own"]), taken["own"])
        moved = op.bytes_forward + (op.bytes_backward if backward else 0)
        gb_s = moved / spread.median / 1e3
        tflops = op.flops * (3 if backward else 1) / spread.median / 1e6
        rate = self.rates.get("rates", lambda: rates(self.device))
        product = rate.get("bf16_product_tflops", rate["fp32_product_tflops"])
        return {
            **spread.as_json("us"),
            **(ratio.as_json("speed") if ratio else {"speed": None}),
            "gb_s": gb_s,
            "share_of_copy_rate": gb_s / rate["copy_gb_s"],
            "tflops": tflops,
            "share_of_product_rate": tflops / product,
            "remark": lacking,
        }


def plan(cfg: BenchConfig, overrides: list[str], device: torch.device) -> Iterator[Row]:
    assert cfg.setting is not None
    others, absent = peers.found() if device.type == "cuda" else ({}, {})
    shared = Kernels(cfg, device)
    labels = {
        "shape": dict(
            zip(
                ("samples", "tokens", "width", "head_dim", "state_dim"),
                SHAPES[cfg.setting],
                strict=True,
            )
        )
    }
    for op in operators(cfg.setting, device):
        ways = {"eager": op.definition, "compiled": torch.compile(op.definition), "fused": op.fused}
        for passes, backward in (("", False), (BOTH, True)):
            for way, function in (ways | others.get(op.name, {})).items():
                name = f"{op.name} {way}{passes}"
                reason = LEFT_OUT if way == "compiled" and not cfg.inductor else None
                reason = ON_A_CPU if way == "fused" and device.type == "cpu" else reason
                measure = partial(shared.measure, op, function, backward)
                seconds = 20 if way == "compiled" else 4
                yield Row(
                    name,
                    partial(dict[str, Any], reason=reason) if reason else measure,
                    seconds,
                    labels,
                )
    for package, reason in absent.items():
        yield Row(package, partial(dict[str, Any], reason=reason), 0, labels)


COLUMNS = {
    "µs": "{us:.1f}",
    "quartiles": "{us_q1:.1f}–{us_q3:.1f}",
    "×eager": "{speed:.2f}",
    "its quartiles": "{speed_q1:.2f}–{speed_q3:.2f}",
    "GB/s": "{gb_s:.0f}",
    "of copy rate": "{share_of_copy_rate:.0%}",
    "TFLOP/s": "{tflops:.2f}",
    "of product rate": "{share_of_product_rate:.0%}",
}


def texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    shapes = dict.fromkeys(
        ", ".join(f"{value} {name}" for name, value in e["shape"].items()) for e in entries
    )
    return [*shapes, entries_table(COLUMNS, with_difference(entries, "speed"))]


def bars(entries: Sequence[dict[str, Any]]) -> tuple[str, list[Bar]]:
    both = [
        e
        for e in entries
        if e["name"].endswith(BOTH) and e.get("speed") and f" eager{BOTH}" not in e["name"]
    ]
    drawn = [
        Bar(e["name"].removesuffix(BOTH), e["speed"], f"x{e['speed']:.2f}  {e['us']:.0f} us")
        for e in both
    ]
    return "forward and backward, times as fast as eager", drawn


BENCHMARKS = {"kernels": Benchmark(BenchConfig, plan, texts, __doc__ or "", bars)}
