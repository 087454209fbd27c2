"""Where a step's time goes: work by shapes, times by op, and shares of what the device can do."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from scripts.bench.hotspots import Call, Recorder, plan, ranked, spent, texts
from scripts.bench.settings import BenchConfig, parse
from torch.autograd import DeviceType

from accel.kernels.add_norm import fused_add_norm
from accel.kernels.bidirectional_ssd import bidirectional_ssd_flops
from accel.kernels.local_mix import local_mix_flops
from accel.kernels.ssd_mixed import fused_mixed_ssd
from scripts.bench import hotspots
from tests.harness import tiny_training

CPU = torch.device("cpu")
QUICK = ["setting=tiny", "steps=1", "repeats=1", "runtime.device=cpu"]
RATES = {"copy_gb_s": 10.0, "fp32_product_tflops": 0.1, "bf16_product_tflops": 0.4}


def recorded(run) -> dict[str, Call]:
    """Op -> its last call."""
    with Recorder() as recorder:
        run()
    return {
        call.op.removeprefix("aten::").removeprefix("fastlatent::"): call for call in recorder.calls
    }


def work_of(run, op: str) -> tuple[int | None, int | None]:
    call = recorded(run)[op]
    return call.bytes, call.flops


def test_bytes_are_what_an_op_reads_and_writes():
    a = torch.randn(4, 8)
    b = torch.randn(8, 2, dtype=torch.bfloat16)
    assert work_of(lambda: a + a, "add") == (256, None)  # 128 in, once, and 128 out
    assert work_of(lambda: a.clone().add_(a), "add_") == (3 * 128, None)
    assert work_of(lambda: a.clone().copy_(a), "copy_") == (2 * 128, None)
    assert work_of(lambda: a.clone().zero_(), "zero_") == (128, None)
    assert work_of(lambda: a + a[:1].expand(4, 8), "add") == (128 + 32 + 128, None)
    assert work_of(lambda: a.t().detach(), "t") == (0, None)
    assert work_of(lambda: a[torch.tensor([1])], "index") == (32 + 8 + 32, None)
    assert work_of(lambda: torch.cat([a, a.clone(), b.float().t()]), "cat") == (
        2 * (256 + 64),
        None,
    )
    assert work_of(lambda: torch._foreach_add_([a.clone(), a.clone()], 1.0), "_foreach_add_") == (
        4 * 128,
        None,
    )
    assert work_of(
        lambda: a.clone().index_put_((torch.tensor([1]),), torch.ones(8)), "index_put_"
    ) == (None, None)


def test_products_have_their_flops():
    a = torch.randn(4, 8)
    b = torch.randn(8, 2)
    x = torch.randn(2, 6, 5, 5, requires_grad=True)
    taps = torch.randn(6, 1, 3, 3, requires_grad=True)
    q = torch.randn(2, 3, 16, 8, requires_grad=True)
    assert work_of(lambda: a @ b, "mm") == (4 * (32 + 16 + 8), 2 * 4 * 8 * 2)
    assert work_of(lambda: torch.addmm(b[0], a, b), "addmm") == (
        4 * (2 + 32 + 16 + 8),
        2 * 4 * 8 * 2,
    )

    def convolve():
        torch.autograd.grad(
            torch.nn.functional.conv2d(x, taps, padding=1, groups=6).sum(), [x, taps]
        )

    forward = 2 * 9 * x.numel()  # depthwise
    assert work_of(convolve, "convolution")[1] == forward
    assert work_of(convolve, "convolution_backward")[1] == 2 * forward

    def attend():
        torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, q, q).sum(), q)

    found = {name: call.flops for name, call in recorded(attend).items() if "attention" in name}
    product = 2 * 2 * 3 * 16 * 16 * 8
    assert sorted(flops for flops in found.values() if flops) == [2 * product, 5 * product]


def test_our_operators_have_their_own_formulas():
    """The one that only calls others is those."""
    B = 2
    L = 16
    K = 2
    P = 16
    N = 16
    E = K * P + 4 * N
    taps = torch.randn(E, 1, 3, 3)
    vector = torch.randn(2, K)
    weight = torch.randn(K, P)
    inputs = [
        t.requires_grad_() for t in (torch.randn(B, L, K * P + E + 2 * K), taps, torch.randn(E))
    ]
    with torch.enable_grad():
        run = recorded(
            lambda: torch.autograd.grad(
                fused_mixed_ssd(*inputs, (4, 4), vector, vector, torch.randn(K), weight).sum(),
                inputs,
            )
        )
    assert not {"ssd_mixed", "ssd_mixed_backward"} & run.keys()
    scan = B * bidirectional_ssd_flops(L, K, P, N)
    mixing = B * local_mix_flops(L, E)
    assert (run["ssd_gated"].flops, run["ssd_backward"].flops) == (
        scan,
        2 * scan + 8 * B * L * L * N,
    )
    assert (run["local_mix"].flops, run["local_mix_backward"].flops) == (mixing, 2 * mixing)
    assert run["local_mix"].bytes == 4 * (2 * B * L * E + 9 * E + E)
    assert run["ssd_decays"].flops is None
    stream = [torch.randn(2, 4, 8, dtype=torch.bfloat16), torch.randn(2, 8), torch.randn(2, 4, 8)]
    added = recorded(lambda: fused_add_norm(*stream, torch.randn(2, 8), torch.randn(2, 8)))[
        "add_norm"
    ]
    # h, z, and 1/rms of each token
    assert added.bytes == 64 * (2 + 4) + 3 * 16 * 4 + 64 * (2 + 4) + 8 * 4
    assert added.shapes == "bf16 2×4×8, fp32 2×8, fp32 2×4×8, fp32 2×8, fp32 2×8"
    assert added.dtype == "bf16"


def host(name: str, us: float = 0.0, inner=(), kernels=(), annotation=False) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "name": name,
            "cpu_time_total": us,
            "cpu_children": list(inner),
            "kernels": list(kernels),
        },
        **{"device_type": DeviceType.CPU, "is_user_annotation": annotation},
    )


def kernel(name: str, us: float, annotation=False) -> SimpleNamespace:
    elapsed = SimpleNamespace(elapsed_us=lambda: us)
    return SimpleNamespace(
        **{"name": name, "duration": us, "device_type": DeviceType.CUDA},
        **{"time_range": elapsed, "is_user_annotation": annotation},
    )


def test_on_a_gpu_an_op_has_the_time_of_the_kernels_launched_inside_it():
    """As the profiler lists them: a library's kernel at the op, Triton's and a reduction's inside
    an operator of ours, one that no op launched, and the ranges' own bars on the device's side."""
    nvjet = kernel("nvjet", 5)
    add_norm = kernel("add_norm_kernel", 7)
    reduce = kernel("sum", 1)
    noise = kernel("n", 2)
    ours = host("fastlatent::add_norm", 90, [host("aten::sum", 30, kernels=[reduce])], [add_norm])
    events = [
        host("fastlatent op 0", 50, [host("aten::mm", 40, kernels=[nvjet])], annotation=True),
        host("fastlatent op 1", 100, [ours], annotation=True),
        ours,
        host("fastlatent op 2", 10, [host("aten::view", 5)]),
        *(nvjet, add_norm, reduce, noise, noise, kernel("fastlatent op 1", 99, annotation=True)),
    ]
    marked, alone = spent(events, cuda=True)
    assert marked == {0: {"nvjet": 5}, 1: {"add_norm_kernel": 7, "sum": 1}, 2: {}}
    assert alone == {"n": 4}
    on_host, _ = spent(events, cuda=False)
    assert on_host == {0: {"aten::mm": 40}, 1: {"fastlatent::add_norm": 90}, 2: {"aten::view": 5}}


def test_equal_calls_are_one_row_and_work_is_held_against_the_measured_rates(monkeypatch):
    mm = Call("aten::mm", "bf16 4×4, bf16 4×4", 3_000_000, 200_000_000, "bf16")
    calls = [
        mm,
        Call("aten::add", "fp32 4", 8, None, "fp32"),
        mm,
        Call("aten::view", "fp32 4", 0, None, "fp32"),
    ]
    times = {
        0: Counter(a=1500.0, b=100.0),
        1: Counter(add=400.0),
        2: Counter(a=400.0),
        3: Counter(),
    }
    found, total = ranked(calls, times, Counter(noise=600.0), RATES)
    assert total == 3.0
    assert [(row["op"], row["kernel"], row["calls"]) for row in found] == [
        *(("aten::mm", "a", 2), (None, "noise", None), ("aten::add", "add", 1))
    ]
    first = found[0]
    assert (first["ms"], first["bytes"], first["flops"]) == (2.0, 6_000_000, 400_000_000)
    assert first["share"] == pytest.approx(2 / 3)
    assert first["of_copy_rate"] == pytest.approx(3.0 / 10.0)  # 6 MB in 2 ms: 3 GB/s
    assert first["of_product_rate"] == pytest.approx(0.2 / 0.4)
    assert (found[1]["bytes"], found[1]["of_copy_rate"]) == (None, None)
    assert found[2]["of_product_rate"] is None
    in_fp16 = mm._replace(dtype="fp16")
    assert ranked([in_fp16], {0: Counter(a=1.0)}, Counter(), RATES)[0][0]["of_product_rate"] is None
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    tf32 = RATES | {"tf32_product_tflops": 0.2}
    in_fp32 = mm._replace(dtype="fp32")
    assert ranked([in_fp32], {0: Counter(a=2000.0)}, Counter(), tf32)[0][0][
        "of_product_rate"
    ] == pytest.approx(0.5)


def test_one_unknown_part_makes_a_sum_unknown():
    assert hotspots.sum_of([1, 2]) == 3
    assert hotspots.sum_of([1, None]) is None


def rows_of(*words: str):
    cfg, overrides = parse(BenchConfig, "hotspots", [*QUICK, *words], "")
    return list(plan(cfg, overrides, CPU))


def test_a_row_for_each_model_of_the_settings_size_or_for_the_one_that_is_named():
    assert [row.name for row in rows_of()] == ["mamba_xs", "ssd_mlp_xs", "dit_xs"]
    rows = rows_of("setting=b256")
    assert [row.name for row in rows] == ["mamba_b", "ssd_mlp_b", "dit_b"]
    assert "model=dit_b" in rows[2].measure.args[0]
    assert not any("ssd_mlp" in word for word in rows[2].measure.args[0])
    (row,) = rows_of("model=conv_xs", "runtime.tf32=false")
    assert row.name == "conv_xs"
    words = row.measure.args[0]
    assert words.index("runtime=fast") < words.index("runtime.tf32=false")
    with pytest.raises(ValueError, match=r"runtime.compile=true: hotspots looks at an eager step"):
        rows_of("runtime=max")


def test_a_step_is_measured_and_shown(monkeypatch):
    monkeypatch.setattr(hotspots, "measured_rates", lambda device: RATES)
    row = rows_of("runtime=fast")[1]
    entry = json.loads(json.dumps({"name": row.name, **row.measure()}))
    top = entry["top"]
    assert len(top) == hotspots.TOP
    assert [r["ms"] for r in top] == sorted((r["ms"] for r in top), reverse=True)
    assert sum(r["ms"] for r in top) + entry["rest_ms"] == pytest.approx(entry["busy_ms"])
    assert all(r["bytes"] is not None for r in top)
    assert entry["batch_size"] == 16
    assert entry["step_ms"] > 0
    assert any(r["of_product_rate"] for r in top)
    missing = {"name": "dit_xs", "error": "out of memory"}
    shown = texts([entry, missing])
    assert len(shown) == 2
    assert shown[0].startswith("ssd_mlp_xs: a step of 16 samples takes ")
    assert "unknown" in shown[0]
    assert shown[1] == "dit_xs: out of memory"
    assert texts([]) == []


def test_looking_changes_nothing():
    looked, alone = (tiny_training("mamba", fused_adamw=True) for _ in range(2))
    with Recorder() as recorder:
        loss = looked.take_step().loss
    assert torch.equal(loss, alone.take_step().loss)
    for a, b in zip(looked.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert any(call.op == "aten::_fused_adamw_" and call.bytes for call in recorder.calls)


@pytest.mark.gpu
def test_a_gpus_time_goes_to_ops_and_our_kernels_to_our_operators():
    words = ["model=mamba_s", "data=synthetic", "data.count=256", "batch_size=32", "runtime=fast"]
    words += [f"runtime.fused_{name}=true" for name in ("add_norm", "scan", "conv")]
    entry = hotspots.measure(words, 2, 2, torch.device("cuda"))
    ours = [row for row in entry["top"] if (row["op"] or "").startswith("fastlatent::")]
    assert len(ours) >= 4
    assert all(row["op"].split("::")[1].split("_")[0] in row["kernel"] for row in ours)
    assert all(0 < row["of_copy_rate"] < 3 for row in ours)
    assert 0.3 < entry["busy_ms"] / entry["step_ms"] < 1.2
