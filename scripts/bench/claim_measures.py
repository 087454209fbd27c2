"""What the claims of guides are held against (scripts/bench/claims.py): each function measures one
thing two ways."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import default_collate

from common.files import ROOT
from scripts.bench.data import random_autoencoder
from scripts.bench.naive import NaiveLoop
from scripts.bench.practices import Bench, Measure, NotHereError, Pair
from scripts.bench.step import phases_of
from scripts.timing import fresh_compiler, rates, seconds, synchronise
from training.components import build_loader
from training.config.compose import compose

COMPILED = ("runtime=fast", "runtime.compile=true")


def workers(bench: Bench) -> int:
    """Processes of a newcomer's DataLoader."""
    return 4 if bench.device.type == "cuda" else 0


def resident_over_dataloader(bench: Bench) -> Pair:
    """A batch from the newcomer's DataLoader of samples in memory, and by indexing on the
    device."""
    naive = NaiveLoop(bench.overrides, storage="memory", num_workers=workers(bench))
    loader = bench.workload("runtime=eager").loader

    def read(batches: Iterator[object]) -> None:
        for _ in range(20):
            next(batches)

    return bench.in_turn(
        lambda: read(naive.batches), lambda: read(loader), 20, lambda name: naive.prepare()
    )


def product_rates(bench: Bench) -> Pair:
    """TFLOP/s of a square product in bf16 and in fp32."""
    found = rates(bench.device)
    return Pair([found["bf16_product_tflops"]], [found["fp32_product_tflops"]])


def product_error(bench: Bench) -> Pair:
    """The largest error of a product in TF32, and in fp32, over the mean magnitude of the product
    in fp64."""
    n = 10_240 if bench.device.type == "cuda" else 256
    a, b = torch.randn(2, n, n, dtype=torch.float64, device=bench.device)
    exact = a @ b
    before = torch.get_float32_matmul_precision()
    found = []
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        error = (a.float() @ b.float()).double().sub_(exact).abs_().max()
        found.append([(error / exact.abs().mean()).item()])
    torch.set_float32_matmul_precision(before)
    return Pair.of(found)


def optimizer_phase(bench: Bench) -> Pair:
    """Norm, clipping, decision and update, unfused and fused."""
    pair = [
        bench.workload("runtime=eager", f"runtime.fused_adamw={on}") for on in ("false", "true")
    ]
    found: list[list[float]] = [[], []]
    for turn in range(bench.cfg.repeats):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            found[i].append(phases_of(pair[i], bench.cfg.steps)[0]["optimizer"])
    return Pair.of(found)


def memory(one: Sequence[str], other: Sequence[str]) -> Measure:
    """Bytes that a training step with the overrides `one` reserves at most, and with `other`."""
    return lambda bench: Pair.of(
        [float(bench.workload(*words).memory_peak or 0)] for words in (one, other)
    )


