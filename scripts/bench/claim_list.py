"""The claims of the usual guides to fast training: what is promised, who says it, our key, how it
is measured here.

A claim without a measure says why. Sources were looked up; what they say stands in brackets behind
the address.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from scripts.bench import claim_measures as measures
from scripts.bench.practices import CUDA, EMPTY_CACHE, Practice, step

UNSOURCED = "often repeated; no source found"
FLASH = "https://arxiv.org/abs/2307.08691"
FLASH_REPOSITORY = "https://github.com/Dao-AILab/flash-attention"
TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
SEMANTICS = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
MIXED = "https://pytorch.org/blog/what-every-user-should-know-about-mixed-precision-training-in-pytorch/"
GRAPHS = "https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/"
TRANSFORMERS = "https://huggingface.co/docs/transformers/v4.47.1/perf_train_gpu_one"
DIFFUSERS = "https://docs.pytorch.org/devlogs/inductor/2026-05-11-torch-compile-and-diffusers/"
LEADERBOARD = "https://huggingface.co/spaces/optimum/llm-perf-leaderboard/discussions/21"
SHARDED = "https://arxiv.org/abs/2304.11277"
SEVERAL = "needs several GPUs"
ANY = (1.0, inf)
"""A gain that is promised without a figure."""

CHECKPOINTED = step("runtime.gradient_checkpointing=true")
COMPILED = step("runtime.compile=true")


def of_attention() -> Iterator[Practice]:
    """Flash over math attention by itself at three lengths, its memory at the longest, and in a
    step."""
    flash = Practice("", None, CUDA, key="runtime.attention", ways=("math", "flash"))
    for tokens in (256, 1024, 4096):
        times, peaks = measures.attention(tokens)
        source = f"{FLASH} (2–4× over optimised baselines, without a length)"
        name = f"flash attention, {tokens:,} tokens"
        yield flash._replace(name=name, measure=times, claimed=(2, 4), source=source, seconds=8.0)
    source = f"{FLASH_REPOSITORY} (linear instead of quadratic: 20× at 4K)"
    name = f"flash attention, memory at {tokens:,} tokens"
    yield flash._replace(
        name=name, measure=peaks, claimed=(20, 20), source=source, of="GiB", seconds=4.0
    )
    yield flash._replace(
        name="flash attention, a step of dit",
        measure=measures.attention_steps,
        claimed=(1.15, 3),
        source=(
            "https://arxiv.org/abs/2205.14135 (15 % on BERT-large at 512 tokens, 3× on GPT-2 at 1K)"
        ),
        seconds=30.0,
    )
    yield Practice(
        "FlashAttention-3 over FlashAttention-2",
        None,
        claimed=(1.5, 2),
        source="https://arxiv.org/abs/2407.08608 (FP16 on an H100)",
        reason=(
            "`runtime.attention=flash3` needs flash_attn_interface, built from source for Hopper "
            "with CUDA ≥ 12.3"
        ),
    )


def of_precision() -> Iterator[Practice]:
    """TF32, bf16, 8 bits."""
    half = "runtime.precision=bf16"
    eager = "runtime=eager"
    tf32 = Practice(
        "TF32, a step", step("runtime.tf32=true", eager), "runtime.tf32=true", key="runtime.tf32"
    )
    bf16 = Practice("", None, half, key="runtime.precision", ways=("fp32", "bf16"))
    yield tf32._replace(claimed=(2, 3), source=f"{TRANSFORMERS} (up to 3×)")
    yield tf32._replace(
        name="TF32, error of a product",
        measure=measures.product_error,
        claimed=(0.1, 0.22),
        unit="% error",
        source=f"{SEMANTICS} (0.0022 of the mean magnitude, fp32 0.000039; 0.1 % is {UNSOURCED})",
        ways=("TF32", "fp32"),
        of="",
        seconds=5.0,
    )
    yield bf16._replace(
        name="bf16 over fp32, matrix products",
        measure=measures.product_rates,
        claimed=(8, 16),
        source=f"{MIXED} (float16, peak, A100: 16×)",
        ways=("bf16", "fp32"),
        of="TFLOP/s",
        seconds=10.0,
    )
    source = f"{TUNING} (up to 3×)"
    yield bf16._replace(
        name="bf16 over fp32, a step", measure=step(half, eager), claimed=(2, 3), source=source
    )
    yield bf16._replace(
        name="bf16 over fp32, memory",
        measure=measures.memory([eager], [eager, half]),
        needs=CUDA,
        claimed=(50, 50),
        unit="% saved",
        source=UNSOURCED,
        of="GiB",
    )
    yield Practice(
        "fp8 over bf16, a step",
        step("runtime.precision=fp8", half, "runtime.compile=true"),
        "runtime.precision=fp8",
        True,
        180.0,
        claimed=(1.5, 1.5),
        source=(
            "https://pytorch.org/blog/training-using-float8-fsdp2/ (up to 1.5×, Llama models on "
            "many H100)"
        ),
        key="runtime.precision",
        ways=("bf16", "fp8"),
    )


def of_compiling() -> Iterator[Practice]:
    """Compiling, CUDA graphs, caches."""
    compiled = Practice(
        "compiling, a step", COMPILED, "runtime.compile=true", True, 90.0, key="runtime.compile"
    )
    yield compiled._replace(claimed=(10, 30), unit="% faster", source=UNSOURCED)
    yield compiled._replace(
        name="compiling, a step, as PyTorch 2 was announced",
        claimed=(51, 51),
        unit="% faster",
        source=(
            "https://pytorch.org/get-started/pytorch-2.0/ (A100, mixed precision, mean of 163 "
            "models; fp32 21 %)"
        ),
    )
    yield compiled._replace(
        name="compiling blocks, not the model: start-up",
        measure=measures.warm_ups,
        key="runtime.compile_scope",
        claimed=(7, 7),
        source=f"{DIFFUSERS} (Flux, 67 s to 9.6 s)",
        ways=("model", "blocks"),
        of="s",
        seconds=180.0,
    )
    yield compiled._replace(
        name="start-up with a warm compiler cache",
        measure=measures.compiler_cache,
        claimed=ANY,
        source=(
            "https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html (no "
            "figure)"
        ),
        ways=("cold", "warm"),
        of="s",
        seconds=150.0,
    )
    yield compiled._replace(
        name="reduce-overhead at a small batch",
        measure=measures.reduce_overhead,
        needs=CUDA,
        key="runtime.compile_mode",
        claimed=ANY,
        source=(
            "https://docs.pytorch.org/docs/stable/generated/torch.compile.html (for small "
            "batches, no figure)"
        ),
        ways=("default", "reduce-overhead"),
        seconds=180.0,
    )
    yield Practice(
        "a CUDA graph at a small batch",
        step("runtime.cuda_graph=true", "batch_size=8"),
        "runtime.cuda_graph=true",
        claimed=(5, 5),
        source=f"{GRAPHS} (the captured part of Mask R-CNN; 1.7× for all of it)",
        key="runtime.cuda_graph",
    )


def of_memory() -> Iterator[Practice]:
    """Checkpointing, the allocator, the optimizer, offloading."""
    checkpointed = Practice(
        "checkpointing, a step", CHECKPOINTED, unit="% slower", key="runtime.gradient_checkpointing"
    )
    yield checkpointed._replace(claimed=(10, 10), source=UNSOURCED)
    yield checkpointed._replace(
        name="checkpointing, a step, by its paper and Transformers",
        claimed=(20, 30),
        source=(
            "https://arxiv.org/abs/1604.06174 (30 %, ResNet with 1,000 layers; 20 %: "
            f"{TRANSFORMERS})"
        ),
    )
    words = [["runtime=fast", f"runtime.gradient_checkpointing={on}"] for on in ("false", "true")]
    yield checkpointed._replace(
        name="checkpointing, memory",
        measure=measures.memory(*words),
        needs=CUDA,
        claimed=(50, 50),
        unit="% saved",
        source=UNSOURCED,
        of="GiB",
    )
    yield EMPTY_CACHE._replace(
        claimed=(1, 2),
        unit="× as long",
        source=(
            "https://github.com/huggingface/transformers/pull/31530 (a slowdown, no figure; 2× "
            "is often repeated)"
        ),
        key="runtime.empty_cache_at_eval",
        ways=("with", "without"),
    )
    yield Practice(
        "nvidia-smi shows what is reserved",
        measures.smi_and_reserved,
        CUDA,
        claimed=(0, 0),
        unit="GiB apart",
        source=f"{LEADERBOARD} (reserved and non-releasable)",
        ways=("memory_reserved", "nvidia-smi"),
        of="GiB",
    )
    yield Practice(
        "fused AdamW: norm, clipping and update",
        measures.optimizer_phase,
        claimed=(10, 20),
        unit="% saved",
        source=UNSOURCED,
        key="runtime.fused_adamw",
        ways=("unfused", "fused"),
    )
    yield Practice(
        "CPU offload, memory",
        None,
        claimed="60 %",
        source=UNSOURCED,
        key="runtime.parallel.cpu_offload",
        reason=f"{SEVERAL}: it is an option of sharding",
    )


def of_data() -> Iterator[Practice]:
    """Loaders, copies, autoencoders, storage."""
    yield Practice(
        "resident indexing over a DataLoader",
        measures.resident_over_dataloader,
        claimed=(10, 50),
        source=UNSOURCED,
        key="data=resident",
        ways=("DataLoader", "resident"),
    )
    yield Practice(
        "copying a batch to the device",
        measures.batch_to_device,
        CUDA,
        claimed=(10, 50),
        unit="ms",
        source=UNSOURCED,
        key="data=resident",
        ways=("collating", "copying pinned memory"),
        seconds=10,
    )
    yield Practice(
        "cuDNN's autotuner, encoding images",
        measures.autotuner,
        "runtime.cudnn_benchmark=true",
        claimed=ANY,
        source=f"{TUNING} (no figure)",
        key="runtime.cudnn_benchmark",
        seconds=40,
    )
    yield Practice(
        "latents over pixels: numbers to store",
        measures.stored,
        claimed=(64, 64),
        source=(
            "https://huggingface.co/blog/stable_diffusion (taking latents to have 3 channels; "
            "they have 4)"
        ),
        key="encoder=sd",
        ways=("pixels", "latents"),
        of="numbers",
        seconds=1,
    )
    storage = (
        "the guides do not say how many images of which shape and type, so it cannot be computed "
        "again"
    )
    yield Practice(
        "pixels of a whole data set", None, claimed="2.15 TB", source=UNSOURCED, reason=storage
    )
    yield Practice(
        "workers × prefetch_factor",
        None,
        claimed="to be tuned",
        source=f"{TUNING} (num_workers, no figure)",
        key="data=webdataset",
        reason="resident data has no workers; `bench data` measures 0, 1 and 2 of streamed data",
    )


def of_the_ladder() -> Iterator[Practice]:
    """A ladder as guides have it, over the newcomer's loop with a DataLoader."""
    words: list[str] = []
    yield Practice(
        "ladder 1: latents on the device", measures.rung(), key="data=resident", source=UNSOURCED
    )
    for i, (name, word, compiles) in enumerate(
        (
            ("bf16", "runtime.precision=bf16", False),
            ("fused AdamW", "runtime.fused_adamw=true", False),
            ("compiled blocks", "runtime.compile=true", True),
            ("CUDA graph", "runtime.cuda_graph=true", True),
        ),
        start=2,
    ):
        words.append(word)
        needs = CUDA if word == "runtime.cuda_graph=true" else "runtime.precision=bf16"
        key = word.partition("=")[0]
        measure = measures.rung(*words)
        seconds = 90 if compiles else 30
        yield Practice(
            f"ladder {i}: + {name}", measure, needs, compiles, seconds, source=UNSOURCED, key=key
        )


def of_several_gpus() -> Iterator[Practice]:
    """What one GPU cannot show."""
    several = Practice("ddp over n GPUs", None, key="runtime.parallel.mode", reason=SEVERAL)
    yield several._replace(claimed="near n ×", source="https://arxiv.org/abs/2006.15704 (256 GPUs)")
    yield several._replace(
        name="fsdp over n GPUs", claimed="near n ×", source=f"{SHARDED} (in TFLOPS)"
    )
    yield several._replace(name="larger models by sharding", claimed="4 ×", source=UNSOURCED)
    name = "larger models by sharding, offload and checkpointing"
    yield several._replace(name=name, claimed="20 ×", source=UNSOURCED)
    price = "a price, not a measurement"
    yield Practice("cost of a run", None, claimed="$ an hour", source=UNSOURCED, reason=price)


CLAIMS = (
    *of_attention(),
    *of_precision(),
    *of_compiling(),
    *of_memory(),
    *of_data(),
    *of_the_ladder(),
    *of_several_gpus(),
)
