"""What each known mistake costs here.

    python -m scripts.bench antipatterns setting=s32 runtime=fast

Each mistake is measured in turn with the same work done right. Factors above 1 are what the mistake costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from accel.kernels.add_norm import add_norm
from scripts.bench.report import table, write_result
from scripts.bench.settings import BenchConfig, parse
from scripts.bench.timing import Spread, fresh_compiler, interleaved, seconds, times_as_fast
from scripts.bench.workload import Workload
from training.config.compose import compose
from training.environment import pick_device


class Mistake(NamedTuple):
    """The same work twice."""

    name: str
    wrong: Callable[[], object]
    right: Callable[[], object]
    reason: str | None = None
    """Why it cannot be measured here."""


def each_step(workload: Workload, steps: int, extra: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(steps):
            extra(workload.one_step())

    return run


def random_autoencoder(device: torch.device) -> Any:
    """An autoencoder of Stable Diffusion's shape with random weights, for its time; a tiny one without a GPU."""
    from diffusers import AutoencoderKL

    make: Any = AutoencoderKL
    widths = (128, 256, 512, 512) if device.type == "cuda" else (8, 8)
    encoder = make(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        layers_per_block=2,
        norm_num_groups=min(32, widths[0]),
    )
    return encoder.to(device).eval()


def encoder_in_the_loop(workload: Workload, steps: int) -> Callable[[], None]:
    """The steps with an encoder before each."""
    encoder = random_autoencoder(workload.device)
    scale = 2 ** (len(encoder.config.block_out_channels) - 1)
    spec = workload.loader.spec
    images = torch.randn(workload.batch_size, 3, spec.height * scale, spec.width * scale, device=workload.device)

    @torch.no_grad()
    def run() -> None:
        for _ in range(steps):
            with torch.amp.autocast(workload.device.type, torch.bfloat16):
                for part in images.split(32):
                    encoder.encode(part)
            with torch.enable_grad():
                workload.one_step()

    return run


def changing_shapes(overrides: list[str], sizes: tuple[int, ...], scope: str) -> Callable[[], None]:
    """Compiles anew and trains one step of each batch size."""

    def run() -> None:
        with fresh_compiler():
            torch.compile(torch.sin)(torch.ones(1))  # what the compiler loads once is nobody's cost
            words = ["runtime.compile=true", f"runtime.compile_scope={scope}", "runtime.cuda_graph=false"]
            workload = Workload(scope, [*overrides, *words])
            for size in sizes:
                workload.loader.batch_size = size  # pyright: ignore[reportAttributeAccessIssue]
                workload.one_step()

    return run


def strided_call(device: torch.device, wrong: bool) -> Callable[[], None]:
    """The op between two blocks on a stream whose channels are neighbours, and on one whose tokens are."""
    batch, tokens, dim = (64, 256, 768) if device.type == "cuda" else (8, 64, 128)
    x = torch.randn(batch, dim, tokens, device=device).transpose(1, 2)
    x = x if wrong else x.contiguous()
    gate, scale, shift = torch.randn(3, batch, dim, device=device)

    def run() -> None:
        for _ in range(20):
            add_norm(x, gate, x, scale, shift)

    return run


def mistakes(overrides: list[str], steps: int, device: torch.device) -> Iterator[Mistake]:
    """All of them, one after the other, so that what one needs can be freed before the next."""
    workload = Workload("step", overrides)
    plain = each_step(workload, steps, lambda loss: None)
    cuda = device.type == "cuda"
    no_cache = None if cuda else "there is no cache of memory on a CPU"
    empty = each_step(workload, steps, lambda loss: torch.cuda.empty_cache())
    yield Mistake("empty_cache() every step", empty, plain, no_cache)
    yield Mistake(".item() every step", each_step(workload, steps, lambda loss: loss.item()), plain)
    yield Mistake("the encoder inside the loop", encoder_in_the_loop(workload, steps), plain)
    small = workload.batch_size
    sizes = (small, small // 2, small // 4, 3 * small // 4)
    yield Mistake(
        "changing shapes: the whole model compiled, not its blocks",
        changing_shapes(overrides, sizes, "model"),
        changing_shapes(overrides, sizes, "blocks"),
    )
    yield Mistake(
        "changing shapes: blocks compiled, not a constant shape",
        changing_shapes(overrides, sizes, "blocks"),
        changing_shapes(overrides, (small,) * len(sizes), "blocks"),
    )
    yield Mistake("a non-contiguous call", strided_call(device, wrong=True), strided_call(device, wrong=False))


def clock_error(workload: Workload, steps: int) -> dict[str, Any]:
    """How much too fast a step looks to a clock that does not wait for the device."""

    def unsynchronised() -> float:
        start = time.perf_counter()
        workload.run(steps)
        return time.perf_counter() - start

    seen, true = [], []
    for _ in range(5):
        true.append(seconds(lambda: workload.run(steps), workload.device))
        seconds(lambda: seen.append(unsynchronised()), workload.device)
    return entry("timing without synchronisation (true / seen)", true, seen, steps)


def entry(name: str, wrong: list[float], right: list[float], steps: int) -> dict[str, Any]:
    bad, good = Spread.of([1e3 * s / steps for s in wrong]), Spread.of([1e3 * s / steps for s in right])
    return {
        "name": name,
        **bad.as_json("wrong_ms"),
        **good.as_json("right_ms"),
        "factor": times_as_fast(wrong, right),
    }


def main(words: list[str]) -> None:
    cfg, overrides = parse(BenchConfig, "antipatterns", words, __doc__ or "")
    device = pick_device(compose(overrides).cfg.runtime.device.value)
    torch._dynamo.config.recompile_limit = 64
    entries: list[dict[str, Any]] = []
    for mistake in mistakes(overrides, cfg.steps, device):
        if mistake.reason:
            entries.append({"name": mistake.name, "reason": mistake.reason})
            continue
        compiles = mistake.name.startswith("changing")
        runs = {"wrong": mistake.wrong, "right": mistake.right}
        if not compiles:
            for run in runs.values():
                run()
        taken = interleaved(runs, 1 if compiles else cfg.repeats, device)
        entries.append(entry(mistake.name, taken["wrong"], taken["right"], 1 if compiles else cfg.steps))
        print(f"{entries[-1]['name']}: ×{entries[-1]['factor']:.2f}", flush=True)
    entries.append(clock_error(Workload("clock", overrides), cfg.steps))
    rows: list[tuple[object, ...]] = [("mistake", "wrong ms", "right ms", "factor", "")]
    for e in entries:
        figures = (
            (f"{e['wrong_ms']:.2f}", f"{e['right_ms']:.2f}", f"×{e['factor']:.2f}") if "factor" in e else (None,) * 3
        )
        rows.append((e["name"], *figures, e.get("reason", "")))
    print(f"\n{table(rows)}")
    assert cfg.out is not None
    settings = {"setting": cfg.setting, "overrides": overrides, "steps": cfg.steps}
    write_result(cfg.out, settings | {"antipatterns": entries}, device, table(rows))