def attention(tokens: int) -> tuple[Measure, Measure]:
    """Measures milliseconds, and bytes allocated at most, of both passes of attention by PyTorch's
    products and softmax (`math`, in the inputs' own precision, which PyTorch has to be told) and by
    its flash kernel.

    As the authors of FlashAttention measure it: 16,384 tokens in all, 32 heads of 64 channels,
    bf16.
    """

    def runs(bench: Bench) -> list[Callable[[], object]]:
        cuda = bench.device.type == "cuda"
        shape = (max(1, 16_384 // tokens), 32, tokens, 64) if cuda else (1, 2, tokens, 16)
        dtype = torch.bfloat16 if cuda else torch.float32
        q, k, v = (
            torch.randn(shape, device=bench.device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        gradient = torch.randn_like(q)

        def run(backend: SDPBackend) -> None:
            with sdpa_kernel(backend):
                torch.autograd.grad(scaled_dot_product_attention(q, k, v), (q, k, v), gradient)

        return [lambda: run(SDPBackend.MATH), lambda: run(SDPBackend.FLASH_ATTENTION)]

    def in_its_own_precision(measure: Callable[[Bench], Pair]) -> Measure:
        def measured(bench: Bench) -> Pair:
            before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
            try:
                return measure(bench)
            finally:
                torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)

        return measured

    def times(bench: Bench) -> Pair:
        def several(run: Callable[[], object]) -> Callable[[], object]:
            return lambda: [run() for _ in range(bench.cfg.steps)]

        one, other = map(several, runs(bench))
        return bench.in_turn(one, other, bench.cfg.steps)

    def peaks(bench: Bench) -> Pair:
        return Pair.of([peak_beyond(run, bench.device)] for run in runs(bench))

    return in_its_own_precision(times), in_its_own_precision(peaks)


def peak_beyond(run: Callable[[], object], device: torch.device) -> float:
    """Bytes that a call allocates at most beyond those allocated before; on a GPU."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronise(device)
    return float(torch.cuda.max_memory_allocated(device) - before)


def attention_steps(bench: Bench) -> Pair:
    """A training step of the attention model of the same size, with math and with flash
    attention."""
    size = next(w for w in reversed(bench.overrides) if w.startswith("model=")).rpartition("_")[2]
    model = (f"model=dit_{size}", "runtime=fast")
    math, flash = (
        bench.workload(*model, f"runtime.attention={name}") for name in ("math", "flash")
    )
    return bench.steps_of(math, flash)


def reduce_overhead(bench: Bench) -> Pair:
    """A step at a small batch with the model compiled, and with Inductor's CUDA graphs too."""
    whole = (*COMPILED, "runtime.compile_scope=model", "batch_size=8")
    base = bench.workload(*whole)
    graphs = bench.workload(*whole, "runtime.compile_mode=reduce-overhead")
    pair = bench.steps_of(base, graphs)
    if skipped := torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]:
        raise NotHereError(
            f"Inductor compiled the model and captured no CUDA graph of {skipped} of its graphs"
        )
    return pair


def warm_ups(bench: Bench) -> Pair:
    """Seconds of the warm-up with the whole model as one graph, and with its blocks; nothing is
    cached."""
    found = []
    for scope in ("model", "blocks"):
        with fresh_compiler():
            workload = bench.workload(*COMPILED, f"runtime.compile_scope={scope}")
        found.append([workload.warm_up_seconds])
    return Pair.of(found)


STARTED = (
    "import sys; from scripts.bench.workload import Workload; "
    "print(Workload(sys.argv[1:]).warm_up_seconds)"
)


def compiler_cache(bench: Bench) -> Pair:
    """Seconds of the warm-up of a process that finds the compiler's caches empty, and of the same
    command once more."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        command = [sys.executable, "-c", STARTED, *bench.overrides, *COMPILED]
        found = []
        for _ in range(2):
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(
                    "a start with its own cache failed: "
                    f"{(done.stderr.strip() or '?').splitlines()[-1]}"
                )
            found.append([float(done.stdout.splitlines()[-1])])
    return Pair.of(found)


def batch_to_device(bench: Bench) -> Pair:
    """Collating a batch of single samples on the host, and copying it from pinned memory to the
    device."""
    cfg = compose(bench.overrides).cfg
    spec = build_loader(cfg.data, cfg.seed, cfg.batch_size, bench.device).spec
    samples = [
        (torch.randn(spec.channels, spec.height, spec.width), i) for i in range(cfg.batch_size)
    ]
    pageable = default_collate(samples)
    pinned = [part.pin_memory() if bench.device.type == "cuda" else part for part in pageable]
    count = 20

    def copy(parts: Sequence[torch.Tensor]) -> None:
        for _ in range(count):
            for part in parts:
                part.to(bench.device, non_blocking=True)

    pair = bench.in_turn(
        lambda: [default_collate(samples) for _ in range(count)], lambda: copy(pinned), count
    )
    return pair._replace(
        beside={
            "copying from pageable memory": 1e3
            * seconds(lambda: copy(pageable), bench.device)
            / count
        }
    )


def autotuner(bench: Bench) -> Pair:
    """Encoding images with an autoencoder of Stable Diffusion's shape, without cuDNN's autotuner
    and with it.

    PyTorch keeps a convolution's plan by shape and thread, however it was found, and looks there
    first. So each way has a thread of its own; the flag alone would change nothing after the first
    call.
    """
    encoder = random_autoencoder(bench.device)
    count, side = (64, 256) if bench.device.type == "cuda" else (2, 16)
    images = torch.randn(count, 3, side, side, device=bench.device)

    def encode() -> None:
        with torch.no_grad(), torch.amp.autocast(bench.device.type, torch.bfloat16):
            for part in images.split(32):
                encoder.encode(part)

    def switch(name: str) -> None:
        torch.backends.cudnn.benchmark = name == "other"

    before = torch.backends.cudnn.benchmark
    try:
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            return bench.in_turn(
                lambda: one.submit(encode).result(),
                lambda: other.submit(encode).result(),
                1,
                switch,
            )
    finally:
        torch.backends.cudnn.benchmark = before


def nvidia_smi(device: torch.device) -> Callable[[str], str]:
    """Asks nvidia-smi about a GPU: `ask("gpu=memory.used")` returns lines of numbers, of memory in
    MiB."""
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"

    def ask(query: str) -> str:
        command = ["nvidia-smi", gpu, f"--query-{query}", "--format=csv,noheader,nounits"]
        try:
            return subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=10
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise NotHereError(f"nvidia-smi does not answer: {error}") from error

    return ask


def smi_beside(reserved: int, allocated: int, pid: int, ask: Callable[[str], str]) -> Pair:
    """GiB that PyTorch's allocator has reserved, and that nvidia-smi ascribes to the process `pid`.

    The CUDA context, loaded kernels and what libraries allocate by themselves are in the second
    only. Where nvidia-smi does not see the process, as in a container, all that is used of the GPU
    stands in its place, and says so.
    """
    beside = {"memory_allocated": allocated / 2**30}
    listed = (line.split(",") for line in ask("compute-apps=pid,used_memory").splitlines())
    used = sum(float(mib) for number, mib in listed if int(number) == pid and mib.strip().isdigit())
    if not used:
        used = float(ask("gpu=memory.used"))
        beside["nvidia-smi of the whole GPU, as it does not list this process"] = used / 2**10
    return Pair([reserved / 2**30], [used / 2**10], beside)


def smi_and_reserved(bench: Bench) -> Pair:
    """The same after a training step."""
    workload = bench.workload()
    workload.run(1)
    synchronise(bench.device)
    held = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    return smi_beside(*held, os.getpid(), nvidia_smi(bench.device))


def rung(*words: str) -> Measure:
    """A step of the newcomer's loop with a DataLoader, and of this framework with `words`; without
    any, of the newcomer's loop with latents on the device."""

    def measure(bench: Bench) -> Pair:
        newcomer = NaiveLoop(bench.overrides, storage="memory", num_workers=workers(bench))
        other = (
            bench.workload("runtime=eager", *words)
            if words
            else NaiveLoop(bench.overrides, storage="resident")
        )
        return bench.steps_of(newcomer, other)

    return measure


def stored(bench: Bench) -> Pair:
    """Numbers in an image of 512 by 512 pixels, and in its latents: 4 channels, each side an
    eighth."""
    return Pair([3.0 * 512**2], [4.0 * (512 // 8) ** 2])
